"""Soft labels from a teacher, computed once per view (§3: knowledge distillation).

A teacher is a saved tree, several of them, or a timm classifier: `runs/a`, `runs/a,runs/b`, `resnet50=teacher.pth`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from prototree.backbones.backbone import Backbone
from prototree.backbones.geometry import Preprocessing
from prototree.backbones.weights import read_state, timm_names
from prototree.config import DEFAULT_IMAGE_SIZE
from prototree.core import checkpoint
from prototree.core.ensemble import Ensemble
from prototree.data.crops import training_views
from prototree.data.loader import ViewDataset, make_loader
from prototree.errors import ConfigError, WeightsError
from prototree.training import distributed
from prototree.training.loop import CHECKPOINTS, Context

import timm  # isort: skip (after the guard in `backbone`)

_FILE = "teacher.json"


@dataclass(frozen=True)
class Teacher:
    """A classifier that gives logits of images."""

    preprocessing: Preprocessing
    logits: Callable[[Tensor], Tensor]


def soft_labels(context: Context, source: str, temperature: float) -> Float[Tensor, "entries K"]:
    """Return the teacher's probabilities for every training view, from the run's folder if they are there."""
    folder = context.folder / CHECKPOINTS / "teacher"
    with distributed.main_first():
        if not (folder / _FILE).exists():
            teacher = open_teacher(source, context.data.n_classes, context.config.image_size or DEFAULT_IMAGE_SIZE)
            context.observer.stage("computing the teacher's soft labels")
            kind = context.data.kind
            views = ViewDataset(context.data.train, partial(training_views, kind=kind), teacher.preprocessing)
            probs = predict_proba(teacher, views, context.data.n_classes, temperature)
            checkpoint.write_state(folder, _FILE, {"version": checkpoint.VERSION}, {"probs": probs})
    return checkpoint.read_state(folder, _FILE)[1]["probs"]


def open_teacher(source: str, n_classes: int, image_size: int) -> Teacher:
    """Open a teacher by its description."""
    name, equals, file = source.partition("=")
    if equals:
        return _timm_teacher(name, Path(file), n_classes, image_size)
    ensemble = Ensemble([checkpoint.load(Path(folder)) for folder in source.split(",")])
    tree = ensemble.trees[0]
    if tree.n_classes != n_classes:
        raise ConfigError(f"the teacher {source} knows {tree.n_classes} classes, the data has {n_classes}")
    if len(ensemble.inputs) > 1:
        raise ConfigError(
            f"expected teachers with the same preprocessing in {source}, got {len(ensemble.inputs)} kinds"
        )
    return Teacher(tree.preprocessing, lambda images: ensemble.class_probs(images).clamp_min(1e-12).log())


def _timm_teacher(name: str, path: Path, n_classes: int, image_size: int) -> Teacher:
    network = timm.create_model(name, num_classes=n_classes)
    try:
        network.load_state_dict(timm_names(read_state(path)))
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise WeightsError(f"{path} is no {name} classifier for {n_classes} classes: {reason}") from error
    return Teacher(Backbone(name, None, image_size=image_size).preprocessing, network.eval())


@torch.no_grad()
def predict_proba(
    teacher: Teacher, dataset: ViewDataset, n_classes: int, temperature: float
) -> Float[Tensor, "entries K"]:
    """Return softened class probabilities of every view; uniform where an image cannot be read."""
    probs = torch.full((len(dataset), n_classes), 1 / n_classes)
    for batch in make_loader(dataset, 32):
        if len(batch.labels):
            probs[batch.entries] = (teacher.logits(batch.images) / temperature).softmax(dim=1)
    return probs
