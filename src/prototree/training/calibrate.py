"""Calibration on held-out images: the sharpness of the decisions, the confidence, and when to abstain.

Notation used for tensor shapes: M images, P prototypes.
"""

import contextlib
import hashlib
import json
import logging
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prototree.core.checkpoint import CalibrationRecord, validated
from prototree.core.confidence import Calibration, fit_calibration
from prototree.core.model import NearestPatches, ProtoTree, TreeOutput
from prototree.core.nodes import SHARPNESS_RANGE, NodeFunction
from prototree.data.crops import FULL_IMAGE
from prototree.data.dataset import keep_together
from prototree.data.loader import Entry
from prototree.errors import CheckpointError
from prototree.features.cache import FOLDER, FeatureMaps, exclusive, note_use, shared_folder
from prototree.io import read_json, write_json

log = logging.getLogger(__name__)

MIN_HELD_OUT, MAX_HELD_OUT = 20, 5000  # images that the confidence is fitted on
_SHARPNESS_STEPS = 20  # tenths of the tree's own sharpness


def held_out_images(entries: Sequence[Entry], fraction: float) -> frozenset[int]:
    """Choose every n-th image (or group) of each class, by its index; none where that gives fewer than 20 images."""
    if not fraction:
        return frozenset()
    step, of_class = round(1 / fraction), defaultdict[int, list[list[Entry]]](list)
    images = {entry.sample_index: entry for entry in entries}
    for unit in keep_together(images.values(), lambda entry: entry.sample.group):
        of_class[unit[0].sample.label].append(unit)
    chosen = [unit for units in of_class.values() for unit in units[step - 1 :: step]]
    held_out = frozenset(entry.sample_index for unit in chosen for entry in unit)
    return held_out if len(held_out) >= MIN_HELD_OUT else frozenset()


@dataclass(frozen=True)
class HeldOut:
    """Distances of images that a tree has not seen to its prototypes, and their labels."""

    distance: Float[Tensor, "M P"]
    labels: Int[Tensor, " M"]

    def forward(self, tree: ProtoTree, node: NodeFunction | None = None) -> TreeOutput:
        """Send the images through the tree, with its own node function or another."""
        return tree.forward_distances(
            NearestPatches(self.distance, torch.zeros_like(self.distance, dtype=torch.long)), node
        )


@torch.no_grad()
def predict_held_out(tree: ProtoTree, maps: FeatureMaps, images: Collection[int], batch_size: int) -> HeldOut:
    """Measure full views of these images; of very many, some."""
    images = frozenset(sorted(images)[:: -(-len(images) // MAX_HELD_OUT) or 1])
    device, rows = tree.prototypes.device, []
    tree.eval()
    for batch in maps.batches(batch_size):
        entries = [maps.entries[index] for index in batch.entries.tolist()]
        wanted = [i for i, entry in enumerate(entries) if entry.view == FULL_IMAGE and entry.sample_index in images]
        if wanted:
            z = tree.features.from_map(batch.values.to(device))
            rows.append((tree.forward_features(z[wanted]).distance, batch.labels[wanted].to(device)))
    distance, labels = (torch.cat(column) for column in zip(*rows, strict=True))
    return HeldOut(distance, labels)


@torch.no_grad()
def fit_sharpness(tree: ProtoTree, held_out: HeldOut) -> float:
    """Fit the sharpness with which Eq. 4's probabilities are calibrated: from the tree's own to three times that.

    The least is taken whose likelihood the images cannot tell from the best, within one standard error (Breiman et al.,
    *Classification and Regression Trees*, 1984, take the simplest tree by that rule).
    """
    low, high = SHARPNESS_RANGE[tree.node_function.kind]
    start = tree.node_function.sharpness
    tried = [start * (1 + step / 10) for step in range(_SHARPNESS_STEPS + 1) if low <= start * (1 + step / 10) <= high]
    outputs = (held_out.forward(tree, replace(tree.node_function, sharpness=sharpness)) for sharpness in tried)
    losses = torch.stack([-tree.log_likelihood(out, held_out.labels).double() for out in outputs])  # tried × images
    worse = losses - losses[losses.mean(dim=1).argmin()]
    error = worse.std(dim=1) / math.sqrt(len(held_out.labels))
    return tried[int((worse.mean(dim=1) <= error).int().argmax())]


@dataclass(frozen=True)
class Fitted:
    """Calibration parameters fitted on held-out images."""

    sharpness: float
    calibration: Calibration

    def apply_to(self, tree: ProtoTree) -> ProtoTree:
        """Set the sharpness and the calibration of a tree, and return it."""
        tree.node_function, tree.calibration = replace(tree.node_function, sharpness=self.sharpness), self.calibration
        return tree


def fit(tree: ProtoTree, held_out: HeldOut) -> Fitted:
    """Fit the sharpness, and then the confidence of the answers; the tree gets the fitted sharpness."""
    tree.node_function = replace(tree.node_function, sharpness=fit_sharpness(tree, held_out))
    prediction = tree.decode(held_out.forward(tree))
    is_right = prediction.labels("greedy") == held_out.labels
    calibration = fit_calibration(prediction.margin.cpu(), prediction.ood_score.cpu(), is_right.cpu())
    return Fitted(tree.node_function.sharpness, calibration)


@dataclass(frozen=True)
class CalibrationFile:
    """A file in the feature cache where runs on the same features share what a second tree finds."""

    path: Path

    @classmethod
    @contextlib.contextmanager
    def of(cls, run: Path, maps: Sequence[FeatureMaps], settings: Mapping[str, object]) -> Iterator["CalibrationFile"]:
        """Open the file that is named after features and settings; other programs wait for it meanwhile."""
        content = {
            "settings": settings,
            "maps": sorted({name for part in maps for name in part.names}),
            "images": [(entry.sample_index, entry.sample.label) for entry in maps[0].entries],
        }
        name = f"calibration-{hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]}.json"
        beside = run.resolve().parent / FOLDER / name  # which may be read-only, and is used all the same
        path = beside if beside.exists() else shared_folder(run) / name
        note_use(run, name)
        with exclusive(path):
            yield cls(path)

    def save(self, fitted: Fitted) -> Fitted:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, asdict(fitted))
        return fitted

    @property
    def saved(self) -> Fitted | None:
        """What was fitted before; a damaged or impossible calibration is reported and fitted again."""
        if not self.path.exists():
            return None
        try:
            content = read_json(self.path)
            sharpness = content.get("sharpness")
            low, high = SHARPNESS_RANGE["pairwise"]
            if not isinstance(sharpness, float | int) or not low <= sharpness <= high:
                raise CheckpointError(f"expected a sharpness from {low} to {high}, got {sharpness!r}")
            calibration = validated(CalibrationRecord, content.get("calibration"))
            return Fitted(float(sharpness), Calibration(**calibration.model_dump()))
        except CheckpointError as error:
            log.warning("a calibration is fitted again: %s is damaged (%s)", self.path, error)
            return None
