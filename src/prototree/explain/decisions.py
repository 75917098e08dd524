"""Explanations as plain data (§5.2–5.3): one prototype, the whole tree, one decision, one vote. Draws nothing.

>>> explanation = explain_tree(run)
>>> decision = explain_image(run.tree(), "bird.jpg", pictures_of(run))
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from prototree.data import ImageData
from prototree.data.augment import to_input
from prototree.data.images import SUFFIXES, from_pillow, is_image, read_photo
from prototree.data.views import FULL
from prototree.errors import ConfigError, DataError
from prototree.explain.attribution import Probes, attribute, occlude
from prototree.explain.counterfactuals import runner_up
from prototree.explain.places import Finding, InputFrame, SeenPhoto, cell_finding, grid_finding, grids_of, tested
from prototree.explain.prototype_pictures import PrototypePictures, open_photo, reduced, write_pictures
from prototree.explain.prototypes import explain_prototypes
from prototree.explain.records import (
    DecisionExplanation,
    Location,
    Match,
    PathExplanation,
    PrototypeExplanation,
    RunnerUp,
    Step,
    TreeExplanation,
    VoteExplanation,
)
from prototree.network.geometry import Box
from prototree.network.preprocessing import Preprocessing
from prototree.run import PICTURES, Run
from prototree.tree import routing
from prototree.tree.ensemble import Ensemble
from prototree.tree.leaves import class_log_probs
from prototree.tree.model import ProtoTree
from prototree.tree.patches import distance_map
from prototree.tree.strategies import HARD, Strategy

__all__ = [
    "PrototypePictures",
    "Voter",
    "explain_decision",
    "explain_image",
    "explain_prototypes",
    "explain_tree",
    "explain_vote",
    "local_paths",
    "open_voters",
    "pictures_of",
    "store_pictures",
]

log = logging.getLogger(__name__)

MAX_IMAGES = 10_000
_SIDE = 480  # pixels of the longer side of the photo that is explained


def explain_tree(
    run: Run,
    *,
    data: ImageData | None = None,
    nearest: int = 5,
    occlusion: bool = False,
    notes: Mapping[int, str] | None = None,
    tick: Callable[[int, int], None] | None = None,
) -> TreeExplanation:
    """Everything about a run's tree. On a machine without the training data: what the run's folder holds."""
    if nearest < 0:
        raise ConfigError(f"expected a number of nearest patches of at least 0, got {nearest}")
    tree = run.tree()
    notes = run.notes if notes is None else notes
    data = data if data is not None else run.data_if_here()
    if data is not None and data.class_names != tree.class_names:
        raise DataError("expected the classes of the run in the data, got others; choose the data it was made with")
    nodes = range(tree.topology.n_nodes)
    if data is None:
        pictures = pictures_of(run, tree)
        prototypes = tuple(_stored(tree, node, pictures, notes or {}) for node in nodes)
    else:
        config = run.config
        prototypes = explain_prototypes(
            tree,
            data,
            nodes,
            views=config.recipe.source_views(data),
            nearest=nearest,
            occlusion=occlusion,
            notes=notes,
            tick=tick,
            workers=config.workers,
        )
    return TreeExplanation(
        title=run.folder.resolve().name,
        class_names=tree.class_names,
        left=tuple(tree.topology.left.tolist()),
        right=tuple(tree.topology.right.tolist()),
        prototypes=prototypes,
        leaf_probs=tuple(map(tuple, class_log_probs(tree.leaf_logits.detach()).exp().tolist())),
        accuracy={str(strategy): float(value) for strategy, value in run.last_metrics.get("accuracy", {}).items()},
    )


def store_pictures(run: Run, data: ImageData) -> None:
    """Keeps the prototypes' pictures in the run, so that it explains on machines without the data."""
    write_pictures(run.tree(), data, run.folder / PICTURES)


def pictures_of(run: Run, tree: ProtoTree | None = None, data: ImageData | None = None) -> PrototypePictures:
    """The prototypes' pictures: from the data given, or from the run's folder, or from the run's own data."""
    tree = tree if tree is not None else run.tree()
    pictures = PrototypePictures(tree, data, run.folder / PICTURES)
    if data is not None or pictures.complete:
        return pictures
    return PrototypePictures(tree, run.data_if_here())


