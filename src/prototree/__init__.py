"""Neural prototype trees: image classifiers that can be read in full.

>>> import prototree
>>> run = prototree.fit("photos/", "runs/photos")
>>> decisions = run.tree().predict(images)
"""

import importlib
from typing import TYPE_CHECKING, Any

from prototree._version import __version__

if TYPE_CHECKING:
    from prototree.config import Config, preset
    from prototree.data import ImageData, open_data
    from prototree.errors import ProtoTreeError
    from prototree.evaluation.ensembles import Ensemble
    from prototree.evaluation.metrics import Metrics, evaluate
    from prototree.mend.relearning import relearn
    from prototree.network.backbone import Backbone, FeatureExtractor
    from prototree.network.preprocessing import Preprocessing
    from prototree.pipeline.fit import Run, combine, fit, redo
    from prototree.pipeline.reproduce import reproduce
    from prototree.training.projection import project
    from prototree.tree.checkpoint import load, save
    from prototree.tree.model import Decisions, ProtoTree, PrototypeSource, Routed
    from prototree.tree.pruning import prune
    from prototree.tree.routing import Path
    from prototree.tree.topology import Topology

# Public name → the room it lives in. Loaded on first use: importing torch takes seconds, `prototree --help` none.
_ROOMS = {
    "Backbone": "network.backbone",
    "Config": "config",
    "Decisions": "tree.model",
    "Ensemble": "evaluation.ensembles",
    "FeatureExtractor": "network.backbone",
    "ImageData": "data",
    "Metrics": "evaluation.metrics",
    "Path": "tree.routing",
    "Preprocessing": "network.preprocessing",
    "ProtoTree": "tree.model",
    "ProtoTreeError": "errors",
    "PrototypeSource": "tree.model",
    "Routed": "tree.model",
    "Run": "pipeline.fit",
    "Topology": "tree.topology",
    "combine": "pipeline.fit",
    "evaluate": "evaluation.metrics",
    "fit": "pipeline.fit",
    "load": "tree.checkpoint",
    "open_data": "data",
    "preset": "config",
    "project": "training.projection",
    "prune": "tree.pruning",
    "redo": "pipeline.fit",
    "relearn": "mend.relearning",
    "reproduce": "pipeline.reproduce",
    "save": "tree.checkpoint",
}

__all__ = [
    "Backbone",
    "Config",
    "Decisions",
    "Ensemble",
    "FeatureExtractor",
    "ImageData",
    "Metrics",
    "Path",
    "Preprocessing",
    "ProtoTree",
    "ProtoTreeError",
    "PrototypeSource",
    "Routed",
    "Run",
    "Topology",
    "__version__",
    "combine",
    "evaluate",
    "fit",
    "load",
    "open_data",
    "preset",
    "project",
    "prune",
    "redo",
    "relearn",
    "reproduce",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'prototree' has no attribute {name!r}")
    return getattr(importlib.import_module(f"prototree.{_ROOMS[name]}"), name)
