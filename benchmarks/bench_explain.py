"""What explanations cost, as ratios to a forward pass measured beside them.

    python benchmarks/bench_explain.py [--backbone resnet50] [--images 150] [--rounds 3]

The whole tree: the data of a report for a projected tree of 200 prototypes over 1,500 training photos, scaled to
`--images` photos with the same number of prototypes for each photo, against one pass of the same photos through the
network as it is. Both read their photos from disk. One decision: an image against a tree of 255 prototypes (paths of
8), against one forward pass of that image. Times are the process's own, on one thread, so that other work on the
machine does not count. Networks have random weights unless they are packaged: the costs are the same.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.model import ProtoTree
from prototree.core.projection import project
from prototree.core.topology import Topology
from prototree.data import ImageData, open_data
from prototree.data.crops import projection_views
from prototree.data.loader import ViewDataset
from prototree.explanation.assets import PrototypePictures
from prototree.explanation.decision import explain_image
from prototree.explanation.prototypes import explain_prototypes
from prototree.features.cache import EvalBatches, eval_batches
from prototree.training.sources import attach_sources
from prototree_birds import write_birds

PROTOTYPES_PER_PHOTO = 200 / 1500


def chain(n_nodes: int) -> Topology:
    """A tree of any number of nodes."""
    left = [~node for node in range(n_nodes)]
    right = [node + 1 for node in range(n_nodes - 1)] + [~n_nodes]
    return Topology.from_children(left, right)[0]


def photos(data: ImageData, tree: ProtoTree) -> EvalBatches:
    dataset = ViewDataset(data.train, partial(projection_views, kind=data.kind), tree.preprocessing)
    return eval_batches(tree.features, dataset)


def projected(topology: Topology, features: FeatureExtractor, data: ImageData) -> ProtoTree:
    tree = ProtoTree(topology, features, data.class_names).eval()
    batches = photos(data, tree)
    projection = project(tree, batches.encoded(features))
    attach_sources(projection, batches.entries, data.folder)
    return projection.tree.eval()


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def interleaved(rounds: int, *works: Callable[[], object]) -> list[float]:
    """Medians of several rounds, one of each in turn, so that other work on the machine hits all alike."""
    times = [[seconds(work) for work in works] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="auto")
    parser.add_argument("--images", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        n_species = 10
        per_species = options.images // n_species
        write_birds(
            Path(folder) / "b", n_species=n_species, train_per_species=per_species, test_per_species=1, size=256
        )
        data = open_data(Path(folder) / "b")
        features = FeatureExtractor(Backbone(options.backbone, "auto" if options.backbone == "auto" else None), 256)
        n_nodes = round(len(data.train) * PROTOTYPES_PER_PHOTO)
        tree = projected(chain(n_nodes), features, data)

        def forward() -> None:
            for _ in photos(data, tree).encoded(tree.features):
                pass

        report = partial(explain_prototypes, tree, data, range(n_nodes))
        one_pass, whole = interleaved(options.rounds, forward, report)
        print(f"{features.backbone.name}, {tree.preprocessing.size} px, {len(data.train)} photos, {n_nodes} prototypes")
        print(f"the whole tree: {whole / one_pass:.2f} times one forward pass over the photos ({one_pass:.1f} s)")

        large = projected(Topology.full(8), features, data)
        photo = data.test[0].path
        pictures = PrototypePictures(large, data)
        for node in range(large.topology.n_nodes):
            pictures.crop(node)  # as a server has them after a while
        images = torch.rand(1, 3, tree.preprocessing.size, tree.preprocessing.size)
        local = partial(explain_image, large, photo, pictures)
        local_more = partial(explain_image, large, photo, pictures, attribution=True)
        one, plain = interleaved(7, partial(large.predict, images), local)
        more = seconds(local_more)
        for name, took in (("one decision", plain), ("with attribution and hiding tests", more)):
            print(
                f"{name}: {took / one:.2f} times one forward pass ({one * 1000:.0f} ms); "
                f"2.5 passes + {(took - 2.5 * one) * 1000:.0f} ms"
            )


if __name__ == "__main__":
    main()
