"""Networks as they were trained: the registry, options of timm, and what a weight file says about itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.nn.functional import conv2d, pad

from conftest import shared
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.backbones.registry import BACKBONES, Origin, parse_options, read_metadata, resolve
from prototree.config import load_preset
from prototree.core import checkpoint
from prototree.core.model import ProtoTree
from prototree.core.topology import Topology
from prototree.errors import CheckpointError, ConfigError, WeightsError

import timm  # isort: skip (after the guard in `backbone`)
import torchvision  # isort: skip

HEADER = {
    "model": "mobilenetv2_050", "options": "pad_type=same", "mean": "0.5,0.4,0.3", "std": "0.5,0.6,0.7",
    "interpolation": "bilinear", "size": "96", "trained_on": "birds", "source": "a shelf", "licence": "MIT",
}  # fmt: skip


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    network = timm.create_model("mobilenetv2_050", pad_type="same", num_classes=3)
    path = tmp_path / "birds.safetensors"
    safetensors.torch.save_file(network.state_dict(), path, HEADER)
    return path


def test_a_file_names_its_network_options_and_preprocessing(weights: Path) -> None:
    backbone = Backbone("auto", weights, image_size=64, feature_level=0).eval()
    assert (backbone.name, backbone.options) == ("mobilenetv2_050", {"pad_type": "same"})
    assert backbone.origin == Origin("birds", "a shelf", "MIT")
    seen = backbone.preprocessing
    assert (seen.mean, seen.std, seen.interpolation) == ((0.5, 0.4, 0.3), (0.5, 0.6, 0.7), "bilinear")
    original = timm.create_model("mobilenetv2_050", pad_type="same", num_classes=3).eval()
    original.load_state_dict(safetensors.torch.load_file(weights))
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(backbone(images), original.forward_features(images), rtol=0, atol=0)
        stock = Backbone("mobilenetv2_050", weights, image_size=64, feature_level=0, options={"pad_type": ""}).eval()
        assert not torch.allclose(stock(images), backbone(images), atol=1e-3)


def test_padding_as_tensorflow_has_it_puts_the_odd_pixel_last() -> None:
    network = Backbone("mobilenetv2_050", None, image_size=64, options="pad_type=same").net
    images = torch.rand(1, 3, 64, 64)
    expected = conv2d(pad(images, (0, 1, 0, 1)), network.conv_stem.weight, stride=2)
    torch.testing.assert_close(network.conv_stem(images), expected)


def test_the_original_network_gives_the_same_map() -> None:
    torch.manual_seed(0)
    original = torchvision.models.mobilenet_v2(weights=None).eval()
    backbone = Backbone("mobilenetv2_100", None, image_size=64, feature_level=0).eval()
    own = {k: v for k, v in backbone.net.state_dict().items() if not k.endswith("num_batches_tracked")}
    other = {k: v for k, v in original.features.state_dict().items() if not k.endswith("num_batches_tracked")}
    assert [tensor.shape for tensor in own.values()] == [tensor.shape for tensor in other.values()]
    backbone.net.load_state_dict(dict(zip(own, other.values(), strict=True)), strict=False)
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(backbone(images), original.features(images))


def test_a_tree_keeps_how_its_network_was_built(weights: Path, tmp_path: Path) -> None:
    backbone = Backbone("auto", weights, image_size=64)
    tree = ProtoTree(Topology.full(2), FeatureExtractor(backbone, 8), ["cat", "dog", "owl"]).eval()
    checkpoint.save(tree, tmp_path / "tree")
    weights.unlink()  # nothing but the tree's own folder is needed
    loaded, images = checkpoint.load(tmp_path / "tree"), torch.rand(2, 3, 64, 64)
    found = loaded.features.backbone
    assert (found.options, found.origin) == (backbone.options, backbone.origin)
    assert loaded.preprocessing == tree.preprocessing
    with torch.no_grad():
        assert torch.equal(loaded(images).distance, tree(images).distance)


@pytest.mark.parametrize("options", [{"checkpoint_path": "/etc/passwd"}, {"pretrained": True}, {"reg_tokens": 10**9}])
def test_a_tree_file_cannot_name_other_options(tiny_tree: ProtoTree, tmp_path: Path, options: dict[str, Any]) -> None:
    checkpoint.save(tiny_tree, tmp_path / "tree")
    path = tmp_path / "tree" / "tree.json"
    header = json.loads(path.read_text())
    _, tensors = checkpoint.read_state(tmp_path / "tree", "tree.json")
    header["backbone"]["options"] = options
    with pytest.raises(CheckpointError, match=next(iter(options))):
        checkpoint.rebuild({key: value for key, value in header.items() if key != "sha256"}, tensors, "tree")


@pytest.mark.parametrize(
    ("text", "token"),
    [
        ("pad_type", "pad_type=same"),
        ("pad_type=reflect", "''"),
        ("img_size=96", "--image-size"),
        ("features_only=true", "unknown option 'features_only'"),
        ("bn_eps=nan", "a number from"),
        ("reg_tokens=-1", "a number from 0 to 64"),
        ("class_token=1", "true or false"),
    ],
)
def test_odd_options_are_refused(text: str, token: str) -> None:
    with pytest.raises(ConfigError, match=token):
        parse_options(text)


def test_an_option_that_a_network_does_not_have() -> None:
    with pytest.raises(ConfigError, match="timm cannot build resnet18 with the options reg_tokens=4"):
        Backbone("resnet18", None, image_size=64, options="reg_tokens=4")


@pytest.mark.parametrize(
    ("key", "value", "token"),
    [
        ("options", "checkpoint_path=x", "unknown option"),
        ("mean", "0.5,0.5", "header"),
        ("std", "nan,1,1", "not finite"),
        ("size", "1e9", "header"),
        ("interpolation", "nearest", "interpolation 'nearest'"),
    ],
)
def test_a_header_that_cannot_be_used_is_one_clear_error(tmp_path: Path, key: str, value: str, token: str) -> None:
    path = tmp_path / "odd.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(1)}, path, {**HEADER, key: value})
    with pytest.raises(WeightsError, match=token):
        resolve("auto", path)


def test_random_weights_come_from_nowhere() -> None:
    assert resolve("auto", None).origin == Origin()
    assert resolve("tf_efficientnet_lite0").origin == resolve("auto").origin != Origin()


def test_a_file_of_another_network_is_named(weights: Path) -> None:
    with pytest.raises(WeightsError, match="holds weights of mobilenetv2_050, not of resnet18"):
        resolve("resnet18", weights)


def test_a_file_without_a_header_or_of_rubbish_says_nothing(tmp_path: Path) -> None:
    plain, rubbish, large = (tmp_path / f"{name}.safetensors" for name in ("plain", "rubbish", "large"))
    safetensors.torch.save_file({"a": torch.zeros(1)}, plain)
    rubbish.write_bytes(b"\x05\0\0\0\0\0\0\0[[[[[")
    large.write_bytes(b"\xff" * 16)
    assert [read_metadata(path) for path in (plain, rubbish, large, tmp_path / "none")] == [{}] * 4


@pytest.mark.parametrize("network", BACKBONES, ids=[network.name for network in BACKBONES])
def test_every_network_of_the_registry_gives_a_map_and_has_the_size_it_says(network: Any) -> None:
    with torch.device("meta"):
        backbone = Backbone(network.name, None, image_size=network.image_size, split=False)
    n_weights = sum(parameter.numel() for parameter in timm_network(network).parameters())
    assert network.million_parameters == pytest.approx(n_weights / 1e6, abs=0.06)
    assert min(backbone.map_size) >= 7


def timm_network(network: Any) -> torch.nn.Module:
    with torch.device("meta"):
        return timm.create_model(network.model, num_classes=0)


def test_birds_come_as_a_file(own_cache: Path) -> None:
    with pytest.raises(WeightsError, match=r"mobilenetv2_100_inat_birds.safetensors.*--weights FILE"):
        load_preset("default").replace({"backbone": "birds"}).for_data(3)
    file = own_cache / "backbones" / "mobilenetv2_100_inat_birds.safetensors"
    file.parent.mkdir(parents=True)
    safetensors.torch.save_file({"a": torch.zeros(1)}, file, {"model": "mobilenetv2_100", "options": "pad_type=same"})
    config = load_preset("default").replace({"backbone": "birds"}).for_data(3)
    assert (config.backbone, config.backbone_options, config.weights) == ("mobilenetv2_100", "pad_type=same", str(file))
    assert config == config.for_data(3)


def test_image_size_and_crops_follow_from_the_network(weights: Path) -> None:
    def sizes(**settings: Any) -> tuple[int | None, float | None]:
        config = load_preset("default").replace(settings).for_data(3)
        return config.image_size, config.recipe.center_crop  # type: ignore[attr-defined]

    assert sizes() == (288, 0.7)
    assert sizes(backbone="dinov2-small", weights="none") == (224, 0.0)
    assert sizes(backbone="resnet18", weights="none") == (224, 0.7)
    assert sizes(weights=str(weights)) == (96, 0.7)
    assert sizes(backbone="dinov2-small", weights="none", image_size=280, center_crop=0.5) == (280, 0.5)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch14_reg4_dinov2"])
def test_patch_tokens_after_the_last_norm_are_the_map(name: str) -> None:
    torch.manual_seed(0)
    side = 112
    backbone = Backbone(name, None, image_size=side).eval()
    images = torch.rand(2, 3, side, side)
    with torch.no_grad():
        tokens = backbone.net.forward_features(images)[:, backbone.net.num_prefix_tokens :]
        found = backbone(images)
    assert backbone.map_size == (side // backbone.net.patch_embed.patch_size[0],) * 2
    torch.testing.assert_close(found.flatten(2).transpose(1, 2), tokens)


@pytest.mark.parametrize("n_blocks", [1, 3, 5])
@pytest.mark.parametrize("name", ["tf_efficientnet_lite0", "resnet18", "convnext_atto", "vit_tiny_patch16_224"])
def test_so_many_last_blocks_can_be_split_off(name: str, n_blocks: int) -> None:
    backbone = Backbone(name, None, image_size=64, split=n_blocks).eval()
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(backbone.last_block(backbone.split_features(images)), backbone(images))
    heavy = [m for m in backbone.last_modules if any(p.dim() > 1 for p in m.parameters())]
    assert len(heavy) == n_blocks


def test_the_birds_network_knows_birds() -> None:
    path = shared("weights/mobilenetv2_100_inat_birds.safetensors")
    network = resolve("birds", path)
    assert network.origin.trained_on.startswith("iNaturalist")
    assert (network.mean, network.interpolation, dict(network.options)) == ((0.5,) * 3, "bicubic", {"pad_type": "same"})
    assert Backbone("auto", path, image_size=64).name == "mobilenetv2_100"
