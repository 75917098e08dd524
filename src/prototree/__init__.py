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
    from prototree.backbones.backbone import Backbone, FeatureExtractor
    from prototree.backbones.preprocessing import Preprocessing
    from prototree.config import Config, preset
    from prototree.core.checkpoint import load, save
    from prototree.core.ensemble import Ensemble
    from prototree.core.model import ProtoTree, PrototypeSource, TreeOutput, TreePrediction
    from prototree.core.pruning import prune
    from prototree.core.routing import DecisionPath
    from prototree.core.topology import Topology
    from prototree.data import ImageData, open_data
    from prototree.editing.finetuning import finetune
    from prototree.editing.session import EditSession, open_session
    from prototree.errors import ProtoTreeError
    from prototree.evaluation.metrics import Metrics
    from prototree.explain.decisions import explain_image
    from prototree.explain.records import DecisionExplanation, TreeExplanation
    from prototree.explain.tree import explain_tree
    from prototree.inference.answers import Answer, ask
    from prototree.inference.predict import Prediction, predict, predict_each
    from prototree.integrations.hub_push import push
    from prototree.integrations.onnx_export import export_onnx
    from prototree.integrations.reference import import_reference
    from prototree.integrations.sklearn_estimator import ProtoTreeClassifier
    from prototree.pipeline.fit import evaluate, evaluate_ensemble, fit, rerun
    from prototree.pipeline.ood import evaluate_ood
    from prototree.pipeline.parts import evaluate_parts
    from prototree.pipeline.reproduce import reproduce
    from prototree.pipeline.share import clean, pack
    from prototree.pipeline.sweep import cross_validate, fit_seeds
    from prototree.report.notebook import show
    from prototree.report.writing import write_decision, write_report
    from prototree.run import Run
    from prototree.training.projection import project

# Public name → the module it lives in. Loaded on first use: importing torch takes seconds, `prototree --help` none.
_HOMES = {
    "Answer": "explain.answers",
    "Backbone": "backbones.backbone",
    "Config": "config",
    "DecisionExplanation": "explain.records",
    "EditSession": "editing.session",
    "Ensemble": "core.ensemble",
    "FeatureExtractor": "backbones.backbone",
    "ImageData": "data",
    "Metrics": "evaluation.metrics",
    "DecisionPath": "core.routing",
    "Prediction": "explain.predictions",
    "Preprocessing": "backbones.preprocessing",
    "ProtoTree": "core.model",
    "ProtoTreeClassifier": "integrations.sklearn_estimator",
    "ProtoTreeError": "errors",
    "PrototypeSource": "core.model",
    "Run": "run",
    "Topology": "core.topology",
    "TreeExplanation": "explain.records",
    "TreeOutput": "core.model",
    "TreePrediction": "core.model",
    "ask": "explain.answers",
    "evaluate_ensemble": "pipeline.fit",
    "cross_validate": "pipeline.sweep",
    "evaluate": "pipeline.fit",
    "evaluate_ood": "pipeline.ood",
    "evaluate_parts": "pipeline.parts",
    "explain_image": "explain.decisions",
    "explain_tree": "explain.tree",
    "export_onnx": "integrations.onnx_export",
    "finetune": "editing.finetuning",
    "fit": "pipeline.fit",
    "fit_seeds": "pipeline.sweep",
    "import_reference": "integrations.reference",
    "load": "core.checkpoint",
    "open_data": "data",
    "open_session": "editing.session",
    "pack": "pipeline.share",
    "predict": "explain.predictions",
    "predict_each": "explain.predictions",
    "preset": "config",
    "project": "training.projection",
    "prune": "core.pruning",
    "push": "integrations.hub_push",
    "rerun": "pipeline.fit",
    "reproduce": "pipeline.reproduce",
    "save": "core.checkpoint",
    "show": "report.notebook",
    "clean": "pipeline.share",
    "write_decision": "report.writing",
    "write_report": "report.writing",
}

_CALLABLE_PACKAGES = ("explain", "report")

__all__ = [
    "Answer",
    "Backbone",
    "Config",
    "DecisionExplanation",
    "DecisionPath",
    "EditSession",
    "Ensemble",
    "FeatureExtractor",
    "ImageData",
    "Metrics",
    "Prediction",
    "Preprocessing",
    "ProtoTree",
    "ProtoTreeClassifier",
    "ProtoTreeError",
    "PrototypeSource",
    "Run",
    "Topology",
    "TreeExplanation",
    "TreeOutput",
    "TreePrediction",
    "__version__",
    "ask",
    "clean",
    "cross_validate",
    "evaluate",
    "evaluate_ensemble",
    "evaluate_ood",
    "evaluate_parts",
    "explain_image",
    "explain_tree",
    "export_onnx",
    "finetune",
    "fit",
    "fit_seeds",
    "import_reference",
    "load",
    "open_data",
    "open_session",
    "pack",
    "predict",
    "predict_each",
    "preset",
    "project",
    "prune",
    "push",
    "reproduce",
    "rerun",
    "save",
    "show",
    "write_decision",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in _CALLABLE_PACKAGES:
        return importlib.import_module(f"prototree.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'prototree' has no attribute {name!r}")
    return getattr(importlib.import_module(f"prototree.{_HOMES[name]}"), name)
