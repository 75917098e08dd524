"""Fine-tuning of the last blocks: what learns and what stays, how far it goes, and that it resumes."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from prototree.backbones.backbone import Backbone
from prototree.data import open_data
from prototree.features.cache import FeatureMaps
from prototree.pipeline.fit import fit
from prototree.progress import Observer
from prototree.training import distill, last_blocks
from prototree.training.calibrate import held_out_images
from prototree.training.loop import Context
from tiny_training import (
    TINY_DISTILL,
    Crash,
    PowerCutError,
    assert_same,
    feature_maps,
    tiny_context,
    weights_of,
    write_squares,
)

SHORT = TINY_DISTILL | {
    "pretrain_epochs": 1, "finetune_blocks": 2, "head_epochs": 1, "epochs": 2, "calibration_fraction": 0.0,
    "occlusion_weight": 0.0,
}  # fmt: skip


class Messages(Observer):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def stage(self, text: str) -> None:
        self.texts.append(text)


def problem(folder: Path) -> tuple[Context, Backbone, FeatureMaps, frozenset[int], Messages]:
    """Split features of images whose label can be told from one cell."""
    data, observer = open_data(write_squares(folder / "squares", train=1, test=1)), Messages()
    context = tiny_context(folder / "run", data, observer, **SHORT)
    torch.manual_seed(0)
    backbone = context.backbone(split=2)
    backbone.freeze(True)
    with torch.no_grad():
        features = backbone.eval().split_features(torch.rand(1, 3, 32, 32))
    generator, labels = torch.Generator().manual_seed(1), [i % 3 for i in range(60)]
    maps = torch.randn(60, *features.shape[1:], generator=generator)
    for i, label in enumerate(labels):
        maps[i, :, i % 2, 0] = 3 * torch.randn(maps.shape[1], generator=torch.Generator().manual_seed(label))
    maps_of = feature_maps(maps, labels)
    return context, backbone, maps_of, held_out_images(maps_of.entries, 0.5), observer


def states(backbone: Backbone) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors of the frozen part, and of the last blocks."""
    whole = {name: tensor.clone() for name, tensor in backbone.net.state_dict().items()}
    frozen = backbone.backbone_state().keys()
    return {n: t for n, t in whole.items() if n in frozen}, {n: t for n, t in whole.items() if n not in frozen}


def test_blocks_learn_while_the_rest_and_all_statistics_stay(tmp_path: Path) -> None:
    context, backbone, maps, held_out, _ = problem(tmp_path)
    frozen, blocks = states(backbone)
    assert last_blocks.finetune_last_blocks(context, backbone, maps, held_out, (3, 12)) > 0
    frozen_after, blocks_after = states(backbone)
    assert_same(frozen_after, frozen)
    statistics = [name for name in blocks if "running" in name]
    assert statistics
    assert all(torch.equal(blocks_after[name], blocks[name]) for name in statistics)
    assert all(not torch.equal(blocks_after[n], t) for n, t in blocks.items() if n.endswith("weight") and t.dim() > 1)


def test_held_out_images_say_how_far_the_blocks_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([1.0, 1.0, 1.1, 1.2, 1.3])
    monkeypatch.setattr(last_blocks, "_loss", lambda *_: next(losses))
    context, backbone, maps, held_out, observer = problem(tmp_path)
    _, blocks = states(backbone)
    assert last_blocks.finetune_last_blocks(context, backbone, maps, held_out, (1, 2)) == 0
    assert_same(states(backbone)[1], blocks)
    assert observer.texts[-1].startswith("taking 0% of the way: the loss of 30 held-out images is 0%: 1.000, 25%: 1.0")


def test_fine_tuning_needs_images_to_hold_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    few = write_squares(tmp_path / "squares", train=3, test=1)
    train = partial(fit, few, settings=SHORT | {"pretrain_epochs": 0}, stages=["train"])
    assert not list((train(tmp_path / "run").folder / "checkpoints").glob("blocks"))
    assert any("stays frozen" in message for message in caplog.messages)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_squares(tmp_path_factory.mktemp("images") / "squares", train=70, test=2)


@pytest.fixture
def few_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill, "_PROBE_VIEWS", 1)
    monkeypatch.setattr(distill, "_FINETUNE_VIEWS", 400)


@pytest.mark.usefixtures("few_epochs")
def test_a_resumed_run_with_fine_tuning_is_an_uninterrupted_one(images: Path, tmp_path: Path) -> None:
    expected = fit(images, tmp_path / "whole", settings=SHORT, stages=["train"]).tree("trained")
    train = partial(fit, images, tmp_path / "run", settings=SHORT, stages=["train"])
    with pytest.raises(PowerCutError):
        train(observer=Crash("epoch", 1 + 2 + 1))  # in the midst of the blocks' epochs
    assert_same(weights_of(train(resume=True).tree("trained")), weights_of(expected))


@pytest.mark.usefixtures("few_epochs")
def test_a_tree_keeps_its_fine_tuned_network(images: Path, tmp_path: Path) -> None:
    run = fit(images, tmp_path / "run", settings=SHORT)
    assert run.metrics["projection"]["mean_distance"] < 0.02, "prototypes are patches of the fine-tuned network's map"
    other = fit(images, tmp_path / "other", settings=SHORT | {"finetune_blocks": 0}, stages=["train"]).tree("trained")
    mine, theirs = (tree.features.backbone.net.state_dict() for tree in (run.tree(), other))
    changed = {name for name, tensor in mine.items() if not torch.equal(tensor, theirs[name])}
    assert 0 < len(changed) < len(mine) / 2
