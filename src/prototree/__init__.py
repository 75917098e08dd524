"""Neural prototype trees: image classifiers that can be read in full.

>>> import prototree
>>> tree = prototree.load("runs/birds/projected")
>>> decisions = tree.predict(images)
"""

import importlib
from typing import TYPE_CHECKING, Any

from prototree._version import __version__

if TYPE_CHECKING:
    from prototree.backbone import Backbone, FeatureExtractor
    from prototree.checkpoint import load, save
    from prototree.errors import ProtoTreeError
    from prototree.model import Decisions, ProtoTree, PrototypeSource, Routed
    from prototree.preprocessing import Preprocessing
    from prototree.routing import Path
    from prototree.topology import Topology

# Public name → the room it lives in. Loaded on first use: importing torch takes seconds, `prototree --help` none.
_ROOMS = {
    "Backbone": "backbone",
    "Decisions": "model",
    "FeatureExtractor": "backbone",
    "Path": "routing",
    "Preprocessing": "preprocessing",
    "ProtoTree": "model",
    "ProtoTreeError": "errors",
    "PrototypeSource": "model",
    "Routed": "model",
    "Topology": "topology",
    "load": "checkpoint",
    "save": "checkpoint",
}

__all__ = [
    "Backbone",
    "Decisions",
    "FeatureExtractor",
    "Path",
    "Preprocessing",
    "ProtoTree",
    "ProtoTreeError",
    "PrototypeSource",
    "Routed",
    "Topology",
    "__version__",
    "load",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'prototree' has no attribute {name!r}")
    return getattr(importlib.import_module(f"prototree.{_ROOMS[name]}"), name)
