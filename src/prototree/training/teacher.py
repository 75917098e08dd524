"""Soft labels from a teacher, computed once per view (§3: knowledge distillation).

A teacher is a saved tree, several of them, or a timm classifier: `runs/a`, `runs/a,runs/b`, `resnet50=teacher.pth`.
"""

from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from prototree.backbones.backbone import Backbone
from prototree.backbones.preprocessing import Preprocessing
from prototree.backbones.weights import read_state, timm_names
from prototree.core import checkpoint
from prototree.core.ensemble import Ensemble
from prototree.data.loading import ViewDataset, make_loader
from prototree.errors import ConfigError, WeightsError
from prototree.training import distributed

import timm  # isort: skip (after the guard in `backbone`)


@runtime_checkable
class Teacher(Protocol):
    """Something that gives class probabilities."""

    preprocessing: Preprocessing
    n_classes: int

    def probs(self, images: Float[Tensor, "B 3 h w"], temperature: float) -> Float[Tensor, "B K"]:
        """Class probabilities, softened by the temperature."""


class TreeTeacher:
    """One tree or an ensemble."""

    def __init__(self, ensemble: Ensemble) -> None:
        self._ensemble = ensemble
        self.preprocessing = ensemble.trees[0].preprocessing
        self.n_classes = ensemble.trees[0].n_classes

    def probs(self, images: Float[Tensor, "B 3 h w"], temperature: float) -> Float[Tensor, "B K"]:
        return (self._ensemble.class_probs(images).clamp_min(1e-12).log() / temperature).softmax(dim=1)


class NetTeacher:
    """A timm classifier from a file."""

    def __init__(self, name: str, path: Path, n_classes: int, image_size: int) -> None:
        self.preprocessing = Backbone(name, None, image_size=image_size).preprocessing
        self.n_classes = n_classes
        self._net: nn.Module = timm.create_model(name, num_classes=n_classes)
        try:
            self._net.load_state_dict(timm_names(read_state(path)))
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise WeightsError(f"{path} is no {name} classifier for {n_classes} classes: {reason}") from error
        self._net.eval()

    def probs(self, images: Float[Tensor, "B 3 h w"], temperature: float) -> Float[Tensor, "B K"]:
        return (self._net(images) / temperature).softmax(dim=1)  # type: ignore[no-any-return]


def open_teacher(source: str, n_classes: int, image_size: int) -> Teacher:
    """A teacher by its description."""
    name, equals, file = source.partition("=")
    if equals:
        return NetTeacher(name, Path(file), n_classes, image_size)
    folders = [Path(folder) for folder in source.split(",")]
    trees = [checkpoint.load(folder) for folder in folders]
    teacher = TreeTeacher(Ensemble(trees))
    if teacher.n_classes != n_classes:
        raise ConfigError(f"the teacher {source} knows {teacher.n_classes} classes, the data has {n_classes}")
    return teacher


@torch.no_grad()
def teach(teacher: Teacher, dataset: ViewDataset, temperature: float, folder: Path) -> Float[Tensor, "entries K"]:
    """The teacher's probabilities for every view, from `folder` if they are there; one process asks for all."""
    with distributed.one_after_the_other():
        if not (folder / "teacher.json").exists():
            probs = _asked(teacher, dataset, temperature)
            checkpoint.write_state(folder, "teacher.json", {"version": checkpoint.VERSION}, {"probs": probs})
    return checkpoint.read_state(folder, "teacher.json")[1]["probs"]


def _asked(teacher: Teacher, dataset: ViewDataset, temperature: float) -> Float[Tensor, "entries K"]:
    probs = torch.full((len(dataset), teacher.n_classes), 1 / teacher.n_classes)
    for batch in make_loader(dataset, 32):
        if len(batch.labels):
            probs[batch.entries] = teacher.probs(batch.images, temperature)
    return probs
