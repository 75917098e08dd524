"""Decisions of one tree or of several that vote, about images that people name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from PIL import Image

from prototree.backbones.inference import frozen_features
from prototree.core.ensemble import Ensemble
from prototree.core.model import ProtoTree
from prototree.data.cub import readable_names
from prototree.data.images import is_image, suffixes
from prototree.errors import ConfigError, DataError
from prototree.explain.decisions import Network, explain_image
from prototree.explain.prototype_pictures import PrototypePictures
from prototree.explain.records import DecisionExplanation, Spread, VoteExplanation
from prototree.explain.tree import pictures_of, spreads_of
from prototree.run import Run

MAX_IMAGES = 10_000
FEW_IMAGES = 8  # that a network explains as it is


def explain_vote(
    trees: Sequence[ProtoTree],
    image: str | Path | Image.Image,
    pictures: Sequence[PrototypePictures],
    *,
    name: str | None = None,
    label: int | None = None,
    occlusion: bool = False,
    attribution: bool = False,
    notes: Sequence[Mapping[int, str]] | None = None,
    spreads: Sequence[Mapping[int, Spread]] | None = None,
    networks: Sequence[Network | None] | None = None,
) -> VoteExplanation:
    """One decision for each tree, and the mean of what they say in a vote."""
    Ensemble(trees)  # refuses trees that do not fit together
    if len(pictures) != len(trees) or (notes is not None and len(notes) != len(trees)):
        raise ConfigError(f"expected pictures (and notes) for each of {len(trees)} trees, got {len(pictures)}")
    decisions = tuple(
        explain_image(
            tree,
            image,
            pictures[i],
            name=name,
            label=label,
            occlusion=occlusion,
            attribution=attribution,
            notes=notes[i] if notes is not None else None,
            spreads=spreads[i] if spreads is not None else None,
            network=networks[i] if networks is not None else None,
        )
        for i, tree in enumerate(trees)
    )
    mean = np.mean([decision.in_vote for decision in decisions], axis=0)
    return VoteExplanation(decisions, tuple(mean.tolist()))


@dataclass(frozen=True)
class Voter:
    """A tree with the pictures of its prototypes, the user's words about them, and the spreads of its nodes."""

    tree: ProtoTree
    pictures: PrototypePictures
    notes: Mapping[int, str] = field(default_factory=dict)
    spreads: Mapping[int, Spread] = field(default_factory=dict)
    network: Network | None = None  # the tree's own as it runs fastest; None: as it is

    def for_many(self) -> "Voter":
        """The same for many images: making the network faster takes as long as explaining a few."""
        return replace(self, network=frozen_features(self.tree.features))


def open_voters(folders: Sequence[str | Path], data: str | Path | None = None) -> list[Voter]:
    """The trees of some runs, to explain with; `data` only where the runs' pictures are not stored."""
    voters = []
    for run in map(Run.open, folders):
        tree = run.tree()
        images = run.data(data) if data is not None else None
        voters.append(Voter(tree, pictures_of(run, tree, images), run.notes, spreads_of(run, tree)))
    Ensemble([voter.tree for voter in voters])
    return voters


def explain_decision(
    voters: Sequence[Voter],
    image: str | Path | Image.Image,
    *,
    label: int | None = None,
    attribution: bool = False,
    occlusion: bool = False,
) -> DecisionExplanation | VoteExplanation:
    """The decision of the one tree, or the vote of several; `label` is the true class where it is known."""
    if len(voters) == 1:
        only = voters[0]
        return explain_image(
            only.tree,
            image,
            only.pictures,
            label=label,
            attribution=attribution,
            occlusion=occlusion,
            notes=only.notes,
            spreads=only.spreads,
            network=only.network,
        )
    return explain_vote(
        [voter.tree for voter in voters],
        image,
        [voter.pictures for voter in voters],
        label=label,
        attribution=attribution,
        occlusion=occlusion,
        notes=[voter.notes for voter in voters],
        spreads=[voter.spreads for voter in voters],
        networks=[voter.network for voter in voters],
    )


def class_of_folder(path: Path, class_names: Sequence[str]) -> int | None:
    """The true class of a photo that lies in a folder named after one, as training data does; else None."""
    folder = path.resolve().parent.name
    names = [folder, *readable_names([folder])]
    return next((class_names.index(name) for name in names if name in class_names), None)


def local_paths(places: Sequence[str | Path], limit: int = MAX_IMAGES) -> list[Path]:
    """The images that files and folders name, each once, in the order given; folders are searched to the bottom."""
    found: dict[Path, None] = {}
    for place in map(Path, places):
        if not place.exists():
            raise DataError(f"{place} does not exist; expected an image or a folder of images")
        # What is called an image and is a pipe or a dead link is tried too, so that it is named as left out.
        inside = sorted(path for path in place.rglob("*") if is_image(path) and not path.is_dir())
        if place.is_dir() and not inside:
            raise DataError(f"{place} holds no image; expected files that end in {', '.join(suffixes())}")
        if not place.is_dir() and not is_image(place):
            raise DataError(f"{place} is not an image we read; expected a file that ends in {', '.join(suffixes())}")
        found.update(dict.fromkeys(inside or [place]))
        if len(found) > limit:
            raise DataError(f"expected at most {limit:,} images at a time, got more in {place}; name fewer")
    if not found:
        raise DataError("expected at least one image to explain, got none")
    return list(found)
