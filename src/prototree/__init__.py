"""Neural prototype trees: image classifiers that can be read in full.

>>> import prototree
>>> run = prototree.fit("photos/", "runs/photos")
>>> prototree.ask(run, "bird.jpg").label
>>> [one.said for one in prototree.predict(run, "holiday/")]
"""

import importlib
from typing import TYPE_CHECKING, Any

from prototree._version import __version__
from prototree.threads import choose_waiting, keep_memory

choose_waiting()  # before anything imports torch
keep_memory()

if TYPE_CHECKING:
    from prototree.config import Config, preset
    from prototree.data import ImageData, open_data
    from prototree.errors import ProtoTreeError
    from prototree.evaluation.metrics import Metrics
    from prototree.exchange.hub_push import push
    from prototree.exchange.onnx_export import export_onnx
    from prototree.exchange.reference import import_reference
    from prototree.exchange.sklearn_estimator import ProtoTreeClassifier
    from prototree.explain.answers import Answer, ask
    from prototree.explain.decisions import explain_image
    from prototree.explain.predictions import Prediction, predict, predict_each
    from prototree.explain.records import DecisionExplanation, TreeExplanation
    from prototree.explain.whole_tree import explain_tree
    from prototree.mend.relearning import relearn
    from prototree.mend.session import Session, open_session
    from prototree.network.backbone import Backbone, FeatureExtractor
    from prototree.network.preprocessing import Preprocessing
    from prototree.pipeline.fit import combine, evaluate, fit, redo
    from prototree.pipeline.parts import evaluate_parts
    from prototree.pipeline.reproduce import reproduce
    from prototree.pipeline.several import cross_validate, fit_seeds
    from prototree.pipeline.sharing import pack, tidy
    from prototree.pipeline.strangers import meet_strangers
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
    "Prediction": "explain.predictions",
    "Preprocessing": "network.preprocessing",
    "ProtoTree": "tree.model",
    "ProtoTreeClassifier": "exchange.sklearn_estimator",
    "ProtoTreeError": "errors",
    "PrototypeSource": "tree.model",
    "Routed": "tree.model",
    "Run": "run",
    "Session": "mend.session",
    "Topology": "tree.topology",
    "TreeExplanation": "explain.records",
    "ask": "explain.answers",
    "combine": "pipeline.fit",
    "cross_validate": "pipeline.several",
    "evaluate": "pipeline.fit",
    "evaluate_parts": "pipeline.parts",
    "explain_image": "explain.decisions",
    "explain_tree": "explain.whole_tree",
    "export_onnx": "exchange.onnx_export",
    "fit": "pipeline.fit",
    "fit_seeds": "pipeline.several",
    "import_reference": "exchange.reference",
    "load": "tree.checkpoint",
    "meet_strangers": "pipeline.strangers",
    "open_data": "data",
    "open_session": "mend.session",
    "pack": "pipeline.sharing",
    "predict": "explain.predictions",
    "predict_each": "explain.predictions",
    "preset": "config",
    "project": "training.projection",
    "prune": "tree.pruning",
    "push": "exchange.hub_push",
    "redo": "pipeline.fit",
    "relearn": "mend.relearning",
    "reproduce": "pipeline.reproduce",
    "save": "tree.checkpoint",
    "show": "report.notebook",
    "tidy": "pipeline.sharing",
    "write_decision": "report.writing",
    "write_report": "report.writing",
}

_CALLABLE_PACKAGES = ("explain", "report")

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
    "Prediction",
    "Preprocessing",
    "ProtoTree",
    "ProtoTreeClassifier",
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
    "cross_validate",
    "evaluate",
    "evaluate_parts",
    "explain_image",
    "explain_tree",
    "export_onnx",
    "fit",
    "fit_seeds",
    "import_reference",
    "load",
    "meet_strangers",
    "open_data",
    "open_session",
    "pack",
    "predict",
    "predict_each",
    "preset",
    "project",
    "prune",
    "push",
    "redo",
    "relearn",
    "reproduce",
    "save",
    "show",
    "tidy",
    "write_decision",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in _CALLABLE_PACKAGES:
        return importlib.import_module(f"prototree.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'prototree' has no attribute {name!r}")
    return getattr(importlib.import_module(f"prototree.{_HOMES[name]}"), name)
