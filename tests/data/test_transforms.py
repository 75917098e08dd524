import pytest
import torch
from PIL import Image

from data_files import four_colours, smooth_photo

import prototree.backbones.weights  # noqa: F401 # isort: skip (before torchvision)
from torchvision.transforms import v2

from prototree.backbones.geometry import Preprocessing
from prototree.data.transforms import AUGMENTATIONS, Augmentation, augmentation, eval_transform
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
    with pytest.raises(ConfigError, match="birds"):
        augmentation("birds", CUB)


@pytest.mark.parametrize("name", ["cub", "cars", "light", "colour", "strong"])
def test_chance_comes_from_torch_alone(name: str) -> None:
    transform = augmentation(name, Preprocessing(size=28, resize=32))
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(transform(smooth_photo()))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


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


@pytest.mark.parametrize("preprocessing", [CUB, CARS, Preprocessing(size=96, resize=128, interpolation="bicubic")])
def test_eval_transform_is_torchvisions_resize_crop_and_normalise(preprocessing: Preprocessing) -> None:
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
    torch.testing.assert_close(
        eval_transform(photo, preprocessing), torch.as_tensor(reference(photo)), rtol=0, atol=1e-5
    )
    assert torch.equal(augmentation("none", preprocessing)(photo), eval_transform(photo, preprocessing))


def test_scale_is_the_same_in_training_and_at_test_time() -> None:
    """The crop is cut out, not squashed: a stripe keeps its width."""
    preprocessing = Preprocessing(size=48, resize=64, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    photo = Image.new("RGB", (128, 128))
    photo.paste((255, 255, 255), (56, 0, 72, 128))
    training = Augmentation(v2.Identity(), preprocessing)
    for tensor in (eval_transform(photo, preprocessing), *(training(photo) for _ in range(5))):
        assert float(tensor[0, 10].sum()) == pytest.approx(8.0, abs=0.1)


def test_random_crops_reach_every_corner() -> None:
    preprocessing = Preprocessing(size=1, resize=2, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    training = Augmentation(v2.Identity(), preprocessing)
    torch.manual_seed(0)
    seen = {tuple(training(four_colours((2, 2))).flatten().tolist()) for _ in range(50)}
    assert seen == {(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (1.0, 1.0, 0.0)}
