from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch

from prototree.errors import WeightsError
from prototree.network.backbone import Backbone
from prototree.network.weights import timm_names


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
    with pytest.raises(WeightsError, match=r"expected a weight file at .*nothing\.pth, found none"):
        load(tmp_path / "nothing.pth")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("keep", [0, 0.5])
def test_a_truncated_or_empty_file(tmp_path: Path, suffix: str, keep: float) -> None:
    path = tmp_path / f"weights{suffix}"
    save = safetensors.torch.save_file if suffix == ".safetensors" else torch.save
    save(resnet18_state(), path)
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(WeightsError, match=rf"weights\{suffix} cannot be read as weights"):
        load(path)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.save(torch.nn.Linear(2, 2), path)
    with pytest.raises(WeightsError, match="cannot be read as weights"):
        load(path)


def test_a_file_that_holds_no_weights(tmp_path: Path) -> None:
    path = tmp_path / "list.pth"
    torch.save([1, 2, 3], path)
    with pytest.raises(WeightsError, match="holds a list; expected a mapping"):
        load(path)


def test_weights_of_a_larger_network_of_the_same_family_are_refused(tmp_path: Path) -> None:
    # Every key of ResNet18 is in ResNet34 too, with the same shape: only the surplus tells.
    path = tmp_path / "resnet34.pth"
    torch.save(timm.create_model("resnet34").state_dict(), path)
    with pytest.raises(WeightsError, match=r"0 missing names, \d+ unknown names \(first layer1.2.conv1.weight"):
        load(path)


def test_weights_of_another_network_name_the_first_keys_that_differ(tmp_path: Path) -> None:
    path = tmp_path / "vgg.pth"
    torch.save(timm.create_model("mobilenetv3_small_050").state_dict(), path)
    with pytest.raises(
        WeightsError, match=r"vgg\.pth .*missing names \(first conv1\.weight.*unknown names \(first conv_stem"
    ):
        load(path)


def test_tensors_of_another_shape_name_the_first(tmp_path: Path) -> None:
    path = tmp_path / "odd.pth"
    torch.save(resnet18_state() | {"conv1.weight": torch.zeros(64, 1, 7, 7)}, path)
    with pytest.raises(WeightsError, match=r"first conv1.weight: expected \(64, 3, 7, 7\), got \(64, 1, 7, 7\)"):
        load(path)


def test_tensors_without_names_are_one_clear_error(tmp_path: Path) -> None:
    torch.save({0: torch.zeros(1), 1: torch.zeros(1)}, tmp_path / "list.pth")
    with pytest.raises(WeightsError, match="calls a tensor 0, a int; expected names"):
        Backbone("resnet18", tmp_path / "list.pth", image_size=64)
