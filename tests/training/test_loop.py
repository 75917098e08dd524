"""Contract 6, second part: the same seed gives the same weights, and a continued run those of an uninterrupted one."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.model import ProtoTree
from prototree.core.topology import Topology
from prototree.data.loading import BatchOrder, Shard
from prototree.errors import CheckpointError, TrainError
from prototree.features.cache import Inputs
from prototree.progress import EpochLog, Observer
from prototree.training import loop as loop_module
from prototree.training.leaf_training import LEAF_TRAINERS
from prototree.training.loop import Loop, Options
from prototree.training.objectives import Schedule, TreeObjective
from prototree.training.signals import Interrupted
from tiny_training import MapBatches

SCHEDULE = Schedule(epochs=4, freeze_epochs=2, lr_prototypes=0.02, lr_last_block=0.02, milestones=(3,))


def objective(
    backbone: Backbone, batches: MapBatches, leaves: str = "interleaved", dropout: bool = False
) -> TreeObjective:
    torch.manual_seed(5)
    features = FeatureExtractor(backbone, 8)
    if dropout:
        features.head = torch.nn.Sequential(torch.nn.Dropout(0.2), features.head)
    tree = ProtoTree(Topology.full(3), features, 3)
    return TreeObjective(tree, batches, SCHEDULE, LEAF_TRAINERS[leaves]())


class Bomb(Observer):
    """Does something before a given batch of an epoch is counted."""

    def __init__(self, epoch: int, batch: int, action: Callable[[], None]) -> None:
        self._when, self._action = (epoch, batch), action

    def batch(self, epoch: int, batch: int, n_batches: int, loss: float, accuracy: float, rate: float) -> None:
        if (epoch, batch) == self._when:
            self._action()


def weights(loop: Loop) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in loop.objective.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.fixture
def batches(tiny_backbone: Backbone) -> MapBatches:
    return MapBatches(tiny_backbone.n_channels)


def run(backbone: Backbone, batches: MapBatches, options: Options, listener: Observer | None = None, **choices) -> Loop:
    loop = Loop(objective(backbone, batches, **choices), batches, SCHEDULE.epochs, options, listener)
    loop.run()
    return loop


def test_the_same_seed_gives_the_same_weights_and_another_does_not(
    tiny_backbone: Backbone, batches: MapBatches
) -> None:
    one, same, other = (weights(run(tiny_backbone, batches, Options(seed=s), dropout=True)) for s in (0, 0, 1))
    assert_same(one, same)
    assert not torch.equal(one["tree.prototypes"], other["tree.prototypes"])


@pytest.mark.parametrize("epsilon", [1e-8, 1e-7])
def test_adam_moves_what_has_small_gradients_as_its_epsilon_says(
    tiny_backbone: Backbone, batches: MapBatches, epsilon: float
) -> None:
    gradient, rate = 1e-8, SCHEDULE.lr_prototypes
    learned = objective(tiny_backbone, batches)
    before = learned.tree.prototypes.detach().double().clone()
    learned.loss = lambda outputs, inputs: (  # a loss whose gradient is the same everywhere
        (gradient * learned.tree.prototypes.sum() + 0 * outputs[0].sum()).expand(len(inputs.labels)),
        torch.zeros(len(inputs.labels)),
    )
    learned.after_batch = lambda inputs: None
    batches._order = BatchOrder(8, 8, shuffle_seed=0, shard=Shard())  # one step
    Loop(learned, batches, 1, Options(epsilon=epsilon)).run()
    moved = before - learned.tree.prototypes.detach().double()
    expected = torch.full_like(moved, rate * gradient / (gradient + epsilon))
    torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-7)


def test_training_learns(tiny_backbone: Backbone, batches: MapBatches, tmp_path: Path) -> None:
    loop = Loop(objective(tiny_backbone, batches), batches, 12, Options(folder=tmp_path / "last"))
    rows = loop.run()
    assert rows[-1].loss < 0.6 * rows[0].loss
    assert rows[-1].accuracy > 0.9
    assert (tmp_path / "log.csv").read_text().count("\n") == 13


@pytest.mark.parametrize("leaves", list(LEAF_TRAINERS))
@pytest.mark.parametrize(("epoch", "batch"), [(0, 0), (1, 2), (3, 1), (3, 3)])  # the last is the very last
def test_a_signal_saves_and_a_resumed_run_ends_with_the_same_weights(
    tiny_backbone: Backbone, batches: MapBatches, tmp_path: Path, leaves: str, epoch: int, batch: int
) -> None:
    expected = weights(run(tiny_backbone, batches, Options(), leaves=leaves, dropout=True))
    options = Options(folder=tmp_path / "last", resume=True)
    bomb = Bomb(epoch, batch, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted):
        run(tiny_backbone, batches, options, bomb, leaves=leaves, dropout=True)
    served = batches.served
    continued = run(tiny_backbone, batches, options, leaves=leaves, dropout=True)
    assert batches.served - served < SCHEDULE.epochs * batches.n_batches * 2, "it did not start from the beginning"
    assert_same(weights(continued), expected)


def test_a_crash_between_saves_loses_only_what_came_after(
    tiny_backbone: Backbone, batches: MapBatches, tmp_path: Path
) -> None:
    expected = weights(run(tiny_backbone, batches, Options()))
    options = Options(folder=tmp_path / "last", resume=True)

    def crash() -> None:
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        run(tiny_backbone, batches, options, Bomb(2, 1, crash))
    assert_same(weights(run(tiny_backbone, batches, options)), expected)


def test_state_is_also_saved_in_the_middle_of_an_epoch(
    tiny_backbone: Backbone, batches: MapBatches, tmp_path: Path
) -> None:
    expected = weights(run(tiny_backbone, batches, Options()))
    options = Options(folder=tmp_path / "last", resume=True, checkpoint_minutes=0.0)

    def crash() -> None:
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        run(tiny_backbone, batches, options, Bomb(1, 2, crash))
    served = batches.served
    assert_same(weights(run(tiny_backbone, batches, options)), expected)
    assert batches.served - served == 2 + 2 * batches.n_batches, (
        "the two batches of epoch 1 that were left, then 2 epochs"
    )


def test_a_finished_run_is_not_trained_again(tiny_backbone: Backbone, batches: MapBatches, tmp_path: Path) -> None:
    options = Options(folder=tmp_path / "last", resume=True)
    expected, served = weights(run(tiny_backbone, batches, options)), batches.served
    assert_same(weights(run(tiny_backbone, batches, options)), expected)
    assert batches.served == served


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        ("a", "b", "a then, b now"),
        ("1", "2", "1 then, 2 now"),
        ('{"seed": 1, "prototype_dim": 8}', '{"seed": 2, "prototype_dim": 8}', "seed 1 then, 2 now"),
        ("{}", '{"prototype_dim": 8}', "prototype_dim 'not there' then, 8 now"),
    ],
)
def test_other_settings_do_not_continue_a_state(
    tiny_backbone: Backbone, batches: MapBatches, tmp_path: Path, then: str, now: str, words: str
) -> None:
    run(tiny_backbone, batches, Options(folder=tmp_path / "last", identity=then))
    with pytest.raises(CheckpointError, match=re.escape(f"other settings or data ({words})")):
        run(tiny_backbone, batches, Options(folder=tmp_path / "last", identity=now, resume=True))


def test_a_loss_that_is_no_number_stops_with_the_last_good_state(
    tiny_backbone: Backbone, batches: MapBatches, tmp_path: Path
) -> None:
    options = Options(folder=tmp_path / "last", resume=True)
    clean = batches.maps.clone()

    def poison() -> None:
        batches.maps[:] = float("nan")

    with pytest.raises(TrainError, match=r"epoch 2, batch 3: .*NaN.*last good state is in .*last"):
        run(tiny_backbone, batches, options, Bomb(1, 1, poison))
    batches.maps[:] = clean
    assert_same(weights(run(tiny_backbone, batches, options)), weights(run(tiny_backbone, batches, Options())))


def test_freezing_and_rates_follow_the_schedule_after_a_restart_too(
    tiny_backbone: Backbone, batches: MapBatches, tmp_path: Path
) -> None:
    options = Options(folder=tmp_path / "last", resume=True)
    with pytest.raises(Interrupted):
        run(tiny_backbone, batches, options, Bomb(0, 1, lambda: os.kill(os.getpid(), signal.SIGINT)))
    seen: list[tuple[bool, str]] = []

    class Watch(Observer):
        def epoch(self, row: EpochLog, n_epochs: int) -> None:
            seen.append((tiny_backbone.frozen, row.rates))

    run(tiny_backbone, batches, options, Watch())
    assert [frozen for frozen, _ in seen] == [True, True, False, False]
    assert seen[2][1] == "0.02 0.02 0.02 1e-05"
    assert seen[3][1] == "0.01 0.01 0.01 5e-06"


def test_signal_handlers_are_put_back(tiny_backbone: Backbone, batches: MapBatches) -> None:
    before = signal.getsignal(signal.SIGINT)
    run(tiny_backbone, batches, Options())
    assert signal.getsignal(signal.SIGINT) is before


def test_rates_follow_the_pace_within_an_epoch(tiny_backbone: Backbone, batches: MapBatches) -> None:
    learned = objective(tiny_backbone, batches)
    learned.pace = lambda epoch, share: 1 - (epoch + share) / SCHEDULE.epochs
    seen = []

    class Ear(Observer):
        def batch(self, epoch: int, batch: int, *rest: float) -> None:
            seen.append(loop._optimiser.param_groups[0]["lr"])

    loop = Loop(learned, batches, 2, Options(), Ear())
    loop.run()
    steps = 2 * batches.n_batches
    assert seen == pytest.approx([0.02 * (1 - step / (2 * steps)) for step in range(steps)])


def test_a_state_of_an_earlier_version_is_named_as_such(
    tiny_backbone: Backbone, batches: MapBatches, tmp_path: Path
) -> None:
    run(tiny_backbone, batches, Options(folder=tmp_path / "last", identity='{"lr_tail": 0.1}'))
    now = Options(folder=tmp_path / "last", identity='{"version": 2, "rate": 0.1}', resume=True)
    with pytest.raises(CheckpointError, match=r"begun by an earlier version of this program.*--overwrite"):
        run(tiny_backbone, batches, now)


def test_the_speed_counts_the_reading_of_batches(tiny_backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(loop_module.time, "monotonic", lambda: now[0])

    class Slow(MapBatches):
        def epoch(self, epoch: int, start: int = 0) -> Iterator[Inputs]:
            for inputs in super().epoch(epoch, start):
                now[0] += 2.0
                yield inputs

    slow = Slow(tiny_backbone.n_channels)
    loop = Loop(objective(tiny_backbone, slow), slow, 2, Options())
    assert [(row.seconds, row.images_per_second) for row in loop.run()] == [(8.0, 30 / 8.0)] * 2
