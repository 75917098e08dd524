"""A run that is killed at any moment of any stage and resumed is the run that nobody disturbed, bit for bit."""

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from killed_runs import Commands, Ended, content, differences, options
from prototree.features.cache import FOLDER
from tiny_training import TINY, TINY_DISTILL, write_squares

NETWORK = {"feature_level": -2, "prototype_dim": 8, "batch_size": 16, "pretrain_epochs": 1, "epochs": 2}
# Every stage: the backbone, two caches, the head, the tree, the second tree, and what follows.
RECIPES: dict[str, dict[str, Any]] = {
    "distill": TINY_DISTILL | NETWORK | {"head_epochs": 2, "calibration_fraction": 0.5, "head_hidden_dim": 8},
    "paper": TINY | NETWORK | {"cache_views": 2, "freeze_epochs": 1, "height": 2, "prune_threshold": 0.34},
}


class Ground:
    """Images, a run that nobody disturbed, and a way to disturb others."""

    def __init__(self, folder: Path, do: Commands, recipe: str) -> None:
        self.folder, self.do, self.recipe, self._count = folder, do, recipe, 0
        self.images = write_squares(folder / "images", train=14, test=2)
        self.free = folder / "undisturbed" / "run"
        self.undisturbed = self.train(self.free)
        assert self.undisturbed.code == 0, self.undisturbed.err
        self.expected = content(self.free)

    def train(self, run: Path, *words: str, workers: int = 0, **when: Any) -> Ended:
        settings = options(RECIPES[self.recipe] | {"workers": workers})
        cache = run.parent / "cache"  # of its own, so that every run writes what the undisturbed one does
        return self.do.run("train", self.images, "--out", run, *settings, *words, cache=cache, **when)

    def new_run(self) -> Path:
        """A folder of the same name: a run's name stands in its tables."""
        self._count += 1
        return self.folder / str(self._count) / "run"

    def moments(self, chance: random.Random, each: int = 1) -> list[tuple[int, int]]:
        """Some moments of every stage."""
        stages = self.undisturbed.stages.items()
        return [(number, chance.randrange(count)) for number, (_, count) in stages for _ in range(each)]

    def disturb(self, moments: list[tuple[int, int]], number: int, workers: int = 0) -> list[Ended]:
        """Train a run that gets the signal at each of these moments in turn, is resumed each time, and is the same."""
        run, ends = self.new_run(), []
        stages = [line for line in self.undisturbed.out.splitlines() if line.startswith("• ")]
        second = next((n for n, line in enumerate(stages, 1) if "second tree" in line), len(stages))
        for stage, event in moments:
            # Where the calibration is known already, that is one stage instead of three.
            is_known = any((run.parent / FOLDER).glob("calibration-*.json")) and stage > second + 2
            at = (stage - 2 * is_known, event)
            ends.append(self.train(run, "--resume", at=at, number=number, workers=workers))
        last = self.train(run, "--resume", workers=workers)
        assert last.code == 0, last.err
        assert differences(content(run), self.expected) == (["config.toml"] if workers else []), moments
        return ends


@pytest.fixture(scope="module", params=RECIPES)
def ground(request: pytest.FixtureRequest, do: Commands, tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(tmp_path_factory.mktemp("kills"), do, request.param)


SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


@pytest.mark.parametrize(
    ("number", "step"),
    [(signal.SIGKILL, 3), (signal.SIGTERM, 7), *(pytest.param(n, 1, marks=pytest.mark.slow) for n in SIGNALS)],
)
def test_ended_in_every_stage_a_run_has_the_same_bits(ground: Ground, number: int, step: int) -> None:
    """In the quick run in some of the stages."""
    moments = ground.moments(random.Random(int(number)))[step // 2 :: step]
    for end in ground.disturb(moments, number):
        assert end.code == (-number if number == signal.SIGKILL else 130), end.err
        assert "Traceback" not in end.err
        assert number == signal.SIGKILL or "--resume" in end.err


def test_workers_change_no_bit_and_a_finished_run_stays(ground: Ground) -> None:
    ground.disturb([], signal.SIGKILL, workers=2)
    again = ground.train(ground.free, "--resume")
    assert (again.code, len(again.stages)) == (0, 2), "nothing else was begun"
    assert ground.train(ground.free, "--resume", "--seed", "5").code == 1
    assert differences(content(ground.free), ground.expected) == []


def test_leftovers_of_killed_processes_are_removed(ground: Ground) -> None:
    run, gone = ground.new_run(), 2**22 + 1  # no process can have this number
    stage = [number for number, (_, count) in ground.undisturbed.stages.items() if count > 3][1]
    assert ground.train(run, at=(stage, 3)).code == -signal.SIGKILL
    for name in (f".metrics.json.{gone}.tmp", f"{FOLDER}/x.partial", "checkpoints/tree/weights.safetensors.new"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(b"half")
    (run / f".run.partial-{gone}").mkdir()
    (run / ".mine.tmp").write_text("no process's")
    assert ground.train(run, "--resume").code == 0
    assert differences(content(run), ground.expected) == [".mine.tmp"]
    assert not (run / f".run.partial-{gone}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_kills_at_random_moments(ground: Ground, workers: int) -> None:
    chance = random.Random(3 + workers)
    moments = ground.moments(chance, each=3)
    chance.shuffle(moments)
    while moments:  # alone, or a few in a row
        batch, moments = moments[: (n := chance.choice([1, 1, 1, 3]))], moments[n:]
        ground.disturb(sorted(batch), signal.SIGKILL, workers)
