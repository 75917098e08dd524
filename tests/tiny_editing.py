"""A run small enough to edit in tests: coloured squares, a random network, and a tree whose prototypes are patches."""

from pathlib import Path

import numpy as np
import torch

from prototree import io
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.config import Config
from prototree.core import checkpoint
from prototree.core.checkpoint import PROJECTED
from prototree.core.model import ProtoTree
from prototree.core.nodes import PAPER, NodeFunction
from prototree.core.projection import project
from prototree.core.topology import Topology
from prototree.data import open_data
from prototree.data.crops import evaluation_views
from prototree.data.loader import ViewDataset
from prototree.features.cache import eval_batches
from prototree.run import Run
from prototree.training.paper import refit_leaves
from prototree.training.sources import attach_sources
from tiny_training import write_squares


def tiny_run(folder: Path, node_function: NodeFunction = PAPER) -> Run:
    """A projected tree of height 2 over three classes, with fitted leaves, in the form of a run."""
    data = open_data(write_squares(folder / "squares", train=6, test=4))
    torch.manual_seed(0)
    features = FeatureExtractor(Backbone("resnet18", None, image_size=32, feature_level=-3), 8)
    tree = ProtoTree(Topology.full(2), features, data.class_names, node_function=node_function).eval()
    dataset = ViewDataset(data.train, evaluation_views, tree.preprocessing)
    maps = list(eval_batches(features, dataset).encoded(features))
    projected = project(tree, maps, project_within_class=False)
    attach_sources(projected, dataset.entries, data.root)
    tree = projected.tree
    for _ in range(3):
        refit_leaves(tree, ((tree.forward_features(feature_map), labels) for feature_map, labels, _ in maps))
    run = Run(folder / "run")
    (run.folder / PROJECTED).mkdir(parents=True)
    checkpoint.save(tree, run.folder / PROJECTED)
    io.write_file(run.folder / "config.toml", Config().to_toml().encode())
    run.update_metrics(source=str(folder / "squares"), classes=list(data.class_names))
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
        and torch.equal(one.radius, other.radius)
        and one.sources == other.sources
    )
