"""How far a prototype's patch means what it shows: part purity, consistency, stability and hiding, as plain figures.

*Part purity* is PIP-Net's (Nauta et al., 2023), *consistency* and *stability* are those of Huang et al. (2023), adapted
to a tree: what they ask of the photos of a prototype's class, we ask of the photos that go to the prototype's side of
its node. `docs/explanations.md` has the definitions and how far to trust each. `explain` fills these records.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from prototree.backbones.geometry import Box
from prototree.data.dataset import Part

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")
Place = Literal["peak", "cell"]
"""What a box stands around: the middle of the peak of the similarity map, as pages show it, or the nearest cell."""
PLACES: tuple[Place, ...] = ("peak", "cell")

NEAREST = 10  # photos that purity is measured on
BOX_SHARE = 1 / 7  # of the input's side: PIP-Net's box around a patch
WIDE_SHARE = 72 / 224  # Huang et al.'s
CONSISTENT = 0.8  # share of the photos that must show the same part
PART_RELATED = 0.5  # purity above which PIP-Net calls a prototype related to a part


Inside = Mapping[str, bool]
"""Of every part that a photo shows: whether it lies in the box."""


@dataclass(frozen=True)
class PartShare:
    """The part that lies in the box most often, and in what share of the photos that show it."""

    part: str
    share: float
    n_photos: int  # that show it


BySplit = Mapping[Split, PartShare]


@dataclass(frozen=True)
class HidingShare:
    """What hiding a box does to photos that go to a prototype's side; random boxes have the same size."""

    n_photos: int
    flip_rate: float  # share of the photos that no longer go there
    random_flip_rate: float
    distance: float  # to the prototype, in units of its reach, mean over the photos
    distance_hidden: float
    random_distance_hidden: float
    n_in_radius: int = 0  # photos in which a prototype of the node was within reach; the next two are about these
    lost: float | None = None  # share of them that turn away, or stay with nothing within reach
    random_loss_rate: float | None = None


@dataclass(frozen=True)
class OnDifference:
    """Whether a prototype's box touches a part in which the most alike classes of its node's two sides differ."""

    parts: tuple[str, ...]
    touches: bool
    by_chance: float  # for boxes of the same size anywhere on the object


@dataclass(frozen=True)
class PrototypeParts:
    """The figures of one prototype. What the data cannot tell is missing: None, or not in the mapping."""

    prototype: int
    purity: Mapping[Place, BySplit] = field(default_factory=dict)  # over the nearest photos
    consistency: Mapping[Place, BySplit] = field(default_factory=dict)  # over the photos that go its way
    same_part_wide: Mapping[Place, BySplit] = field(default_factory=dict)
    stability: float | None = None
    hiding: Mapping[str, HidingShare] = field(default_factory=dict)  # by the method that the box comes from
    on_difference: Mapping[str, OnDifference] = field(default_factory=dict)


@dataclass(frozen=True)
class Baseline:
    """The purity of boxes that know nothing of the prototype, in the same photos."""

    random_patch: float  # on the object
    object_middle: float  # the box always stands in the middle of the object


