"""A training step of the default recipe beside its floor, the matrix products of the head alone.

All patches of a step go through the head; all of them back, while it is a classifier, and only those nearest to a
prototype under a tree. Of noise, as here, these are half of the patches; of photos, a sixth.

    python benchmarks/bench_steps.py [STEPS A ROUND]

Made-up maps of the default network's shape (320×9×9), 50 classes, one thread, because two trees are learned side by
side with one thread each. Processor time; rounds take turns and medians are compared. Reading the maps is part of a
step.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from bench_growth import MadeUpMaps, entries_of
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.config import preset
from prototree.core.model import ProtoTree
from prototree.core.nodes import NodeFunction
from prototree.data.loading import Entry
from prototree.features.batches import CachedBatches
from prototree.features.cache import MapCache
from prototree.training.anchored import FEWEST_OF_HEAD, FEWEST_OF_TREE, AnchoredObjective, HeadObjective
from prototree.training.grow import grow, sample_maps, standardise
from prototree.training.loop import Loop, Objective, Options
from prototree.training.objectives import Cosine, SoftTargets
from prototree.training.recipes.distill import Distill

N_CLASSES, N_VIEWS, ROUNDS, CHANNELS, SIDE = 50, 1200, 5, 320, 9


def kept_maps() -> MapCache:
    """16-bit maps in memory, read like those on disk."""
    entries: tuple[Entry, ...] = tuple(entries_of(N_CLASSES, N_VIEWS))
    made_up = MadeUpMaps((), entries, frozenset()).read(range(len(entries)), 0).values
    return MapCache((made_up.half().numpy().astype(np.float16)[None],), entries, frozenset())


def stepping(objective: Objective, batches: CachedBatches) -> Callable[[], None]:
    """A function that takes one step after the other."""
    objective.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    loop = Loop(objective, batches, 6, Options(channels_last=True))
    objective.train()
    objective.start_epoch(0, is_continued=False)
    every = (inputs for epoch in range(10**6) for inputs in batches.epoch(epoch))
    return lambda: loop._step(objective, next(every))


def products(n_rows: int, n_learning: int, sizes: list[tuple[int, int, bool]]) -> Callable[[], None]:
    """Linear layers (inputs, outputs, whether their input learns): forward on some patches, and back on some."""
    layers = [
        (torch.rand(n_rows, a), torch.rand(a, b), torch.rand(n_learning, a), torch.rand(n_learning, b), learns)
        for a, b, learns in sizes
    ]

    def run() -> None:
        for x, weight, own, gradient, learns in layers:
            torch.mm(x, weight)
            torch.mm(own.T, gradient)
            if learns:
                torch.mm(gradient, weight.T)

    return run


def followed(objective: AnchoredObjective, batches: CachedBatches) -> int:
    """Patches of a step that go back through the head: each that is nearest to a prototype, and the prototypes."""
    nearest = objective(next(batches.epoch(0)).values)[1]
    return sum(len(row.unique()) for row in nearest) + int(nearest.shape[1])


def measure(actions: dict[str, Callable[[], None]], n_steps: int) -> dict[str, float]:
    """Milliseconds of processor time of each."""
    found: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(ROUNDS + 1):
        for name, action in actions.items():
            start = time.process_time()
            for _ in range(n_steps):
                action()
            if turn:  # the first round warms up
                found[name].append(1000 * (time.process_time() - start) / n_steps)
    return {name: statistics.median(taken) for name, taken in found.items()}


def main() -> None:
    n_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = preset("default")
    recipe = config.recipe
    assert isinstance(recipe, Distill)
    maps = kept_maps()
    batches = CachedBatches(maps, config.batch_size, shuffle=True)
    some, labels = sample_maps(CachedBatches(maps, config.batch_size, shuffle=False))
    heads = [
        FeatureExtractor(Backbone("auto", None, split=False), config.prototype_dim, config.head_hidden_dim)
        for _ in range(2)
    ]
    for features in heads:
        standardise(features, some)
    head = HeadObjective(heads[0], N_CLASSES, recipe, Cosine(6, batches.n_batches))
    start = grow(heads[1], some, labels, "pairwise", recipe.max_mean_depth, recipe.init_median_distance, 0)
    tree = ProtoTree(start.topology, heads[1], N_CLASSES, question=NodeFunction("pairwise", recipe.sharpness))
    targets = SoftTargets(torch.full((len(maps.entries), N_CLASSES), 1 / N_CLASSES), 1.0)
    anchored = AnchoredObjective(tree, batches, recipe, 6, targets, start, batches)
    n_patches = SIDE * SIDE
    rows_of_head = config.batch_size * max(FEWEST_OF_HEAD, math.ceil(recipe.head_patch_fraction * n_patches))
    rows_of_tree = config.batch_size * max(FEWEST_OF_TREE, math.ceil(recipe.patch_fraction * n_patches))
    wide = [(CHANNELS, config.head_hidden_dim, False), (config.head_hidden_dim, config.prototype_dim, True)]
    step_of_tree = stepping(anchored, batches)
    n_followed = followed(anchored, batches)
    of_tree = products(rows_of_tree + n_followed, n_followed, [*wide, (config.prototype_dim, tree.n_prototypes, True)])
    found = measure(
        {
            "head": stepping(head, batches),
            "head, its products": products(
                rows_of_head, rows_of_head, [*wide, (config.prototype_dim, N_CLASSES, True)]
            ),
            "tree": step_of_tree,
            "tree, its products": of_tree,
        },
        n_steps,
    )
    print(f"{n_followed} of {rows_of_tree + tree.n_prototypes} patches go back through the head under the tree")
    for name in ("head", "tree"):
        step, floor = found[name], found[f"{name}, its products"]
        ratio = f"{step / floor:.2f}× its products ({floor:.1f} ms)"
        print(f"{name}: {step:.1f} ms a step of {config.batch_size} views, {ratio}")


if __name__ == "__main__":
    main()