def _stored(tree: ProtoTree, node: int, pictures: PrototypePictures, notes: Mapping[int, str]) -> PrototypeExplanation:
    """What is known of a prototype without any data: its pictures and its box, but no heat and no neighbours."""
    source, shown = tree.sources[node], pictures.of(node)
    box = Box(*source.box) if source is not None else Box.whole(shown.size)
    heat = np.zeros(shown.photo.shape[:2], dtype=np.float32)
    match = Match(
        image=source.image if source is not None else "",
        label=source.label if source is not None else None,
        similarity=1.0 if source is not None else 0.0,
        size=shown.size,
        photo=shown.photo,
        crop=shown.crop,
        where=(Location("cell", box, heat, None),),
    )
    distance = source.distance if source is not None else 0.0
    return PrototypeExplanation(node, match, distance, (), (), (), notes.get(node, ""))


def explain_image(
    tree: ProtoTree,
    image: str | Path | Image.Image,
    pictures: PrototypePictures,
    *,
    name: str | None = None,
    label: int | None = None,
    occlusion: bool = False,
    attribution: bool = False,
    notes: Mapping[int, str] | None = None,
) -> DecisionExplanation:
    """How the tree decides about one image, by both hard strategies, and what the runner-up would have needed.

    By itself it costs one forward pass and the pictures. `attribution` also asks what each similarity on the way
    depends on and tests every box by hiding it (some 15 passes for each node on the way); `occlusion` takes 49 more.
    """
    tree.eval()
    network_image, seen = _open(image, tree.preprocessing, name, label)
    images = to_input(network_image, tree.preprocessing)[None].to(tree.prototypes.device)
    with torch.no_grad():
        feature_map = tree.features(images)
        routed = tree.route(feature_map)
        decisions = tree.decide(routed)
        paths = {strategy: decisions.path(strategy) for strategy in HARD}
        nodes = sorted({node for path in paths.values() for node in path.nodes[0].tolist() if node >= 0})
        prototypes = tree.prototypes.detach()[nodes]
        maps = grids_of(routing.similarity(distance_map(feature_map, prototypes))[0])
    patch, similarity = routed.patch[0, nodes], routed.similarity[0, nodes].tolist()
    findings = [[cell_finding(tree, p, grid)] for p, grid in zip(patch.tolist(), maps, strict=True)]
    if nodes and (attribution or occlusion):
        probes = Probes(images.expand(len(nodes), -1, -1, -1), prototypes, patch)
        findings = _honest(tree, probes, findings, similarity, attribution=attribution, occlusion=occlusion)
    matches = {node: seen.match(tree, similarity[i], findings[i]) for i, node in enumerate(nodes)}
    soft, leaf_labels = decisions.soft[0].cpu().numpy(), decisions.leaf_probs.argmax(dim=1).cpu().numpy()
    distance = routed.distance[0].detach().cpu().numpy()

    def explain_path(strategy: Strategy) -> PathExplanation:
        path, steps = paths[strategy], []
        for node, right in zip(path.nodes[0].tolist(), path.goes_right[0].tolist(), strict=True):
            if node >= 0:
                match, note = matches[node], (notes or {}).get(node, "")
                steps.append(Step(node, right, match.similarity, match, pictures.crop(node), note))
        class_probs = tuple(decisions.class_probs(strategy)[0].tolist())
        return PathExplanation(strategy, tuple(steps), int(path.leaf[0]), class_probs)

    def next_in_line(strategy: Strategy) -> RunnerUp | None:
        answer = int(decisions.labels(strategy)[0])
        return runner_up(distance, tree.topology, leaf_labels, soft, answer, strategy)

    return DecisionExplanation(
        image=seen.image,
        photo=seen.picture,
        size=seen.photo.size,
        class_names=tree.class_names,
        label=label,
        soft=tuple(soft.tolist()),
        paths={strategy: explain_path(strategy) for strategy in HARD},
        runner_up={strategy: next_in_line(strategy) for strategy in HARD},
    )


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
) -> VoteExplanation:
    """One decision for each tree, and the mean of their class probabilities."""
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
        )
        for i, tree in enumerate(trees)
    )
    mean = np.mean([decision.soft for decision in decisions], axis=0)
    return VoteExplanation(decisions, tuple(mean.tolist()))


