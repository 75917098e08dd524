"""Neural prototype trees: image classifiers that can be read in full.

>>> import prototree
>>> run = prototree.fit("photos/", "runs/photos")
>>> prototree.ask(run, "bird.jpg").label
"""

import importlib
from typing import TYPE_CHECKING, Any

from prototree._version import __version__
from prototree.threads import choose_waiting

choose_waiting()  # before anything imports torch

if TYPE_CHECKING:
    from prototree.config import Config, preset
    from prototree.data import ImageData, open_data
    from prototree.errors import ProtoTreeError
    from prototree.evaluation.metrics import Metrics, evaluate
    from prototree.explain.answers import Answer, ask
    from prototree.explain.decisions import explain_image
    from prototree.explain.records import DecisionExplanation, TreeExplanation
    from prototree.explain.whole_tree import explain_tree
    from prototree.mend.relearning import relearn
    from prototree.mend.session import Session, open_session
    from prototree.network.backbone import Backbone, FeatureExtractor
    from prototree.network.preprocessing import Preprocessing
    from prototree.pipeline.fit import combine, fit, redo
    from prototree.pipeline.reproduce import reproduce
    from prototree.report.notebook import show
    from prototree.report.writing import write_decision, write_report
    from prototree.run import Run
    from prototree.training.projection import project
    from prototree.tree.checkpoint import load, save
    from prototree.tree.ensemble import Ensemble
    from prototree.tree.model import Decisions, ProtoTree, PrototypeSource, Routed
    from prototree.tree.pruning import prune
    from prototree.tree.routing import Path
    from prototree.tree.topology import Topology

# Public name → the module it lives in. Loaded on first use: importing torch takes seconds, `prototree --help` none.
_HOMES = {
    "Answer": "explain.answers",
    "Backbone": "network.backbone",
    "Config": "config",
    "DecisionExplanation": "explain.records",
    "Decisions": "tree.model",
    "Ensemble": "tree.ensemble",
    "FeatureExtractor": "network.backbone",
    "ImageData": "data",
    "Metrics": "evaluation.metrics",
    "Path": "tree.routing",
    "Preprocessing": "network.preprocessing",
    "ProtoTree": "tree.model",
    "ProtoTreeError": "errors",
    "PrototypeSource": "tree.model",
    "Routed": "tree.model",
    "Run": "run",
    "Session": "mend.session",
    "Topology": "tree.topology",
    "TreeExplanation": "explain.records",
    "ask": "explain.answers",
    "combine": "pipeline.fit",
    "evaluate": "evaluation.metrics",
    "explain_image": "explain.decisions",
    "explain_tree": "explain.whole_tree",
    "fit": "pipeline.fit",
    "load": "tree.checkpoint",
    "open_data": "data",
    "open_session": "mend.session",
    "preset": "config",
    "project": "training.projection",
    "prune": "tree.pruning",
    "redo": "pipeline.fit",
    "relearn": "mend.relearning",
    "reproduce": "pipeline.reproduce",
    "save": "tree.checkpoint",
    "show": "report.notebook",
    "write_decision": "report.writing",
    "write_report": "report.writing",
}

__all__ = [
    "Answer",
    "Backbone",
    "Config",
    "DecisionExplanation",
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
    "Session",
    "Topology",
    "TreeExplanation",
    "__version__",
    "ask",
    "combine",
    "evaluate",
    "explain_image",
    "explain_tree",
    "fit",
    "load",
    "open_data",
    "open_session",
    "preset",
    "project",
    "prune",
    "redo",
    "relearn",
    "reproduce",
    "save",
    "show",
    "write_decision",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'prototree' has no attribute {name!r}")
    return getattr(importlib.import_module(f"prototree.{_HOMES[name]}"), name)
