"""A run that is killed at any moment of any stage and continued is the run that nobody disturbed, bit for bit.

Moments are events, not times (`tests/fork_server.py`). What is compared are all files of the two folders, caches
included, but for how long things took.
"""

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from killed_runs import Commands, Ended, commands, content, differences, options
from prototree.editing.finetuning import can_finetune
from prototree.run import Run
from tiny_training import TINY, TINY_DISTILL, write_squares

NETWORK = {
    "backbone": "test_efficientnet",
    "feature_level": -2,
    "prototype_dim": 8,
    "batch_size": 16,
    "checkpoint_minutes": 0,
}
# Every stage: tuning the network, two caches, the head, the tree, the second tree, and what follows.
DISTILL = (
    TINY_DISTILL | NETWORK | {"pretrain_epochs": 2, "head_epochs": 2, "epochs": 2, "hold_out": 2, "head_hidden_dim": 8}
)
PAPER = TINY | NETWORK | {"pretrain_epochs": 1, "cache_views": 2, "freeze_epochs": 1, "epochs": 2, "height": 2}
RECIPES: dict[str, dict[str, Any]] = {"distill": DISTILL, "paper": PAPER}
Count = Callable[[str, object], None]


class Ground:
    """Photos, a run that nobody disturbed, and a way to disturb others."""

    def __init__(self, folder: Path, do: Commands, recipe: str) -> None:
        self.folder, self.do, self.recipe, self._settings = folder, do, recipe, RECIPES[recipe]
        self.photos = write_squares(folder / "photos", train=14, test=2)
        self._count = 0
        self.free = folder / "undisturbed" / "run"
        self.undisturbed = self.train(self.free)
        assert self.undisturbed.code == 0, self.undisturbed.err
        self.expected = content(self.free)

    def train(self, run: Path, *words: str, workers: int = 0, **when: Any) -> Ended:
        settings = options(self._settings | {"workers": workers})
        cache = run.parent / "cache"  # of its own, so that every run writes what the undisturbed one does
        return self.do.run("train", self.photos, "--out", run, *settings, *words, cache=cache, **when)

    def new_run(self) -> Path:
        """A folder of the same name: a run's name stands in its tables."""
        self._count += 1
        return self.folder / str(self._count) / "run"

    def moments(self, chance: random.Random, each: int) -> list[tuple[int, int]]:
        """Some moments of every stage."""
        stages = self.undisturbed.stages.items()
        return [(number, chance.randrange(count)) for number, (_, count) in stages for _ in range(each)]

    def disturbed_at(self, moments: list[tuple[int, int]], number: int, workers: int = 0) -> tuple[Path, list[Ended]]:
        """A run that gets the signal at each of these moments in turn, and is continued each time."""
        run, ends = self.new_run(), []
        for snapshot in moments:
            at = self._as_continued(run, snapshot)
            ends.append(self.train(run, "--resume", at=at, number=number, workers=workers))
        ends.append(self.train(run, "--resume", workers=workers))
        assert ends[-1].code == 0, ends[-1].err
        return run, ends

    def _as_continued(self, run: Path, snapshot: tuple[int, int]) -> tuple[int, int]:
        """The same moment where the second tree is known already: that is one stage instead of three."""
        stages = [line for line in self.undisturbed.out.splitlines() if line.startswith("• ")]
        second = next((n for n, line in enumerate(stages, 1) if "training a second tree" in line), len(stages))
        is_known = any((run.parent / "prototree-maps").glob("sure-*.json"))
        return (snapshot[0] - 2, snapshot[1]) if is_known and snapshot[0] > second + 2 else snapshot