@dataclass(frozen=True)
class PartFigures:
    """The figures of a tree."""

    prototypes: tuple[PrototypeParts, ...]
    baselines: Mapping[Split, Baseline] = field(default_factory=dict)

    def purity(self, split: Split, place: Place = "peak") -> float | None:
        """Mean over the prototypes."""
        return _mean(self._purities(split, place))

    def consistency(self, split: Split, place: Place = "peak", *, wide: bool = False) -> float | None:
        """Share of the prototypes for which one part lies in the box of most photos that go their way."""
        found = [(one.same_part_wide if wide else one.consistency).get(place, {}) for one in self.prototypes]
        return _mean([float(own[split].share >= CONSISTENT) for own in found if split in own])

    @property
    def stability(self) -> float | None:
        """Mean over the prototypes."""
        return _mean([one.stability for one in self.prototypes if one.stability is not None])

    def hiding(self, method: str) -> HidingShare | None:
        """Over all photos tested, each with each prototype on its way."""
        found = [one.hiding[method] for one in self.prototypes if method in one.hiding]
        total, within = sum(one.n_photos for one in found), sum(one.n_in_radius for one in found)
        if not total:
            return None

        def mean(name: str) -> float:
            return sum(one.n_photos * float(getattr(one, name)) for one in found) / total

        def mean_within(name: str) -> float | None:
            return sum(one.n_in_radius * (getattr(one, name) or 0.0) for one in found) / within if within else None

        return HidingShare(
            total,
            flip_rate=mean("flip_rate"),
            random_flip_rate=mean("random_flip_rate"),
            distance=mean("distance"),
            distance_hidden=mean("distance_hidden"),
            random_distance_hidden=mean("random_distance_hidden"),
            n_in_radius=within,
            lost=mean_within("lost"),
            random_loss_rate=mean_within("random_loss_rate"),
        )

    def _purities(self, split: Split, place: Place) -> list[float]:
        found = [one.purity.get(place, {}) for one in self.prototypes]
        return [own[split].share for own in found if split in own]

    def to_json(self) -> dict[str, Any]:
        """The figures of the tree, then those of every prototype."""
        known = [(place, split) for place in PLACES for split in SPLITS if self._purities(split, place)]

        def by_place(figure: Callable[[Place, Split], Any]) -> dict[str, dict[str, Any]]:
            found: dict[str, dict[str, Any]] = {}
            for place, split in known:
                found.setdefault(place, {})[split] = figure(place, split)
            return found

        return {
            "nearest": NEAREST,
            "box_share": BOX_SHARE,
            "purity": by_place(self._purity_figures),
            "baselines": {split: asdict(baseline) for split, baseline in self.baselines.items()},
            "consistency": by_place(lambda place, split: self.consistency(split, place)),
            "consistency_wide": by_place(lambda place, split: self.consistency(split, place, wide=True)),
            "stability": self.stability,
            "hiding": {method: asdict(found) for method in self._methods("hiding") if (found := self.hiding(method))},
            "on_difference": {method: self._on_difference(method) for method in self._methods("on_difference")},
            "prototypes": [asdict(one) for one in self.prototypes],
        }

    def _purity_figures(self, place: Place, split: Split) -> dict[str, float | None]:
        shares = self._purities(split, place)
        related = _mean([float(share > PART_RELATED) for share in shares])
        return {"mean": _mean(shares), "std": statistics.pstdev(shares), "part_related": related}

    def _methods(self, name: str) -> list[str]:
        return list(dict.fromkeys(method for one in self.prototypes for method in getattr(one, name)))

    def _on_difference(self, method: str) -> dict[str, Any]:
        found = [one.on_difference[method] for one in self.prototypes if method in one.on_difference]
        return {
            "n_prototypes": len(found),
            "touching": _mean([float(one.touches) for one in found]),
            "by_chance": _mean([one.by_chance for one in found]),
        }


def without_side(name: str) -> str:
    """`left wing` and `right wing` are both `wing`."""
    return " ".join(word for word in name.split() if word not in ("left", "right")) or name


def parts_inside(parts: Iterable[Part], box: Box) -> dict[str, bool]:
    """Of every part shown, left and right ones as one: whether (one of) it lies in the box."""
    found: dict[str, bool] = {}
    for part in parts:
        name = without_side(part.name)
        found[name] = found.get(name, False) or box.contains(part.x, part.y)
    return found


def purest(photos: Sequence[Inside]) -> PartShare | None:
    """The part that lies in the box in the largest share of the photos that show it; of equals, in more photos.

    None where no photo shows any part.
    """
    seen: dict[str, list[bool]] = {}
    for photo in photos:
        for part, is_inside in photo.items():
            seen.setdefault(part, []).append(is_inside)
    if not seen:
        return None
    part = max(seen, key=lambda name: (sum(seen[name]) / len(seen[name]), sum(seen[name])))
    return PartShare(part, sum(seen[part]) / len(seen[part]), len(seen[part]))


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
