import pytest
import torch
from torch import nn

from prototree.backbones.backbone import Backbone
from prototree.backbones.bn_fusion import folded


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
        expected = backbone.eval().trunk(images)
        torch.testing.assert_close(small.trunk(images), expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())
    assert n_norms(small) < count or count == 0
    if left is not None:
        assert n_norms(small) == left
    assert all(torch.equal(tensor, before[key]) for key, tensor in backbone.state_dict().items()), "a copy was folded"


@pytest.mark.parametrize("name", ["tf_efficientnet_lite0", "densenet121"])
def test_folding_is_the_same_every_time(name: str) -> None:
    # Tensors were once told apart by an id that a later tensor can have again, so some norms stayed by chance.
    torch.manual_seed(0)
    backbone = Backbone(name, None, image_size=64)
    once, *others = (folded(backbone) for _ in range(6))
    if name == "tf_efficientnet_lite0":
        assert n_norms(once) == 0
    for other in others:
        assert n_norms(other) == n_norms(once)
        pairs = zip(once.state_dict().values(), other.state_dict().values(), strict=True)
        assert all(torch.equal(first, second) for first, second in pairs)