@pytest.fixture(scope="module", params=RECIPES)
def ground(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    folder = tmp_path_factory.mktemp("kills")
    with commands(folder / "commands") as do:
        yield Ground(folder, do, request.param)


def test_killed_in_every_stage_a_run_ends_with_the_same_bits(ground: Ground, record_property: Count) -> None:
    moments = ground.moments(random.Random(1), each=1)
    run, ends = ground.disturbed_at(moments, signal.SIGKILL)
    kills = sum(end.code == -signal.SIGKILL for end in ends)
    assert kills == len(moments)
    assert differences(content(run), ground.expected) == []
    record_property("counted", f"{ground.recipe}: {kills} kills, one in each stage of one run: no file differs")


def test_asked_to_stop_in_every_stage_a_run_says_what_is_kept(ground: Ground, record_property: Count) -> None:
    moments = ground.moments(random.Random(2), each=1)
    number = signal.SIGTERM if len(moments) % 2 else signal.SIGINT
    run, ends = ground.disturbed_at(moments, number)
    stopped = ends[:-1]
    for (stage, _), end in zip(moments, stopped, strict=True):
        assert end.code == 130, (stage, end.code, end.err)
        assert "Traceback" not in end.err
        kept = "nothing had been finished yet" if stage == 0 else "kept in"
        assert f"stopped; {kept}" in end.err or stage == 1, end.err
        assert "continue with the same command and --resume" in end.err
    assert "trained, pruned, projected" in stopped[-1].err
    assert differences(content(run), ground.expected) == []
    name = signal.Signals(number).name
    record_property("counted", f"{ground.recipe}: {len(stopped)} {name}, each said what is kept: no file differs")


def test_the_number_of_workers_changes_no_bit(ground: Ground) -> None:
    run = ground.new_run()
    assert ground.train(run, workers=2).code == 0
    assert differences(content(run), ground.expected) == ["config.toml"], "which names the number"


def test_a_finished_run_has_nothing_to_do(ground: Ground) -> None:
    again = ground.train(ground.free, "--resume")
    assert again.code == 0
    assert "nothing to do" in again.out
    assert len(again.stages) == 2, "nothing else was begun"
    assert differences(content(ground.free), ground.expected) == []


def test_a_refused_resume_leaves_everything_as_it_is(ground: Ground) -> None:
    before = content(ground.free)
    refused = ground.train(ground.free, "--resume", "--seed", "5")
    assert refused.code == 1
    assert "seed 0 then, 5 now" in refused.err
    assert content(ground.free) == before


def test_leftovers_of_killed_processes_are_removed(ground: Ground) -> None:
    run, gone = ground.new_run(), 2**22 + 1  # no process can have this number
    writes = [n for n, (name, count) in ground.undisturbed.stages.items() if count > 3]
    assert ground.train(run, at=(writes[1], 3)).code == -signal.SIGKILL
    leftovers = [
        run / f".metrics.json.{gone}.tmp",
        run / "cache" / "x.partial",
        run / "last" / "weights.safetensors.new",
    ]
    for path in leftovers:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    (run / f".run.partial-{gone}").mkdir()
    (run / ".mine.tmp").write_text("no process's")
    assert ground.train(run, "--resume").code == 0
    assert differences(content(run), ground.expected) == [".mine.tmp"]
    assert not (run / f".run.partial-{gone}").exists()


@pytest.mark.slow
def test_a_killed_finetuning_ends_with_the_same_bits(ground: Ground, record_property: Count) -> None:
    if not can_finetune(Run(ground.free)):
        pytest.skip("the published recipe moves its prototypes")

    def finetune(run: Path, **when: Any) -> Ended:
        return ground.do.run("finetune", ground.free, "--out", run, "--epochs", 2, **when)

    free, run = ground.new_run(), ground.new_run()
    undisturbed = finetune(free)
    assert undisturbed.code == 0, undisturbed.err
    chance = random.Random(4)
    moments = [(number, chance.randrange(count)) for number, (_, count) in undisturbed.stages.items()]
    kills = [finetune(run, at=snapshot).code for snapshot in moments]
    assert kills == [-signal.SIGKILL] * len(moments)
    assert finetune(run).code == 0
    assert differences(content(run), content(free)) == []
    record_property("counted", f"finetune: {len(kills)} kills, one in each stage: no file differs")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_kills_at_random_moments(ground: Ground, workers: int, record_property: Count) -> None:
    chance, kills, runs = random.Random(3 + workers), 0, 0
    moments = ground.moments(chance, each=3)
    chance.shuffle(moments)
    while moments:  # alone, or a few in a row
        some, moments = moments[: (n := chance.choice([1, 1, 1, 3]))], moments[n:]
        run, ends = ground.disturbed_at(sorted(some), signal.SIGKILL, workers)
        kills, runs = kills + sum(end.code == -signal.SIGKILL for end in ends), runs + 1
        found = differences(content(run), ground.expected)
        assert found == (["config.toml"] if workers else []), some
    assert kills > runs
    record_property(
        "counted", f"{ground.recipe}: {kills} kills at random in {runs} runs, {workers} workers: none differs"
    )
