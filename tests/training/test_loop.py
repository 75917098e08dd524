"""The training loop: the same seed gives the same weights, and a resumed run those of one never interrupted."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from prototree.core.checkpoint import read_state, write_state
from prototree.data import ImageData
from prototree.errors import CheckpointError, ShapeError, TrainError
from prototree.features.cache import Inputs
from prototree.progress import EpochLog, Observer
from prototree.training import loop as loop_module
from prototree.training.loop import CHECKPOINTS, STATE, Context, Loop, ParamGroup, check_resume_key
from tiny_training import Crash, PowerCutError, assert_same, tiny_context, weights_of

EPOCHS, N_BATCHES = 4, 3
STATE_FOLDER = Path(CHECKPOINTS, "toy")


def batches_of(epoch: int, factor: float) -> Iterator[Inputs]:
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(N_BATCHES):
        values = torch.rand(5, 4, generator=generator)
        yield Inputs(factor * values, (values.sum(dim=1) > 2).long(), torch.arange(5))


def train(
    context: Context,
    name: str = "toy",
    factor: float = 1.0,
    epochs: int = EPOCHS,
    batches: Callable[[int, float], Iterator[Inputs]] = batches_of,
) -> nn.Module:
    """A recipe in little, with random numbers in every step."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 2))
    groups = [ParamGroup(list(model.parameters()), 0.1)]
    loop = Loop(context, name, model, groups, epochs)
    for epoch in loop.epochs():
        for batch in loop.batches(batches(epoch, factor if epoch else 1.0), N_BATCHES):
            loop.set_lr(groups, loop.cosine_lr())
            with loop.autocast():
                logits = model(batch.values)
                losses = cross_entropy(logits.float(), batch.labels, reduction="none")
            loop.step(losses, (logits.argmax(dim=1) == batch.labels).float())
    return model


@pytest.fixture
def context(squares: ImageData, tmp_path: Path) -> Context:
    return replace(tiny_context(tmp_path / "run", squares), resume_key='{"seed": 0}')


@pytest.fixture
def expected(squares: ImageData, tmp_path: Path) -> dict[str, Tensor]:
    return weights_of(train(tiny_context(tmp_path / "undisturbed", squares)))


def test_the_same_seed_gives_the_same_weights(squares: ImageData, tmp_path: Path, expected: dict[str, Tensor]) -> None:
    assert_same(weights_of(train(tiny_context(tmp_path / "again", squares))), expected)
    other = weights_of(train(tiny_context(tmp_path / "other", squares, seed=1)))
    assert not torch.equal(other["1.weight"], expected["1.weight"])


@pytest.mark.parametrize("step", [0, 2, 3, 7, 11])  # of twelve
def test_a_crash_loses_at_most_the_epoch(context: Context, expected: dict[str, Tensor], step: int) -> None:
    with pytest.raises(PowerCutError):
        train(replace(context, observer=Crash("batch", step)))
    done = json.loads((context.folder / STATE_FOLDER / STATE).read_text())["epoch"] if step >= N_BATCHES else 0
    assert done == step // N_BATCHES
    left = (EPOCHS - done) * N_BATCHES
    assert_same(weights_of(train(replace(context, observer=Crash("batch", left)))), expected)
    assert_same(weights_of(train(replace(context, observer=Crash("batch", 0)))), expected)  # it is finished


@pytest.mark.parametrize(
    ("then", "now", "token"),
    [
        ("a", "b", "settings"),
        ('{"seed": 1, "height": 8}', '{"seed": 2, "height": 8}', "seed 1 then, 2 now"),
        ("{}", '{"prototype_dim": 8}', "prototype_dim"),
    ],
)
def test_other_settings_are_refused(context: Context, then: str, now: str, token: str) -> None:
    train(replace(context, resume_key=then))
    with pytest.raises(CheckpointError, match=token):
        train(replace(context, resume_key=now))
    check_resume_key(context.folder, then, then)


def test_a_loss_that_is_no_number_leaves_the_last_checkpoint(context: Context, expected: dict[str, Tensor]) -> None:
    with pytest.raises(TrainError, match="epoch 2, batch 1"):
        train(context, factor=math.nan)
    assert_same(weights_of(train(context)), expected)


