"""A bench without photos or a network: maps are random numbers, and the tree has seven nodes over them."""

from pathlib import Path

import torch

from conftest import random_maps
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.backbones.geometry import Box
from prototree.core.model import ProtoTree, PrototypeSource
from prototree.core.nodes import PAPER, NodeFunction
from prototree.core.topology import Topology
from prototree.data.crops import FULL_IMAGE, View
from prototree.data.dataset import Sample
from prototree.data.loader import Entry
from prototree.editing.workbench import Workbench
from prototree.features.cache import FeatureMaps, StoredMaps

ROOT = Path("/data")
N_TRAIN, N_VALIDATION, K = 12, 9, 3
INNER = View("box", Box(20.0, 0.0, 84.0, 64.0))


def stored(seed: int, entries: list[Entry]) -> StoredMaps:
    maps = random_maps(seed, len(entries), 4, 4, 4, dtype=torch.float32)
    return StoredMaps(FeatureMaps((maps.numpy()[None],), tuple(entries), frozenset()))


def photos(n: int, *views: View) -> list[Entry]:
    samples = [Sample(ROOT / f"{i}.png", i % K, size=(128, 64)) for i in range(n)]
    return [Entry(i, sample, view) for i, sample in enumerate(samples) for view in views]


def make_bench(
    backbone: Backbone, *, two_views: bool = False, size: tuple[int, int] = (1, 1), node_function: NodeFunction = PAPER
) -> Workbench:
    torch.manual_seed(0)
    tree = ProtoTree(Topology.full(3), FeatureExtractor(backbone, 4), K, size, node_function=node_function)
    tree.prototypes.data = random_maps(3, tree.n_prototypes, 4, *size, dtype=torch.float32)
    tree.leaf_logits.data = random_maps(4, 8, K, dtype=torch.float32) * 5
    training = stored(1, photos(N_TRAIN, INNER, FULL_IMAGE) if two_views else photos(N_TRAIN, FULL_IMAGE))
    tree.sources = tuple(
        PrototypeSource(f"{n % N_TRAIN}.png", n % K, "full", (0, 0), (0.0, 0.0, 32.0, 16.0), 0.0)
        for n in range(tree.n_prototypes)
    )
    source = INNER if two_views else FULL_IMAGE
    return Workbench(tree, ROOT, training, stored(2, photos(N_VALIDATION, FULL_IMAGE)), lambda _: (source,))
