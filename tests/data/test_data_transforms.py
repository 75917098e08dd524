import itertools
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from data_files import four_colours, smooth_photo

import prototree.backbones.torchvision_guard  # noqa: F401 # isort: skip
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from prototree.backbones.preprocessing import Preprocessing
from prototree.data.transforms import AUGMENTATIONS, Augmentation, Colours, Recoloured, augmentation, to_input
from prototree.errors import ConfigError

CUB, CARS = Preprocessing(), Preprocessing(resize=256)


@pytest.mark.parametrize("name", AUGMENTATIONS)
@pytest.mark.parametrize("preprocessing", [CUB, CARS, Preprocessing(size=32, resize=40, interpolation="bicubic")])
def test_every_augmentation_gives_an_input(name: str, preprocessing: Preprocessing) -> None:
    tensor = augmentation(name, preprocessing)(smooth_photo((300, 200)))
    assert tensor.shape == (3, preprocessing.size, preprocessing.size)
    assert tensor.dtype == torch.float32
    assert tensor.is_contiguous()
    assert bool(tensor.isfinite().all())


@pytest.mark.parametrize("name", ["cub", "cars", "light", "colour", "strong"])
def test_chance_comes_from_torch_alone(name: str) -> None:
    transform = augmentation(name, Preprocessing(size=28, resize=32))
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(transform(smooth_photo()))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_unknown_name() -> None:
    with pytest.raises(ConfigError, match="unknown augmentation 'birds'; expected cub, cars, light, colour"):
        augmentation("birds", CUB)


def steps_of(name: str) -> dict[str, v2.Transform]:
    transform = augmentation(name, CUB)
    assert isinstance(transform, Augmentation)
    assert isinstance(transform.steps, v2.RandomOrder)
    return {type(step).__name__: step for step in transform.steps.transforms}


@pytest.mark.parametrize(
    ("name", "hue", "rotation", "translation", "distortion"),
    [("cub", 0.02, 10.0, (0.05, 0.05), 0.2), ("cars", 0.4, 15.0, None, 0.5)],
)
def test_values_of_the_paper(
    name: str, hue: float, rotation: float, translation: tuple[float, float] | None, distortion: float
) -> None:
    steps = steps_of(name)
    assert sorted(steps) == ["ColorJitter", "RandomAffine", "RandomHorizontalFlip", "RandomPerspective"]
    jitter, affine, perspective = steps["ColorJitter"], steps["RandomAffine"], steps["RandomPerspective"]
    assert tuple(jitter.brightness) == tuple(jitter.contrast) == tuple(jitter.saturation) == (0.6, 1.4)
    assert tuple(jitter.hue) == (-hue, hue)
    assert steps["RandomHorizontalFlip"].p == 0.5
    assert list(affine.degrees) == [-rotation, rotation]
    assert list(affine.shear) == [-2.0, 2.0]
    assert affine.translate == translation
    assert affine.scale is None
    assert (perspective.distortion_scale, perspective.p) == (distortion, 0.5)


def test_strong_adds_trivial_augment() -> None:
    transform = augmentation("strong", CUB)
    assert isinstance(transform, Augmentation)
    assert isinstance(transform.steps, v2.Compose)
    assert isinstance(transform.steps.transforms[0], v2.TrivialAugmentWide)


@pytest.mark.parametrize("preprocessing", [CUB, CARS, Preprocessing(size=96, resize=128, interpolation="bicubic")])
def test_to_input_is_torchvisions_resize_crop_and_normalise(preprocessing: Preprocessing) -> None:
    reference = v2.Compose(
        [
            v2.Resize((preprocessing.resize, preprocessing.resize), v2.InterpolationMode(preprocessing.interpolation)),
            v2.CenterCrop(preprocessing.size),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(preprocessing.mean, preprocessing.std),
        ]
    )
    photo = smooth_photo((500, 375))
    torch.testing.assert_close(to_input(photo, preprocessing), torch.as_tensor(reference(photo)), rtol=0, atol=1e-5)
    assert torch.equal(augmentation("none", preprocessing)(photo), to_input(photo, preprocessing))


def test_white_and_black_are_normalised() -> None:
    tensor = to_input(Image.new("RGB", (8, 8), "white"), Preprocessing(size=4, resize=4))
    expected = (1 - np.array(CUB.mean)) / np.array(CUB.std)
    assert tensor[:, 0, 0].tolist() == pytest.approx(expected, abs=1e-6)


def test_scale_is_the_same_in_training_and_at_test_time() -> None:
    """The crop is cut out, not squashed: a stripe keeps its width."""
    preprocessing = Preprocessing(size=48, resize=64, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    photo = Image.new("RGB", (128, 128))
    photo.paste((255, 255, 255), (56, 0, 72, 128))
    training = Augmentation(v2.Identity(), preprocessing)
    for tensor in (to_input(photo, preprocessing), *(training(photo) for _ in range(5))):
        assert float(tensor[0, 10].sum()) == pytest.approx(8.0, abs=0.1)


def test_random_crops_reach_every_corner() -> None:
    preprocessing = Preprocessing(size=1, resize=2, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    training = Augmentation(v2.Identity(), preprocessing)
    torch.manual_seed(0)
    seen = {tuple(training(four_colours((2, 2))).flatten().tolist()) for _ in range(50)}
    assert seen == {(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (1.0, 1.0, 0.0)}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_colours_change_as_torchvision_changes_them(order: tuple[int, ...]) -> None:
    preprocessing = Preprocessing(size=64, resize=64, mean=(0.1, 0.2, 0.3), std=(0.5, 1.0, 2.0))
    pale = Image.blend(smooth_photo((90, 70)), Image.new("RGB", (90, 70), "grey"), 0.5)  # nothing is cut off
    factors = 0.85, 1.15, 0.8
    expected = pale.resize((64, 64), Image.Resampling.BILINEAR)
    steps = (functional.adjust_brightness, functional.adjust_contrast, functional.adjust_saturation)
    for which in order:
        expected = steps[which](expected, factors[which])
    found = Recoloured(preprocessing, factors, order)(pale)
    # Pillow rounds down after each of three steps.
    apart = (found - to_input(expected, preprocessing)) * torch.tensor(preprocessing.std).view(3, 1, 1)
    assert float(apart.min()) > -0.5 / 255
    assert float(apart.max()) < 3 / 255


def test_colours_are_drawn_evenly_and_crops_reach_every_corner() -> None:
    torch.manual_seed(0)
    drawn = [Colours(Preprocessing(size=1, resize=2), most=0.2).drawn() for _ in range(2000)]
    factors = torch.tensor([one.factors for one in drawn])
    assert 0.8 <= float(factors.min()) < 0.802
    assert 1.198 < float(factors.max()) <= 1.2
    torch.testing.assert_close(factors.mean(dim=0), torch.ones(3), atol=0.01, rtol=0)
    assert len({one.order for one in drawn}) == 6
    assert {one.corner for one in drawn} == {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_can_be_sent_to_worker_processes(name: str) -> None:
    original = augmentation(name, CUB)
    assert repr(pickle.loads(pickle.dumps(original))) == repr(original)
