import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from timm.layers import resample_abs_pos_embed

from prototree.backbones.backbone import Backbone
from prototree.backbones.weights import read_state, timm_names
from prototree.errors import WeightsError


def resnet18_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return dict(timm.create_model("resnet18", num_classes=10).state_dict())


def load(path: Path, name: str = "resnet18") -> Backbone:
    return Backbone(name, path, image_size=64)


def assert_loaded(backbone: Backbone, state: dict[str, torch.Tensor]) -> None:
    own = backbone.net.state_dict()
    assert len(own) > 100
    assert all(torch.equal(own[name], state[name]) for name in own)


@pytest.mark.parametrize("wrap", ["plain", "state_dict", "module", "safetensors"])
def test_local_files_load_whatever_they_are_wrapped_in(tmp_path: Path, wrap: str) -> None:
    state, path = resnet18_state(), tmp_path / "weights.pth"
    if wrap == "safetensors":
        path = path.with_suffix(".safetensors")
        safetensors.torch.save_file(state, path)
    elif wrap == "module":
        torch.save({f"module.{name}": tensor for name, tensor in state.items()}, path)
    else:
        torch.save(state if wrap == "plain" else {"state_dict": state, "epoch": 3}, path)
    assert_loaded(load(path), state)


def test_the_papers_inaturalist_file_loads(tmp_path: Path) -> None:
    # BBN: keys under module.backbone, the last block as cb_block, a second branch and a classifier that are not used.
    torch.manual_seed(7)
    state = dict(timm.create_model("resnet50", num_classes=0).state_dict())
    saved = {f"module.backbone.{name.replace('layer4.2.', 'cb_block.')}": tensor for name, tensor in state.items()}
    saved |= {k.replace("cb_block", "rb_block"): torch.zeros_like(t) for k, t in saved.items() if "cb_block" in k}
    saved |= {"module.classifier.weight": torch.zeros(5089, 4096)}
    path = tmp_path / "BBN.iNaturalist2017.res50.180epoch.best_model.pth"
    torch.save(saved, path)
    assert_loaded(load(path, "resnet50"), state)


def test_torchvisions_densenet_names_become_timms() -> None:
    found = timm_names({"features.denseblock1.denselayer2.norm.1.weight": torch.zeros(1)})
    assert list(found) == ["features.denseblock1.denselayer2.norm1.weight"]


def test_half_precision_files_become_single_precision(tmp_path: Path) -> None:
    path = tmp_path / "half.safetensors"
    safetensors.torch.save_file(
        {n: t.half() if t.is_floating_point() else t for n, t in resnet18_state().items()}, path
    )
    assert load(path).net.get_parameter("conv1.weight").dtype == torch.float32


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="nothing"):
        load(tmp_path / "nothing.pth")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("keep", [0, 0.5])
def test_a_truncated_or_empty_file(tmp_path: Path, suffix: str, keep: float) -> None:
    path = tmp_path / f"weights{suffix}"
    save = safetensors.torch.save_file if suffix == ".safetensors" else torch.save
    save(resnet18_state(), path)
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(WeightsError, match="weights"):
        load(path)


def looped() -> dict[str, Any]:
    wrapped: dict[str, Any] = {"epoch": 3}
    wrapped["state_dict"] = {"model": wrapped}
    return wrapped


@pytest.mark.parametrize(
    ("content", "token"),
    [
        (lambda: torch.nn.Linear(2, 2), "odd.pth"),  # would run code
        (lambda: [1, 2, 3], "list"),
        # Every key of ResNet18 is in ResNet34 too, with the same shape: only the surplus tells.
        (lambda: timm.create_model("resnet34").state_dict(), "layer1.2.conv1.weight"),
        (lambda: timm.create_model("mobilenetv3_small_050").state_dict(), "conv_stem"),
        (lambda: resnet18_state() | {"conv1.weight": torch.zeros(64, 1, 7, 7)}, "(64, 1, 7, 7)"),
        (lambda: resnet18_state() | {"conv1.weight": torch.ones(64, 3, 7, 7, dtype=torch.int8)}, "conv1.weight"),
        (lambda: {0: torch.zeros(1), 1: torch.zeros(1)}, "odd.pth"),
        (looped, "odd.pth"),
        (lambda: {"bn1.running_var": torch.tensor([1, -1e-9])}, "bn1.running_var"),
    ],
)
def test_files_of_something_else_are_one_clear_error(tmp_path: Path, content: Any, token: str) -> None:
    torch.save(content(), tmp_path / "odd.pth")
    with pytest.raises(WeightsError) as caught:
        load(tmp_path / "odd.pth")
    assert token in str(caught.value)


