"""Photos held out of a training on cached maps, and what a tree says of them.

Notation used for tensor shapes: M photos, P prototypes.
"""

import hashlib
import json
import logging
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prototree.core.confidence import Calibration, fit_calibration
from prototree.core.fields import number, record
from prototree.core.model import ProtoTree, TreeOutput
from prototree.core.nodes import SHARPNESS_RANGE, NodeFunction
from prototree.core.patches import NearestPatches
from prototree.core.validation import check_calibration
from prototree.data.loading import Entry
from prototree.data.views import FULL
from prototree.errors import CheckpointError
from prototree.features.batches import CachedBatches, maps_of
from prototree.features.cache import MapCache
from prototree.files import read_json, write_json
from prototree.training import distributed

log = logging.getLogger(__name__)

FEWEST_HELD = 20  # photos that confidence is fitted on, at least
MOST_HELD = 5000  # and at most
SHARPER_STEPS = 20  # tenths of the tree's own sharpness
_ANY_SHARPNESS = min(low for low, _ in SHARPNESS_RANGE.values()), max(high for _, high in SHARPNESS_RANGE.values())


def held_photos(entries: Sequence[Entry], every: int) -> frozenset[int]:
    """Every n-th photo of each class that has as many, by its number in the data."""
    of_class: dict[int, dict[int, None]] = defaultdict(dict)
    for entry in entries:
        of_class[entry.sample.label][entry.sample_index] = None
    chosen = (list(photos)[every - 1 :: every] for photos in of_class.values() if every > 1)
    return frozenset(photo for some in chosen for photo in some)


def without(cache: MapCache, photos: Collection[int]) -> MapCache:
    """The maps of all other photos."""
    return cache.only([place for place, one in enumerate(cache.entries) if one.sample_index not in photos])


@dataclass(frozen=True)
class Held:
    """What a tree that has not seen some photos finds in them, shown whole."""

    distance: Float[Tensor, "M P"]
    labels: Int[Tensor, " M"]

    def routed(self, tree: ProtoTree, question: NodeFunction | None = None) -> TreeOutput:
        """The photos through the tree, with its own question or another."""
        return tree.routed(NearestPatches(self.distance, torch.zeros_like(self.distance, dtype=torch.long)), question)


@torch.no_grad()
def look_at_held(tree: ProtoTree, views: CachedBatches, photos: Collection[int]) -> Held:
    """Whole views of these photos, of very many some; in several processes all get the same."""
    photos = frozenset(sorted(photos)[:: -(-len(photos) // MOST_HELD) or 1])
    rows = [(torch.zeros(0, dtype=torch.long), torch.zeros(0, tree.n_prototypes), torch.zeros(0, dtype=torch.long))]
    for z, labels, places in maps_of(views, tree.eval().features, tree.prototypes.device):
        entries = [views.entries[place] for place in places.tolist()]
        wanted = [i for i, one in enumerate(entries) if one.view == FULL and one.sample_index in photos]
        if wanted:
            rows.append((places[wanted].cpu(), tree.route(z[wanted]).distance.cpu(), labels[wanted].cpu()))
    columns = [torch.cat(part) for part in zip(*rows, strict=True)]
    distance, labels = distributed.gather_in_order(*columns)
    device = tree.prototypes.device
    return Held(distance.to(device), labels.to(device))


@torch.no_grad()
def fit_sharpness(tree: ProtoTree, held: Held) -> float:
    """The sharpness with which Eq. 4's probabilities are calibrated on photos that the tree has not seen.

    A tree that learned to be as unsure as its softened teacher is less sure than it is right. Of all sharpnesses from
    its own to three times that, the least is taken whose likelihood the photos cannot tell from the best, within one
    standard error (Breiman et al., *Classification and Regression Trees*, 1984, take the simplest tree by that rule).
    """
    low, high = SHARPNESS_RANGE[tree.question.kind]
    own = tree.question.sharpness
    tried = [own * (1 + step / 10) for step in range(SHARPER_STEPS + 1) if low <= own * (1 + step / 10) <= high]
    paths = (held.routed(tree, replace(tree.question, sharpness=sharpness)) for sharpness in tried)
    losses = torch.stack([-tree.log_likelihood(routed, held.labels).double() for routed in paths])  # tried × photos
    worse = losses - losses[losses.mean(dim=1).argmin()]
    error = worse.std(dim=1) / math.sqrt(len(held.labels))
    return tried[int((worse.mean(dim=1) <= error).int().argmax())]


def fit_held(tree: ProtoTree, held: Held) -> Calibration:
    """How sure the tree's answers are, and when it gives none."""
    decisions = tree.decide(held.routed(tree))
    is_right = decisions.labels("greedy") == held.labels
    return fit_calibration(decisions.margin.cpu(), decisions.ood_score.cpu(), is_right.cpu())


@dataclass(frozen=True)
class Sure:
    """What a tree that has not seen some photos teaches another one about being sure."""

    sharpness: float
    calibration: Calibration

    def taught(self, tree: ProtoTree) -> ProtoTree:
        """The tree, which knows it now."""
        tree.question, tree.calibration = replace(tree.question, sharpness=self.sharpness), self.calibration
        return tree


def fit_sure(tree: ProtoTree, held: Held) -> Sure:
    """How sharp the tree's questions must be, and then how sure its answers are."""
    tree.question = replace(tree.question, sharpness=fit_sharpness(tree, held))
    return Sure(tree.question.sharpness, fit_held(tree, held))


@dataclass(frozen=True)
class SureFile:
    """Where runs on the same maps keep what they would all find out: it need not be found out for every seed."""

    path: Path

    @classmethod
    def of(cls, folder: Path, maps: Sequence[MapCache], settings: Mapping[str, object]) -> "SureFile":
        """In the folder that runs share, under a name that says what it was found out with."""
        of_what = {
            "settings": settings,
            "maps": sorted({name for one in maps for name in one.names}),
            "photos": [(one.sample_index, one.sample.label) for one in maps[0].entries],
        }
        digest = hashlib.sha256(json.dumps(of_what, sort_keys=True).encode()).hexdigest()
        return cls(folder / f"sure-{digest[:32]}.json")

    def keep(self, sure: Sure) -> Sure:
        """Writes it down, and gives it back."""
        if distributed.is_first():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, asdict(sure))
        return sure

    @property
    def kept(self) -> Sure | None:
        """What was written down, if all processes can read it."""
        found = self._read()
        return None if distributed.any_process(found is None) else found

    def _read(self) -> Sure | None:
        """What the file says; a damaged or impossible calibration is reported and fitted again."""
        if not self.path.exists():
            return None
        try:
            found = read_json(self.path)
            record({"sharpness": number(*_ANY_SHARPNESS), "calibration": check_calibration})(found, ())
            return Sure(float(found["sharpness"]), Calibration(**found["calibration"]))
        except CheckpointError as error:
            log.warning("a calibration is fitted again: %s is damaged (%s)", self.path, error)
            return None
