from ._version import __version__
from .config import Config
from .core.checkpoint import load, save
from .core.ensemble import Ensemble
from .core.model import ProtoTree
from .data import ImageData, open_data
from .editing.finetune import finetune
from .editing.session import EditSession, edit
from .errors import ProtoTreeError
from .evaluation.ood import evaluate_ood
from .evaluation.schema import Metrics
from .explanation.records import DecisionExplanation, TreeExplanation
from .explanation.tree import explain
from .inference.predict import Prediction, predict
from .integrations.hub import push
from .integrations.onnx import export_onnx
from .integrations.sklearn import ProtoTreeClassifier
from .pipeline.fit import evaluate, fit, rerun
from .pipeline.share import pack
from .pipeline.sweep import cross_validate, fit_seeds
from .reporting.export import report, show, write_decision
from .run import Run

__all__ = [
    "Config",
    "DecisionExplanation",
    "EditSession",
    "Ensemble",
    "ImageData",
    "Metrics",
    "Prediction",
    "ProtoTree",
    "ProtoTreeClassifier",
    "ProtoTreeError",
    "Run",
    "TreeExplanation",
    "__version__",
    "cross_validate",
    "edit",
    "evaluate",
    "evaluate_ood",
    "explain",
    "export_onnx",
    "finetune",
    "fit",
    "fit_seeds",
    "load",
    "open_data",
    "pack",
    "predict",
    "push",
    "report",
    "rerun",
    "save",
    "show",
    "write_decision",
]