def odd_tensors() -> dict[str, torch.Tensor]:
    plain = torch.zeros(64, 3, 7, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "not finite": torch.full_like(plain, torch.nan),
            "finite": torch.full_like(plain, 1e300, dtype=torch.float64),
            "quantised": torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8),
            "nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
            "sparse_coo": plain.to_sparse(),
            "sparse_csr": torch.eye(3).to_sparse_csr(),
            "meta": plain.to("meta"),
            "complex64": plain.to(torch.complex64),
            "float8_e5m2": plain.to(torch.float8_e5m2),
            "claims 9408000 numbers": torch.zeros(1).expand(1000, *plain.shape[1:], 64),
        }


@pytest.mark.filterwarnings("ignore")  # torch's about its own kinds of tensors
@pytest.mark.parametrize("token", list(odd_tensors()))
def test_tensors_of_other_kinds_and_numbers_that_are_none_are_named(tmp_path: Path, token: str) -> None:
    torch.save({"conv1.weight": odd_tensors()[token]}, tmp_path / "odd.pth")
    with pytest.raises(WeightsError, match=rf"odd\.pth: conv1\.weight .*{token}"):
        read_state(tmp_path / "odd.pth")


@pytest.mark.parametrize("name", ["a\udc80", "a\nb", "a" * 2000, (1, 2), None, 7])
def test_names_that_cannot_be_shown_are_one_clear_error(tmp_path: Path, name: Any) -> None:
    torch.save({name: torch.zeros(1)}, tmp_path / "odd.pth")
    with pytest.raises(WeightsError, match=r"odd\.pth calls a tensor"):
        read_state(tmp_path / "odd.pth")


@pytest.mark.parametrize("name", ["_blocks.x._bn0.weight", "_blocks.1", "_blocks.1.", "_blocks." + "9" * 5000 + ".a.b"])
def test_odd_names_in_a_file_of_lite0_are_those_of_another_network(tmp_path: Path, name: str) -> None:
    torch.save({"_conv_stem.weight": torch.zeros(1), name: torch.zeros(1)}, tmp_path / "odd.pth")
    with pytest.raises(WeightsError, match=r"odd\.pth"):
        load(tmp_path / "odd.pth", "test_resnet")


def vit_state(name: str, side: int, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    net = timm.create_model(name, img_size=side, num_classes=0, **options)
    return {key: torch.randn_like(tensor) for key, tensor in net.state_dict().items()}


@pytest.mark.parametrize(("name", "token"), [("test_vit", "cls_token"), ("test_vit2", "reg_token")])
@pytest.mark.parametrize("side", [64, 112])
def test_position_embeddings_of_another_image_size_are_resampled(
    tmp_path: Path, name: str, token: str, side: int
) -> None:
    state = vit_state(name, 96)
    safetensors.torch.save_file(state, tmp_path / "vit.safetensors")
    own = Backbone(name, tmp_path / "vit.safetensors", image_size=side).net.state_dict()
    cells = side // 16
    expected = resample_abs_pos_embed(state["pos_embed"], [cells, cells], num_prefix_tokens=1)
    assert expected.shape == (1, cells**2 + 1, 64)
    assert torch.equal(own["pos_embed"], expected)
    assert torch.equal(own["pos_embed"][:, 0], state["pos_embed"][:, 0])  # the place of the token
    assert torch.equal(own[token], state[token])
    assert all(torch.equal(own[key], state[key]) for key in own if key != "pos_embed")


def test_a_file_with_dinov2s_own_names_is_read_at_another_image_size(tmp_path: Path) -> None:
    state = vit_state("test_vit", 96)
    torch.save(state | {"mask_token": torch.zeros(1, 64)}, tmp_path / "dinov2.pth")
    own = Backbone("test_vit", tmp_path / "dinov2.pth", image_size=64).net.state_dict()
    assert torch.equal(own["pos_embed"], resample_abs_pos_embed(state["pos_embed"], [4, 4], num_prefix_tokens=1))
    assert torch.equal(own["cls_token"], state["cls_token"])


def test_a_vit_with_patches_of_another_size_is_another_network(tmp_path: Path) -> None:
    torch.save(vit_state("test_vit", 96, patch_size=8), tmp_path / "vit.pth")
    with pytest.raises(WeightsError, match="embed"):
        Backbone("test_vit", tmp_path / "vit.pth", image_size=96)