@dataclass(frozen=True)
class Voter:
    """A tree with the pictures of its prototypes and the user's words about them."""

    tree: ProtoTree
    pictures: PrototypePictures
    notes: Mapping[int, str] = field(default_factory=dict)


def open_voters(folders: Sequence[str | Path], data: str | Path | None = None) -> list[Voter]:
    """The trees of some runs, to explain with; `data` only where the runs' pictures are not stored."""
    voters = []
    for run in map(Run.open, folders):
        tree = run.tree()
        images = run.data(data) if data is not None else None
        voters.append(Voter(tree, pictures_of(run, tree, images), run.notes))
    Ensemble([voter.tree for voter in voters])
    return voters


def explain_decision(
    voters: Sequence[Voter], image: str | Path | Image.Image, *, attribution: bool = False, occlusion: bool = False
) -> DecisionExplanation | VoteExplanation:
    """The decision of the one tree, or the vote of several."""
    if len(voters) == 1:
        only = voters[0]
        return explain_image(
            only.tree, image, only.pictures, attribution=attribution, occlusion=occlusion, notes=only.notes
        )
    trees, pictures = [voter.tree for voter in voters], [voter.pictures for voter in voters]
    notes = [voter.notes for voter in voters]
    return explain_vote(trees, image, pictures, attribution=attribution, occlusion=occlusion, notes=notes)


def local_paths(places: Sequence[str | Path], limit: int = MAX_IMAGES) -> list[Path]:
    """The images that files and folders name, each once, in the order given; folders are searched to the bottom."""
    found: dict[Path, None] = {}
    for place in map(Path, places):
        if not place.exists():
            raise DataError(f"{place} does not exist; expected an image or a folder of images")
        inside = (
            sorted(path for path in place.rglob("*") if is_image(path) and path.is_file()) if place.is_dir() else []
        )
        if place.is_dir() and not inside:
            raise DataError(f"{place} holds no image; expected files that end in {', '.join(SUFFIXES)}")
        if not place.is_dir() and not is_image(place):
            raise DataError(f"{place} is not an image we read; expected a file that ends in {', '.join(SUFFIXES)}")
        found.update(dict.fromkeys(inside or [place]))
        if len(found) > limit:
            raise DataError(f"expected at most {limit:,} images at a time, got more in {place}; name fewer")
    if not found:
        raise DataError("expected at least one image to explain, got none")
    return list(found)


def _open(
    image: str | Path | Image.Image, preprocessing: Preprocessing, name: str | None, label: int | None
) -> tuple[Image.Image, SeenPhoto]:
    """The picture for the network, read as for an evaluation, and the photo to make pictures of."""
    if isinstance(image, Image.Image):
        seen = shown = from_pillow(image)
        name = name or "image"
    else:
        seen = read_photo(image, at_least=preprocessing.resize)
        whole = seen.image.size == seen.size
        shown = seen if whole else open_photo(Path(image))
        name = name or Path(image).name
    frame = InputFrame(FULL, shown.size, preprocessing)
    return seen.image, SeenPhoto(name, label, frame, shown, reduced(shown, _SIDE))


def _honest(
    tree: ProtoTree,
    probes: Probes,
    findings: list[list[Finding]],
    before: list[float],
    *,
    attribution: bool,
    occlusion: bool,
) -> list[list[Finding]]:
    """The other answers beside the cells, and the test of all."""
    generator = torch.Generator().manual_seed(0)
    if attribution:
        for own, grid in zip(findings, grids_of(attribute(tree.features, probes, generator)), strict=True):
            own.append(grid_finding("attribution", grid, tree.preprocessing))
    if occlusion:
        fall = occlude(tree.features, probes.images[0], probes.prototypes, before)
        for own, grid in zip(findings, grids_of(fall), strict=True):
            own.append(grid_finding("occlusion", grid, tree.preprocessing))
    return [list(own) for own in tested(tree.features, probes, findings, before, generator)]