def test_maps_that_are_no_numbers_are_an_error_of_training(context: Context) -> None:
    model = nn.Linear(1, 1)
    loop = Loop(context, "toy", model, [ParamGroup(list(model.parameters()), 1.0)], 1)
    with pytest.raises(TrainError, match="NaN"), loop.autocast():
        raise ShapeError("NaN in a map")


@pytest.mark.parametrize("damage", ["rng", "model.1.weight", "optimizer.0.exp_avg", "epoch"])
def test_a_damaged_checkpoint_is_refused(context: Context, damage: str) -> None:
    train(context)
    header, tensors = read_state(context.folder / STATE_FOLDER, STATE)
    tensors.pop(damage, None)
    header = {key: value for key, value in header.items() if key not in (damage, "sha256")}
    write_state(context.folder / STATE_FOLDER, STATE, header, tensors)
    with pytest.raises(CheckpointError):
        train(context, epochs=EPOCHS + 1)


def test_epochs_without_a_readable_image_are_an_error(context: Context) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(TrainError, match="none of the training images"):
        list(Loop(context, "toy", model, [ParamGroup(list(model.parameters()), 1.0)], 1).epochs())


def test_the_log_has_a_row_for_every_epoch(context: Context) -> None:
    with pytest.raises(PowerCutError):
        train(replace(context, observer=Crash("epoch", 2)))
    train(context)
    rows = (context.folder / "log.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["epoch", "1", "2", "3", "4"]
    train(context, "calibration/toy")
    assert (context.folder / "log.csv").read_text().splitlines() == rows, "a second tree is not logged"


def test_the_cosine_rises_then_falls(context: Context) -> None:
    model = nn.Linear(1, 1)
    loop = Loop(context, "toy", model, [ParamGroup(list(model.parameters()), 0.5)], 5)
    factors = []
    for loop.epoch in range(5):
        for _ in loop.batches(iter([Inputs(torch.zeros(1, 1), torch.zeros(1).long(), torch.zeros(1).long())] * 10), 10):
            factors.append(loop.cosine_lr())
            assert loop.progress == pytest.approx((loop.epoch + loop.batch / 10) / 5)
    assert 0 < factors[0] < 0.05
    assert factors[:6] == sorted(factors[:6])
    assert factors[5:] == sorted(factors[5:], reverse=True)
    assert 0.9 < max(factors) <= 1
    assert 0 < factors[-1] < 0.01


@pytest.mark.parametrize("epsilon", [1e-8, 1e-7])
def test_a_step_is_that_of_adam(context: Context, epsilon: float) -> None:
    """The first step of Adam moves by lr · g / (|g| + ε), after a decoupled weight decay."""
    model = nn.Linear(3, 1, bias=False).double()
    groups = [ParamGroup(list(model.parameters()), 0.02, weight_decay=0.5)]
    loop = Loop(context, "toy", model, groups, 1, adam_epsilon=epsilon)
    before, gradient = model.weight.detach().clone(), 1e-8
    loop.set_lr(groups, 0.5)
    loop.step(gradient * model.weight.sum().expand(4), torch.zeros(4))
    after = before * (1 - 0.01 * 0.5) - 0.01 * gradient / (gradient + epsilon)
    torch.testing.assert_close(model.weight.detach(), after, rtol=1e-9, atol=1e-12)


def test_the_speed_counts_the_reading_of_batches(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    now, rows = [0.0], list[EpochLog]()
    monkeypatch.setattr(loop_module.time, "monotonic", lambda: now[0])

    def slow(epoch: int, factor: float) -> Iterator[Inputs]:
        for batch in batches_of(epoch, factor):
            now[0] += 2.0
            yield batch

    class Rows(Observer):
        def epoch(self, row: EpochLog, n_epochs: int) -> None:
            rows.append(row)

    train(replace(context, observer=Rows()), batches=slow)
    assert {(row.seconds, row.images_per_second) for row in rows} == {(6.0, 15 / 6.0)}


@pytest.mark.parametrize(("precision", "dtype"), [("bfloat16", torch.bfloat16), ("auto", torch.float32)])
def test_the_forward_pass_has_the_precision_asked_for(
    squares: ImageData, tmp_path: Path, precision: str, dtype: torch.dtype
) -> None:
    model = nn.Linear(2, 2)
    context = tiny_context(tmp_path, squares, precision=precision)
    with Loop(context, "toy", model, [ParamGroup(list(model.parameters()), 1.0)], 1).autocast():
        assert model(torch.zeros(1, 2)).dtype == dtype
