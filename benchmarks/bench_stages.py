"""Cost of projection, evaluation, pruning and single decisions beside one plain forward pass of ResNet50.

    python benchmarks/bench_stages.py [number of images, 512 by default]

Random images of 224 px, D = 256, 7×7 maps, K = 200, as in the paper. Projection and evaluation pull feature maps from
a generator that times its own forward passes, so that both sides of a ratio are the very same passes in the same run.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from rich.table import Table

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.model import ProtoTree
from prototree.core.projection import project
from prototree.core.pruning import prune
from prototree.core.topology import Topology
from prototree.evaluation.metrics import ErrorCollector, evaluate_all
from prototree.features.cache import MapBatch

BATCH, DEPTH, CLASSES = 32, 256, 200


class TimedMaps:
    """Feature maps of random images, and the seconds spent on their forward passes."""

    def __init__(self, features: FeatureExtractor, n_images: int) -> None:
        self._features, self._n_images = features.eval(), n_images
        self._images = torch.rand(BATCH, 3, 224, 224)
        self.seconds = 0.0

    @torch.no_grad()
    def __iter__(self) -> Iterator[MapBatch]:
        self.seconds = 0.0
        for start in range(0, self._n_images, BATCH):
            began = time.perf_counter()
            maps = self._features(self._images)
            self.seconds += time.perf_counter() - began
            places = torch.arange(start, start + BATCH)
            yield maps + 0.01 * torch.rand_like(maps), places % CLASSES, places


def ratio(maps: TimedMaps, action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) / maps.seconds


def milliseconds(action: Callable[[], object], repeats: int = 30) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times)


def random_tree(features: FeatureExtractor, height: int) -> ProtoTree:
    """Prototypes in the midst of the maps, and leaves of which one in ten has learned something."""
    tree = ProtoTree(Topology.full(height), features, CLASSES).eval()
    some = features(torch.rand(4, 3, 224, 224)).detach().permute(0, 2, 3, 1).flatten(0, 2)
    chosen = some[torch.randint(len(some), (tree.topology.n_nodes,))]
    tree.prototypes.data = (chosen + 0.02 * torch.randn_like(chosen))[:, :, None, None]
    learned = torch.rand(tree.topology.n_leaves) < max(0.1, CLASSES / tree.topology.n_leaves)
    tree.leaf_logits.data[learned, torch.randint(CLASSES, (int(learned.sum()),))] = 20.0
    return tree


def bench_height(features: FeatureExtractor, height: int, n_images: int, table: Table) -> None:
    tree, maps = random_tree(features, height), TimedMaps(features, n_images)
    pruned = prune(tree)
    projecting = ratio(maps, lambda: project(tree, maps, compare=True))
    trees = {"trained": tree, "pruned": pruned.tree, "projected": pruned.tree}
    finder = ErrorCollector(pruned.tree)
    evaluating = ratio(maps, lambda: evaluate_all(trees, finder.watch(maps)))
    one = torch.rand(1, DEPTH, 7, 7)
    with torch.no_grad():
        everything = milliseconds(lambda: tree.decode(tree.forward_features(one)))
    rows = [
        ("projection, both ways / forward passes", f"{projecting:.3f}×", {9: "1.10×", 11: "1.25×"}[height]),
        ("evaluation of three stages, with mistakes / forward passes", f"{evaluating:.3f}×", "1.05×"),
        ("pruning", f"{milliseconds(lambda: prune(tree)):.1f} ms", "50 ms"),
        ("one image, all three strategies, tree part", f"{everything:.1f} ms", "5 ms"),
    ]
    for what, measured, allowed in rows:
        table.add_row(f"h = {height}", what, measured, allowed)


def main(n_images: int) -> None:
    torch.manual_seed(0)
    features = FeatureExtractor(Backbone("resnet50", None), DEPTH)
    title = f"{n_images} images of 224 px, ResNet50, {torch.get_num_threads()} threads"
    table = Table("tree", "what", "measured", "at most", title=title)
    for height in (9, 11):
        bench_height(features, height, n_images, table)
    Console().print(table)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 512)
