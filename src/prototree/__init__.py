"""Neural prototype trees: image classifiers that can be read in full.

>>> import prototree
>>> run = prototree.fit("photos/", "runs/photos")
>>> decisions = run.tree().predict(images)
"""

import importlib
from typing import TYPE_CHECKING, Any

from prototree._version import __version__

if TYPE_CHECKING:
    from prototree.backbone import Backbone, FeatureExtractor
    from prototree.checkpoint import load, save
    from prototree.config import Config, preset
    from prototree.data import ImageData, open_data
    from prototree.ensemble import Ensemble
    from prototree.errors import ProtoTreeError
    from prototree.evaluation import Metrics, evaluate
    from prototree.model import Decisions, ProtoTree, PrototypeSource, Routed
    from prototree.preprocessing import Preprocessing
    from prototree.projection import project
    from prototree.pruning import prune
    from prototree.relearning import relearn
    from prototree.reproduction import reproduce
    from prototree.routing import Path
    from prototree.run import Run, combine, fit, redo
    from prototree.topology import Topology

# Public name → the room it lives in. Loaded on first use: importing torch takes seconds, `prototree --help` none.
_ROOMS = {
    "Backbone": "backbone",
    "Config": "config",
    "Decisions": "model",
    "Ensemble": "ensemble",
    "FeatureExtractor": "backbone",
    "ImageData": "data",
    "Metrics": "evaluation",
    "Path": "routing",
    "Preprocessing": "preprocessing",
    "ProtoTree": "model",
    "ProtoTreeError": "errors",
    "PrototypeSource": "model",
    "Routed": "model",
    "Run": "run",
    "Topology": "topology",
    "combine": "run",
    "evaluate": "evaluation",
    "fit": "run",
    "load": "checkpoint",
    "open_data": "data",
    "preset": "config",
    "project": "projection",
    "prune": "pruning",
    "redo": "run",
    "relearn": "relearning",
    "reproduce": "reproduction",
    "save": "checkpoint",
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
