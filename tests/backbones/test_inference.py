"""The frozen network: folding, pieces, onnxruntime, and many small computations on threads."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from prototree.backbones import inference
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.backbones.inference import (
    AUTO,
    MIN_IMAGES_FOR_ONNX,
    ONNXRUNTIME,
    TORCH,
    Frozen,
    FrozenFeatures,
    engine_for,
    folded,
    frozen,
    frozen_features,
    piece_size,
    thread_map,
)
from prototree.core.model import ProtoTree
from prototree.core.topology import Topology
from prototree.errors import ConfigError, MissingExtraError

CPU = torch.device("cpu")


def made() -> Backbone:
    torch.manual_seed(0)
    return Backbone("test_resnet", None, image_size=64, split=False).eval()


@pytest.fixture
def small() -> Backbone:
    return made()


@pytest.fixture(scope="module")
def converted_once() -> bytes:
    """A network for onnxruntime; converting takes seconds."""
    for package in (ONNXRUNTIME, *inference.NEEDED):
        pytest.importorskip(package, reason="needs the extra 'export'")
    images = torch.zeros(piece_size(64), 3, 64, 64)
    graph = inference.to_onnx(inference._SplitFeatures(folded(made())), images, ["maps"], fixed_batch=True)
    return bytes(graph.SerializeToString())


@pytest.fixture
def conversions(converted_once: bytes, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts how often a network would have been converted."""
    counted: list[int] = []

    def to_onnx(*_: object, **__: object) -> SimpleNamespace:
        counted.append(1)
        return SimpleNamespace(SerializeToString=lambda: converted_once)

    monkeypatch.setattr(inference, "to_onnx", to_onnx)
    return counted


def pictures(n: int, size: int = 64) -> torch.Tensor:
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(n))


