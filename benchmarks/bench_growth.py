"""How time and memory grow with classes and views: the real code on maps that are made up as they are read.

    python benchmarks/bench_growth.py [--classes 200,1000,10000] [--views 5000,50000,1000000] [--batches 3]

One process for every pair. Maps have the default network's shape (320×9×9) and are a function of their number, so that
none is stored. What goes once over all views is timed on a few batches and given per view; what is done once is timed
as a whole. Processor time; memory is the highest that the process had while doing it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.backbones.geometry import Box
from prototree.config import preset
from prototree.core.leaves import class_log_probs
from prototree.core.model import ProtoTree
from prototree.core.nodes import NodeFunction
from prototree.data.dataset import Sample
from prototree.data.loading import Entry
from prototree.data.occlusion import HiddenView
from prototree.data.views import FULL, View
from prototree.evaluation.metrics import evaluate
from prototree.explain.records import TreeExplanation
from prototree.features.batches import CachedBatches, maps_of
from prototree.features.cache import Inputs, MapCache
from prototree.report.text import Reading
from prototree.training.anchored import AnchoredObjective, HeadObjective
from prototree.training.calibrate import held_photos, without
from prototree.training.grow import grow, sample_maps, standardise
from prototree.training.leaf_training import refit_leaves
from prototree.training.loop import Loop, Objective, Options
from prototree.training.memory_budget import Room
from prototree.training.objectives import Cosine, SoftTargets
from prototree.training.occlusion_loss import OccludedPairs
from prototree.training.projection import project
from prototree.training.recipes.distill import Distill, temperature_for
from prototree.training.target_rows import target_rows

SHAPE, BANK, VIEWS_A_PHOTO, SOURCES_A_PHOTO, EPOCHS = (320, 9, 9), 64, 6, 2, 6
VIEWS = [FULL, *(View(f"other {number}") for number in range(1, VIEWS_A_PHOTO))]


class MadeUpMaps(MapCache):
    """Every map is one of a few, moved by what its class looks like."""

    def read(self, indices: Sequence[int], epoch: int) -> Inputs:
        bank, codes = _look(self.entries[-1].sample.label + 1)
        labels = torch.tensor([self.entries[index].sample.label for index in indices], dtype=torch.long)
        some = torch.tensor([7919 * self.entries[index].sample_index % BANK for index in indices], dtype=torch.long)
        values = (bank[some] + codes[labels][:, :, None, None]).clamp_min_(0)
        return Inputs(values, labels, torch.tensor(indices, dtype=torch.long))

    def only(self, places: Sequence[int]) -> "MadeUpMaps":
        return MadeUpMaps((), tuple(self.entries[place] for place in places), frozenset())


_LOOKS: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def _look(n_classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    if n_classes not in _LOOKS:
        chance = torch.Generator().manual_seed(0)
        bank = torch.randn(BANK, *SHAPE, generator=chance)
        _LOOKS[n_classes] = bank, 0.7 * torch.randn(n_classes, SHAPE[0], generator=chance)
    return _LOOKS[n_classes]


def entries_of(n_classes: int, n_views: int) -> Iterator[Entry]:
    """All views of all photos; classes are as large as each other, the last one comes last."""
    n_photos = max(n_views // VIEWS_A_PHOTO, n_classes)
    for photo in range(n_photos):
        label = photo * n_classes // n_photos
        sample = Sample(Path(f"{label}/{photo}.jpg"), label)
        yield from (Entry(photo, sample, view) for view in VIEWS)


class Clock:
    """Processor seconds and the highest memory of each piece."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, str, float]] = []

    @contextmanager
    def piece(self, name: str, per: int = 0, unit: str = "view") -> Iterator[None]:
        """`per` counts what was done, of what goes over all of it; 0: done once."""
        Path("/proc/self/clear_refs").write_text("5")  # the highest memory counts from here on
        start = time.process_time()
        yield
        seconds = time.process_time() - start
        taken = (1000 * seconds / per, f"ms a {unit}") if per else (seconds, "s")
        self.rows.append((name, *taken, _peak()))


def _peak() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 2**20 for line in lines if line.startswith("VmHWM"))


class FewBatches(CachedBatches):
    """The first batches of an epoch."""

    most = 3

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Inputs]:
        for number, inputs in enumerate(super().epoch(epoch, start)):
            if number == self.most:
                return
            yield inputs


def train_steps(clock: Clock, name: str, objective: Objective, batches: FewBatches, epoch: int = 0) -> None:
    """Steps of an epoch of a training, after one that warms up."""
    objective.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    loop = Loop(objective, batches, 1, Options(channels_last=True))
    objective.train()
    objective.start_epoch(epoch, is_continued=False)
    every = list(batches.epoch(0))
    loop._step(objective, every[0])
    with clock.piece(name, sum(len(inputs.labels) for inputs in every)):
        for inputs in every:
            loop._step(objective, inputs)


