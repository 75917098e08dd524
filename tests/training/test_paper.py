"""Algorithm 1 step by step against the oracle, and what the published recipe promises."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d

import oracle
from conftest import random_maps
from prototree.config import PaperSettings
from prototree.core.checkpoint import VERSION, read_state, write_state
from prototree.core.model import ProtoTree
from prototree.core.topology import Topology
from prototree.data import ImageData, open_data
from prototree.data.crops import evaluation_views
from prototree.data.loader import ViewDataset
from prototree.errors import CheckpointError, ConfigError, TrainError
from prototree.pipeline.fit import fit
from prototree.progress import EpochLog, Observer
from prototree.training import paper
from prototree.training.finetuned import load_finetuned
from prototree.training.loop import CHECKPOINTS, Context
from tiny_training import TINY, Crash, MapBatches, PowerCutError, assert_same, tiny_context, weights_of, write_squares


class Rows(Observer):
    """What is told of every epoch, and how many images its leaves have counted."""

    def __init__(self, batches: MapBatches | None = None) -> None:
        self.rows: list[EpochLog] = []
        self.counts: list[float] = []
        self._batches = batches

    def epoch(self, row: EpochLog, n_epochs: int) -> None:
        self.rows.append(row)
        if self._batches:
            self.counts.append(self._batches.tree.leaf_logits.sum().item())


def train(context: Context) -> ProtoTree:
    assert isinstance(context.config.recipe, PaperSettings)  # type: ignore[attr-defined]
    torch.manual_seed(0)
    return paper.train(context, context.config.recipe)  # type: ignore[attr-defined]


def train_maps(
    monkeypatch: pytest.MonkeyPatch, folder: Path, data: ImageData, batches: MapBatches, **settings: Any
) -> Rows:
    monkeypatch.setattr(paper, "Batches", batches)
    rows = Rows(batches)
    train(tiny_context(folder, data, rows, **settings))
    return rows


LR, EPSILON, DECAY, BETA = 0.02, 1e-7, 0.3, (0.9, 0.999)


def train_by_hand(batches: MapBatches, targets: Tensor, leaf_update: str, epochs: int) -> dict[str, Tensor]:
    """Algorithm 1 as it is written: the loss of Eq. 4, Adam as its authors write it, then the leaves of Eq. 5."""
    names = ["prototypes", "features.head.weight", *(["leaf_logits"] if leaf_update == "gradient" else [])]
    learned = [batches.start[name].clone().requires_grad_() for name in names]
    moments = [(torch.zeros_like(value), torch.zeros_like(value)) for value in learned]
    c, step, topology = batches.start["leaf_logits"].clone(), 0, batches.tree.topology
    for epoch in range(epochs):
        if leaf_update == "two_pass":
            z = torch.sigmoid(conv2d(batches.maps, learned[1].detach()))
            c = oracle.leaf_counts(oracle.path_probs(z, learned[0].detach(), topology), c, targets)
        before = c.clone()
        for batch in batches.epoch(epoch):
            c = learned[2] if leaf_update == "gradient" else c
            z, y = torch.sigmoid(conv2d(batch.values, learned[1])), targets[batch.entries]
            pi, step = oracle.path_probs(z, learned[0], topology), step + 1
            gradients = torch.autograd.grad(-(y * oracle.prediction(pi, c).log()).sum(dim=1).mean(), learned)
            with torch.no_grad():
                for name, value, gradient, (mean, square) in zip(names, learned, gradients, moments, strict=True):
                    mean.copy_(BETA[0] * mean + (1 - BETA[0]) * gradient)
                    square.copy_(BETA[1] * square + (1 - BETA[1]) * gradient**2)
                    value.mul_(1 - LR * DECAY * (name == "features.head.weight"))
                    root = (square / (1 - BETA[1] ** step)).sqrt() + EPSILON
                    value.sub_(LR * mean / (1 - BETA[0] ** step) / root)
                if leaf_update == "interleaved":  # with what the tree said before the optimiser's step
                    c = (c - before / batches.n_batches).clamp(min=0) + oracle.leaf_counts(pi, c, y)
    return {name: value.detach() for name, value in zip(names, learned, strict=True)} | {"leaf_logits": c.detach()}


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("leaf_update", ["interleaved", "two_pass", "gradient"])
def test_whole_steps_agree_with_the_oracle(
    squares: ImageData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaf_update: str, soft: bool
) -> None:
    batches = MapBatches(n_items=7, batch_size=4, leaf_logits=3 * random_maps(5, 4, 3))  # the last batch has three
    targets, settings = torch.eye(3).double()[batches.labels], dict[str, Any]()
    if soft:
        probs = random_maps(1, 7, 3).softmax(dim=1)
        monkeypatch.setattr(paper, "soft_labels", lambda context, source, temperature: probs)
        targets, settings = 0.75 * probs + 0.25 * targets, {"teacher": "somewhere", "distill_weight": 0.75}
    settings |= {"leaf_update": leaf_update, "height": 2, "epochs": 2, "adam_epsilon": EPSILON, "weight_decay": DECAY}
    train_maps(monkeypatch, tmp_path, squares, batches, lr_prototypes=LR, lr_last_block=LR, **settings)
    found = batches.tree.state_dict()
    for name, value in train_by_hand(batches, targets, leaf_update, 2).items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("soft", [False, True])
def test_after_each_epoch_the_leaves_hold_the_sum_of_targets(
    squares: ImageData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soft: bool
) -> None:
    monkeypatch.setattr(paper, "soft_labels", lambda *_: random_maps(1, 30, 3).softmax(dim=1))
    rows = train_maps(monkeypatch, tmp_path, squares, MapBatches(), teacher="x" if soft else "", lr_prototypes=0.02)
    assert rows.counts == pytest.approx([30.0] * 3)


def test_the_training_accuracy_is_that_of_the_trees_predictions(
    squares: ImageData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It was once computed from log-probabilities, where a leaf that is sure of one class counts against it.
    sure = torch.tensor(
        [[300.0 if k == leaf % 3 == 0 else 3.0 * (k == leaf % 3) for k in range(3)] for leaf in range(8)]
    )
    batches, rates = MapBatches(leaf_logits=sure), {"lr_prototypes": 0, "lr_last_block": 0}
    rows = train_maps(monkeypatch, tmp_path, squares, batches, leaf_update="gradient", epochs=1, **rates).rows
    tree = batches.tree
    predicted = tree.decode(tree.forward_features(tree.features.from_map(batches.maps))).labels("soft")
    assert rows[0].accuracy == pytest.approx((predicted == batches.labels).float().mean().item())


def test_learning_rates_by_group_and_milestone(squares: ImageData, tmp_path: Path) -> None:
    context, cfg = tiny_context(tmp_path, squares), PaperSettings(weight_decay=0.1, milestones=(60, 70))
    tree = ProtoTree(Topology.full(2), context.features(context.backbone(split=True)), 3)
    tree.leaf_logits.requires_grad_(False)
    for epoch, factor in ((0, 1), (59, 1), (60, 0.5), (70, 0.25), (99, 0.25)):
        rates = [group.lr for group in paper.param_groups(tree, cfg, epoch)]
        assert rates == pytest.approx([1e-3 * factor, 1e-3 * factor, 1e-3 * factor, 1e-5 * factor])
    groups = paper.param_groups(tree, cfg, 0)
    assert [group.weight_decay for group in groups] == [0, 0.1, 0, 0]
    assert groups[0].parameters == [tree.prototypes]
    grouped = [id(parameter) for group in groups for parameter in group.parameters]
    assert sorted(grouped) == sorted(id(p) for p in tree.parameters() if p is not tree.leaf_logits)


def test_a_frozen_backbone_does_not_drift(squares: ImageData, tmp_path: Path) -> None:
    torch.manual_seed(0)
    before = tiny_context(tmp_path, squares).backbone(split=True)
    batches, frozen = MapBatches(), list[bool]()

    class Frozen(Observer):
        def epoch(self, row: EpochLog, n_epochs: int) -> None:
            frozen.append(not any(p.requires_grad for p in batches.tree.features.backbone.backbone_parameters()))

    tree = train(tiny_context(tmp_path / "frozen", squares, freeze_epochs=3))
    assert_same(tree.features.backbone.backbone_state(), before.backbone_state())
    first, last = (next(backbone.last_block_parameters()) for backbone in (before, tree.features.backbone))
    assert not torch.equal(first, last), "its last block learns"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paper, "Batches", batches)
        train(tiny_context(tmp_path / "freed", squares, Frozen(), freeze_epochs=2))
    assert frozen == [True, True, False]


@pytest.mark.parametrize("is_kept", [False, True])
def test_batch_norm_may_keep_its_statistics_while_the_network_learns(
    squares: ImageData, tmp_path: Path, is_kept: bool
) -> None:
    torch.manual_seed(0)
    before = tiny_context(tmp_path, squares).backbone(split=True)
    settings = {"freeze_epochs": 1, "epochs": 2, "baseline": True, "freeze_batch_norm": is_kept}
    tree = train(tiny_context(tmp_path / "run", squares, **settings))
    baseline = load_finetuned(tree.features, 3, tmp_path / "run")
    assert baseline is not None
    for backbone in (tree.features.backbone, baseline.backbone):
        found, start = backbone.backbone_state(), before.backbone_state()
        moved = {name.rpartition(".")[2] for name in found if not torch.equal(found[name], start[name])}
        assert {"weight", "bias"} <= moved
        assert ("running_mean" in moved) != is_kept
        last = f"{before._last_block_names[0]}."
        assert any(
            "running_mean" in name and name.startswith(last) and not torch.equal(tensor, before.net.state_dict()[name])
            for name, tensor in backbone.net.state_dict().items()
        ), "the last block learns as before"


def test_cached_and_uncached_training_agree(squares: ImageData, tmp_path: Path) -> None:
    rows, cached_rows = Rows(), Rows()
    tree = train(tiny_context(tmp_path / "a", squares, rows, freeze_epochs=3))
    cached = train(tiny_context(tmp_path / "b", squares, cached_rows, freeze_epochs=3, cache_views=3))
    # The cache rounds to float16, which keeps three digits.
    torch.testing.assert_close(cached.prototypes, tree.prototypes, atol=6e-3, rtol=0)
    torch.testing.assert_close(cached.leaf_logits, tree.leaf_logits, atol=0.05, rtol=0.05)
    losses = [row.loss for row in rows.rows]
    assert [row.loss for row in cached_rows.rows] == pytest.approx(losses, rel=1e-2)


def test_images_take_over_when_the_backbone_is_freed(squares: ImageData, tmp_path: Path) -> None:
    context = tiny_context(tmp_path, squares, cache_views=1, freeze_epochs=2)
    tree = ProtoTree(Topology.full(2), context.features(context.backbone(split=True)), 3).eval()
    images, cfg = paper.augmented_images(context, tree.features.backbone), PaperSettings(cache_views=1, freeze_epochs=2)
    batches = paper.Batches(context, images, cfg, tree)
    shapes = [next(batches.epoch(epoch)).values.shape[1:] for epoch in (1, 2)]
    assert shapes[0] != shapes[1] == (3, 32, 32)
    batch = next(batches.epoch(2))
    torch.testing.assert_close(batches.encode(tree.features, batch), tree.features(batch.values))
    for epoch in (0, 2):
        assert sum(len(batch.labels) for _, batch in batches.forward(tree, epoch)) == 24
    # The leaves were once fitted to maps of the network as it had been, long after it had begun to learn.
    assert next(batches.forward(tree, 2))[1].values.shape[1:] == (3, 32, 32)


@pytest.mark.parametrize(
    ("leaf_update", "step"), [("interleaved", 1), ("interleaved", 7), ("two_pass", 7), ("gradient", 7)]
)
def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(
    squares: ImageData, tmp_path: Path, leaf_update: str, step: int
) -> None:
    settings = {"leaf_update": leaf_update, "pretrain_epochs": 1, "epochs": 2, "height": 2}
    expected = train(tiny_context(tmp_path / "free", squares, **settings))
    with pytest.raises(PowerCutError):
        train(tiny_context(tmp_path / "run", squares, Crash("batch", step), **settings))
    assert (tmp_path / "run" / CHECKPOINTS / "tree").exists() == (step == 7)
    assert_same(weights_of(train(tiny_context(tmp_path / "run", squares, **settings))), weights_of(expected))


# Six batches of three epochs each for the baseline, then for the tree; the network is freed after the second epoch.
@pytest.mark.parametrize("step", [4, 7, 10, 13, 16])
def test_a_run_resumed_before_or_after_the_network_is_freed_is_the_same(
    squares: ImageData, tmp_path: Path, step: int
) -> None:
    settings = {"cache_views": 2, "freeze_epochs": 2, "epochs": 3, "height": 2, "milestones": (2,), "baseline": True}
    expected = train(tiny_context(tmp_path / "free", squares, **settings))
    with pytest.raises(PowerCutError):
        train(tiny_context(tmp_path / "run", squares, Crash("batch", step), **settings))
    resumed = train(tiny_context(tmp_path / "run", squares, **settings))
    assert_same(weights_of(resumed), weights_of(expected))
    baselines = (load_finetuned(resumed.features, 3, tmp_path / name) for name in ("run", "free"))
    assert_same(*(weights_of(baseline) for baseline in baselines if baseline is not None))


def test_the_baseline_learns_and_leaves_the_tree_alone(squares: ImageData, tmp_path: Path) -> None:
    settings = {"epochs": 30, "freeze_epochs": 10, "cache_views": 2, "lr_last_block": 1e-2, "lr_backbone": 1e-2}
    rows = Rows()
    tree = train(tiny_context(tmp_path / "with", squares, rows, baseline=True, **settings))
    assert rows.rows[29].accuracy > 0.8
    baseline, features = load_finetuned(tree.features, 3, tmp_path / "with"), tree.features
    assert baseline is not None
    with torch.no_grad():
        images = torch.rand(2, 3, 32, 32)
        pooled = baseline.backbone(images).mean(dim=(2, 3))
        torch.testing.assert_close(baseline(images), pooled @ baseline.linear.weight.T + baseline.linear.bias)
        torch.testing.assert_close(baseline.from_split(baseline.backbone.split_features(images)), baseline(images))
    ours, theirs = (next(backbone.backbone_parameters()) for backbone in (baseline.backbone, features.backbone))
    assert not torch.equal(ours, theirs), "it has a network of its own"
    alone = train(tiny_context(tmp_path / "without", squares, **settings))
    assert load_finetuned(alone.features, 3, tmp_path / "without") is None
    assert_same(weights_of(tree), weights_of(alone))


def test_a_run_measures_its_baseline_beside_the_tree(squares: ImageData, tmp_path: Path) -> None:
    run = fit(squares, tmp_path / "run", settings=TINY | {"baseline": True, "epochs": 1, "prune_threshold": 0.0})
    baseline = load_finetuned(run.tree().features, 3, run.folder)
    assert baseline is not None
    views = ViewDataset(squares.test, evaluation_views, run.tree().preprocessing)
    with torch.no_grad():
        logits = baseline(torch.stack([views[index].image for index in range(len(views))]))
    right = logits.argmax(dim=1) == torch.tensor([sample.label for sample in squares.test])
    assert run.metrics["baseline_accuracy"] == pytest.approx(right.double().mean().item())
    write_state(run.folder / "baseline", "finetuned.json", {"version": VERSION}, {"other": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="does not fit"):
        load_finetuned(run.tree().features, 3, run.folder)


def test_pretraining_learns_and_leaves_pretrained_weights_halfway(squares: ImageData, tmp_path: Path) -> None:
    rows = Rows()
    context = tiny_context(tmp_path / "random", squares, rows)
    torch.manual_seed(0)
    backbone = context.backbone()
    paper.pretrain(context, backbone, paper.augmented_images(context, backbone), 8, 1e-2, 0.0)
    assert rows.rows[-1].accuracy > 0.8
    before = weights_of(backbone)
    backbone.weights = "somewhere"
    context = tiny_context(tmp_path / "pretrained", squares)
    paper.pretrain(context, backbone, paper.augmented_images(context, backbone), 1, 1e-2, 1e-3)
    tuned = read_state(context.folder / CHECKPOINTS / "backbone", "state.json")[1]
    for name, tensor in backbone.state_dict().items():
        end = tuned[f"model.backbone.{name}"]
        torch.testing.assert_close(tensor, (before[name] + end) / 2 if tensor.is_floating_point() else end)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in backbone.state_dict().items())


def test_unreadable_images_are_left_out(tmp_path: Path) -> None:
    data = open_data(write_squares(tmp_path / "squares", train=2, test=1))
    data.train[1].path.write_bytes(b"no image")
    settings = {"batch_size": 1, "epochs": 1, "freeze_epochs": 0, "pretrain_epochs": 1, "backbone": "test_convnext"}
    settings |= {"feature_level": -1, "leaf_update": "interleaved"}
    tree = train(tiny_context(tmp_path / "run", data, **settings))  # a batch is empty
    assert tree.leaf_logits.sum().item() == pytest.approx(5, rel=1e-4)
    for sample in data.train:
        sample.path.write_bytes(b"no image")
    with pytest.raises(TrainError, match="none of the training images"):
        train(tiny_context(tmp_path / "none", data, **settings))


def test_a_tree_to_start_from_is_refused(squares: ImageData, tmp_path: Path, tiny_tree: ProtoTree) -> None:
    with pytest.raises(ConfigError, match="paper"):
        paper.train(tiny_context(tmp_path, squares), PaperSettings(), tiny_tree)