def test_maps_of_torch_are_those_of_the_network_whatever_the_batch(small: Backbone) -> None:
    images, run = pictures(piece_size(64) + 3), frozen(small)
    assert run.engine == TORCH
    with torch.no_grad():
        expected = small.split_features(images)
    together = run(images)
    torch.testing.assert_close(together, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    assert torch.equal(torch.cat([run(images[:1]), run(images[1:6]), run(images[6:])]), together)
    assert torch.equal(run(images.flip(0)).flip(0), together)
    assert run(images[:0]).shape == expected[:0].shape


def test_onnxruntime_decides_as_torch_does(small: Backbone, conversions: list[int]) -> None:
    run, images = frozen(small, ONNXRUNTIME), pictures(24)
    assert run.engine == ONNXRUNTIME
    by_torch, maps = frozen(small)(images), run(images)
    torch.testing.assert_close(maps, by_torch, rtol=1e-3, atol=1e-4 * float(by_torch.abs().max()))
    assert torch.equal(torch.cat([run(images[:1]), run(images[1:6]), run(images[6:])]), maps)
    features = FeatureExtractor(small, prototype_dim=8)
    tree = ProtoTree(Topology.full(3), features, [str(k) for k in range(4)]).eval()
    tree.leaf_logits.data.normal_(generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, other = (tree.decode(tree.forward_features(features.from_map(found))) for found in (by_torch, maps))
    assert torch.equal(one.labels("greedy"), other.labels("greedy"))
    assert torch.equal(one.max_path.leaf, other.max_path.leaf)
    torch.testing.assert_close(one.soft, other.soft, rtol=1e-3, atol=1e-5)
    assert torch.equal(frozen(small, ONNXRUNTIME)(images), maps), "from the file, the same bits"
    assert len(conversions) == 1


@pytest.mark.slow
def test_the_split_features_of_a_transformer_can_be_converted() -> None:
    for package in (ONNXRUNTIME, *inference.NEEDED):
        pytest.importorskip(package, reason="needs the extra 'export'")
    torch.manual_seed(0)
    backbone = Backbone("vit_tiny_patch16_224", None, image_size=32).eval()
    run, images = frozen(backbone, ONNXRUNTIME), pictures(3, 32)
    with torch.no_grad():
        expected = backbone.split_features(images)
    assert run.engine == ONNXRUNTIME
    torch.testing.assert_close(run(images), expected, rtol=1e-3, atol=1e-3)


def test_a_damaged_file_is_made_anew_and_other_weights_have_another(
    small: Backbone, own_cache: Path, conversions: list[int]
) -> None:
    maps, (file,) = frozen(small, ONNXRUNTIME)(pictures(2)), list((own_cache / "networks").glob("*.onnx"))
    file.write_bytes(file.read_bytes()[:1000])
    assert torch.equal(frozen(small, ONNXRUNTIME)(pictures(2)), maps)
    assert len(conversions) == 2
    with torch.no_grad():
        next(small.parameters()).mul_(1.5)
    assert inference._onnx_file(small) != file
    assert frozen(small, ONNXRUNTIME).engine == TORCH, "a file of other weights is not believed"


def test_many_photos_use_a_converted_network_only_where_it_is_there(small: Backbone, conversions: list[int]) -> None:
    features = FeatureExtractor(small, prototype_dim=8)
    by_torch = frozen_features(features)
    assert by_torch.backbone.engine == TORCH
    assert not conversions
    frozen(small, ONNXRUNTIME)
    converted, images = frozen_features(features), pictures(3)
    assert converted.backbone.engine == ONNXRUNTIME
    torch.testing.assert_close(converted(images), by_torch(images), rtol=1e-3, atol=1e-4)


def test_what_cannot_be_converted_runs_in_torch_and_says_so(
    small: Backbone, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    def refuse(*_: object, **__: object) -> None:
        tried.append(1)
        raise RuntimeError("an operator is unknown\nand much more")

    monkeypatch.setattr(inference, "to_onnx", refuse)
    with caplog.at_level(logging.WARNING):
        run = frozen(small, ONNXRUNTIME)
    assert run.engine == TORCH
    assert "an operator is unknown" in caplog.text
    assert frozen(small, ONNXRUNTIME).engine == TORCH
    assert len(tried) == 1, "what failed once is not tried again"


def test_which_engine_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference.importlib.util, "find_spec", lambda _: object())
    assert engine_for(AUTO, CPU, MIN_IMAGES_FOR_ONNX) == ONNXRUNTIME
    assert engine_for(AUTO, CPU, MIN_IMAGES_FOR_ONNX - 1) == TORCH
    assert engine_for(AUTO, torch.device("cuda"), MIN_IMAGES_FOR_ONNX) == TORCH
    assert engine_for(TORCH, CPU, MIN_IMAGES_FOR_ONNX) == TORCH
    assert engine_for(ONNXRUNTIME, CPU, 1) == ONNXRUNTIME
    with pytest.raises(ConfigError):
        engine_for(ONNXRUNTIME, torch.device("cuda"), 1)
    monkeypatch.setattr(inference.importlib.util, "find_spec", lambda _: None)
    assert engine_for(AUTO, CPU, MIN_IMAGES_FOR_ONNX) == TORCH
    with pytest.raises(MissingExtraError):
        engine_for(ONNXRUNTIME, CPU, 1)


def test_one_picture_of_two_crops_fills_one_piece(small: Backbone) -> None:
    """Pieces are filled up with nothing, which costs as much as an image: crops share one."""
    features = FeatureExtractor(small, prototype_dim=8)
    small.crops = (1.0, 0.7)
    found = frozen_features(features)
    passes: list[int] = []

    def counting(images: torch.Tensor) -> torch.Tensor:
        passes.append(len(images))
        return found.backbone.run(images)

    counted = FrozenFeatures(features, Frozen(TORCH, 2, counting))
    with torch.no_grad():
        torch.testing.assert_close(counted(pictures(1)), features(pictures(1)), rtol=1e-3, atol=1e-4)
    assert passes == [2]


def n_norms(backbone: Backbone) -> int:
    return sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in backbone.net.modules())


@pytest.mark.parametrize(
    ("name", "left"), [("resnet18", 0), ("mobilenetv3_small_050", None), ("densenet121", None), ("convnext_atto", 0)]
)
def test_a_folded_network_computes_the_same_with_fewer_layers(name: str, left: int | None) -> None:
    torch.manual_seed(0)
    backbone = Backbone(name, None, image_size=64)
    for module in backbone.modules():  # statistics that would show if they were lost
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
            module.weight.data.uniform_(0.5, 2)
            module.bias.data.normal_(0, 0.1)
    before, count = {key: tensor.clone() for key, tensor in backbone.state_dict().items()}, n_norms(backbone)
    small = folded(backbone)
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        expected = backbone.eval().split_features(images)
        torch.testing.assert_close(
            small.split_features(images), expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item()
        )
    assert n_norms(small) < count or count == 0
    if left is not None:
        assert n_norms(small) == left
    assert all(torch.equal(tensor, before[key]) for key, tensor in backbone.state_dict().items()), "a copy was folded"


def test_folding_is_the_same_every_time() -> None:
    # Tensors were once told apart by an id that a later tensor can have again, so some norms stayed by chance.
    torch.manual_seed(0)
    backbone = Backbone("tf_efficientnet_lite0", None, image_size=64)
    once, *others = (folded(backbone) for _ in range(4))
    for other in others:
        assert n_norms(other) == n_norms(once) == 0
        pairs = zip(once.state_dict().values(), other.state_dict().values(), strict=True)
        assert all(torch.equal(first, second) for first, second in pairs)


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
def test_results_come_in_order_and_each_is_computed_with_one_thread() -> None:
    found = list(thread_map(lambda item: (item, torch.get_num_threads()), range(20)))
    assert found == [(item, 1) for item in range(20)]
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("_two_threads")
def test_two_are_done_at_a_time_and_an_error_gives_the_threads_back() -> None:
    both = threading.Barrier(2, timeout=60)  # each waits for the other: one after the other would never end
    assert len(list(thread_map(lambda _: both.wait(), range(2)))) == 2
    with pytest.raises(ZeroDivisionError):
        list(thread_map(lambda item: 1 / item, [2, 1, 0]))
    assert torch.get_num_threads() == 2
