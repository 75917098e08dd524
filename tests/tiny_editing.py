"""A run small enough to edit in tests: coloured squares, a random network, and a tree whose prototypes are patches."""

from pathlib import Path

import numpy as np
import torch

from prototree import files
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.config import Config
from prototree.core import checkpoint
from prototree.core.checkpoint import PROJECTED
from prototree.core.model import ProtoTree
from prototree.core.nodes import PAPER, NodeFunction
from prototree.core.topology import Topology
from prototree.data import open_data
from prototree.data.loading import ViewDataset
from prototree.data.views import evaluation_views
from prototree.features.batches import PhotoBatches, maps_of
from prototree.run import Run
from prototree.training.leaf_training import refit_leaves
from prototree.training.projection import SourcePhotos, measure_again, project
from tiny_training import write_squares


def tiny_run(folder: Path, question: NodeFunction = PAPER) -> Run:
    """A projected tree of height 2 over three classes, with fitted leaves, in the form of a run."""
    data = open_data(write_squares(folder / "squares", train=6, test=4))
    torch.manual_seed(0)
    features = FeatureExtractor(Backbone("resnet18", None, image_size=32, feature_level=-3), 8)
    tree = ProtoTree(Topology.full(2), features, data.class_names, question=question).eval()
    dataset = ViewDataset(data.train, evaluation_views, tree.preprocessing)
    maps = list(maps_of(PhotoBatches(dataset, 8, shuffle=False), features))
    projected = project(tree, maps, SourcePhotos(data.root, dataset.entries), project_within_class=False)
    measure_again(projected, dataset.entries)
    tree = projected.tree

    def sweep(visit):  # type: ignore[no-untyped-def]
        for feature_map, labels, _ in maps:
            visit(tree.route(feature_map), labels)

    refit_leaves(tree, sweep, n_sweeps=3)
    run = Run(folder / "run")
    (run.folder / PROJECTED).mkdir(parents=True)
    checkpoint.save(tree, run.folder / PROJECTED)
    files.write_file(run.folder / "config.toml", Config().to_toml().encode())
    run.note(source=str(folder / "squares"), classes=list(data.class_names))
    return run


def content_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def same_tree(one: ProtoTree, other: ProtoTree) -> bool:
    return (
        np.array_equal(one.topology.left, other.topology.left)
        and np.array_equal(one.topology.right, other.topology.right)
        and torch.equal(one.prototypes, other.prototypes)
        and torch.equal(one.leaf_logits, other.leaf_logits)
        and torch.equal(one.reach, other.reach)
        and one.sources == other.sources
    )