def measure(n_classes: int, n_views: int, n_batches: int, folder: Path) -> Clock:
    """One pair of classes and views, from the list of photos to the rules of the report."""
    torch.manual_seed(0)
    clock, config, FewBatches.most = Clock(), preset("default"), n_batches
    assert isinstance(config.recipe, Distill)
    recipe = replace(config.recipe, temperature=temperature_for(n_classes))
    with clock.piece("list of views"):
        every = MadeUpMaps((), tuple(entries_of(n_classes, n_views)), frozenset())
        views_of = range(0, len(every.entries), VIEWS_A_PHOTO)
        plain = every.only([first + i for first in views_of for i in range(SOURCES_A_PHOTO)])
    with clock.piece("holding out photos"):
        without(every, held_photos(plain.entries, recipe.hold_out))
    batches = FewBatches(every, config.batch_size, shuffle=True)
    sources = FewBatches(plain, config.batch_size, shuffle=False)
    backbone = Backbone("auto", None, image_size=config.image_size, split=False)
    features = FeatureExtractor(backbone, config.prototype_dim, config.head_hidden_dim)
    with clock.piece("maps to start from"):
        maps, labels = sample_maps(sources, recipe.room)
        standardise(features, maps)
    head = HeadObjective(features, n_classes, recipe, Cosine(EPOCHS, batches.n_batches))
    train_steps(clock, "head, training step", head, batches)
    targets = targets_of(clock, head, batches, n_classes, folder, recipe.room)
    with clock.piece("growing the tree"):
        start = grow(
            features, maps, labels, "pairwise", recipe.max_mean_depth, recipe.init_median_distance, 0, recipe.room
        )
    del maps, labels, head
    with clock.piece("making the tree"):
        question = NodeFunction("pairwise", recipe.sharpness)
        tree = ProtoTree(start.topology, features, n_classes, question=question)
        twins = OccludedPairs.of(plain, with_places_hidden(plain), tree.preprocessing)
        objective = AnchoredObjective(tree, batches, recipe, EPOCHS, targets, start, sources, twins)
    train_steps(clock, "tree, training step", objective, batches)
    train_steps(clock, "tree, training step with places hidden", objective, batches, EPOCHS - 1)
    finish(clock, tree, objective, sources)
    return clock


def with_places_hidden(plain: MapCache) -> MapCache:
    """One for every second photo."""
    view = HiddenView("hidden", place=Box(0.4, 0.4, 0.55, 0.55), fill="blur", seed=0)
    chosen = plain.entries[:: 2 * SOURCES_A_PHOTO]
    return MadeUpMaps((), tuple(Entry(one.sample_index, one.sample, view) for one in chosen), frozenset())


def targets_of(
    clock: Clock, head: HeadObjective, batches: FewBatches, n_classes: int, folder: Path, room: Room
) -> SoftTargets:
    """The teacher's answers to a few batches, in memory or in a file that has room for all."""
    head.eval()
    few = list(batches.epoch(0))
    with clock.piece("teacher's answers", sum(len(inputs.labels) for inputs in few)), torch.no_grad():
        rows = target_rows(len(batches.entries), n_classes, folder, room)
        for inputs in few:
            rows.put(inputs.entries, head(inputs.values)[0].softmax(dim=1))
        return SoftTargets(rows.finished(), 1.0)


def finish(clock: Clock, tree: ProtoTree, objective: AnchoredObjective, sources: FewBatches) -> None:
    """What follows the training; each goes over a few batches."""
    n_seen = sum(len(inputs.labels) for inputs in sources.epoch(0))
    seen = partial(maps_of, sources, tree.features)
    pieces: list[tuple[str, int, Callable[[], object]]] = [
        ("what is usual at each turn", 0, objective.update_tree),
        ("leaf update, one sweep", n_seen, lambda: refit_leaves(tree, objective.sweep_labels)),
        ("projection", n_seen, lambda: project(tree, seen(), compare=True)),
        ("evaluation", n_seen, lambda: evaluate(tree, seen())),
        ("report, rules of all leaves", 0, lambda: Reading(explained(tree)).rules),
    ]
    for name, per, action in pieces:
        with clock.piece(name, per):
            action()


def explained(tree: ProtoTree) -> TreeExplanation:
    """The tree's page without its pictures."""
    sides = [tuple(side.tolist()) for side in (tree.topology.left, tree.topology.right)]
    probs: np.ndarray = class_log_probs(tree.leaf_logits.detach()).exp().numpy()
    return TreeExplanation("tree", tree.class_names, sides[0], sides[1], (), probs, {}, "pairwise")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", default="200,1000,10000")
    parser.add_argument("--views", default="5000,50000,1000000")
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.one:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(int(words.classes), int(words.views), words.batches, Path(folder)).rows))
        return
    pairs = [(k, m) for k in words.classes.split(",") for m in words.views.split(",") if int(m) >= 5 * int(k)]
    columns = []
    for k, m in pairs:
        command = [sys.executable, __file__, "--one", "--classes", k, "--views", m, "--batches", str(words.batches)]
        columns.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
        print(f"K = {k}, {m} views:", *(f"{n} {t:.3g} {u}, {g:.1f} GB;" for n, t, u, g in columns[-1]), file=sys.stderr)
    print("| what | " + " | ".join(f"K = {int(k):,}, {int(m):,} views" for k, m in pairs) + " |")
    print("| --- " * (len(pairs) + 1) + "|")
    for row in zip(*columns, strict=True):
        cells = (f"{taken:.3g} {unit}, {memory:.1f} GB" for _, taken, unit, memory in row)
        print(f"| {row[0][0]} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
