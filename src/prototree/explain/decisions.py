"""One decision about one image as plain data (§5.3). Draws nothing.

>>> decision = explain_image(run, "bird.jpg")
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from prototree.backbones.preprocessing import Preprocessing
from prototree.core.ensemble import ballot
from prototree.core.model import ProtoTree, TreeOutput, TreePrediction
from prototree.core.nodes import LN2
from prototree.core.patches import distance_map
from prototree.core.strategies import Strategy
from prototree.data.images import from_pillow, read_photo
from prototree.data.transforms import to_input
from prototree.data.views import FULL
from prototree.explain.attribution import Probes, attribute, occlude
from prototree.explain.counterfactual import runner_up
from prototree.explain.histograms import decisive
from prototree.explain.localization import (
    Finding,
    InputFrame,
    SeenPhoto,
    cell_finding,
    grid_finding,
    grids_of,
    peak_finding,
    tested,
)
from prototree.explain.prototype_pictures import PrototypePictures, open_photo, reduced
from prototree.explain.records import (
    DecisionExplanation,
    Match,
    PathExplanation,
    RunnerUp,
    SeenPatch,
    Spread,
    Step,
)
from prototree.explain.tree import pictures_of, spreads_of
from prototree.inference.answers import doubts_of
from prototree.run import Run, run_or_tree_at

_PATHS: tuple[Strategy, ...] = ("greedy", "max_path")  # the explanation first
_SIDE = 480  # pixels of the longer side of the photo that is explained

Network = Callable[[Float[Tensor, "B 3 h w"]], Float[Tensor, "B D H W"]]
"""Images to feature maps."""


def explain_image(
    run_or_tree: Run | ProtoTree | str | Path,
    image: str | Path | Image.Image,
    pictures: PrototypePictures | None = None,
    *,
    name: str | None = None,
    label: int | None = None,
    occlusion: bool = False,
    attribution: bool = False,
    notes: Mapping[int, str] | None = None,
    spreads: Mapping[int, Spread] | None = None,
    network: Network | None = None,
) -> DecisionExplanation:
    """How a tree decides about one image, by both hard strategies, and what the runner-up would have needed.

    A run also provides the pictures of its prototypes, its notes and, if they were counted, the spreads of its nodes.
    Without options it costs one forward pass and the pictures. `attribution` also finds what each similarity on the
    path depends on and tests every box by hiding it (about 15 passes per prototype on the path); `occlusion` takes 49
    more. For many images, pass the tree's own network in its fastest form as `network`
    (`network.engine.frozen_features`).

    Examples:
        >>> decision = explain_image("runs/photos", "bird.jpg")
        >>> len(decision.paths["greedy"].steps) >= 1, len(decision.soft)
        (True, 3)
    """
    given = run_or_tree_at(run_or_tree)
    if isinstance(given, Run):
        notes = given.notes if notes is None else notes
    tree = given.tree() if isinstance(given, Run) else given.eval()
    if spreads is None:
        spreads = spreads_of(given, tree) if isinstance(given, Run) else {}
    if pictures is None:
        pictures = pictures_of(given, tree) if isinstance(given, Run) else PrototypePictures(tree)
    decided = _Decided.of(tree, network or tree.features, *_open(image, tree.preprocessing, name, label))
    matches = decided.matches(attribution=attribution, occlusion=occlusion)
    return DecisionExplanation(
        image=decided.seen.image,
        photo=decided.seen.picture,
        size=decided.seen.photo.size,
        class_names=tree.class_names,
        label=label,
        soft=tuple(decided.decisions.soft[0].tolist()),
        confidence=float(decided.decisions.confidence[0]) if decided.decisions.is_known[0] else None,
        doubt=doubts_of(tree, decided.decisions)[0],
        paths={strategy: decided.path(strategy, matches, pictures, notes or {}, spreads) for strategy in _PATHS},
        runner_up={strategy: decided.runner_up(strategy) for strategy in _PATHS},
        question=tree.question.kind,
        n_calibration=tree.calibration.n_photos,
        in_vote=tuple(ballot(tree, decided.routed).soft[0].tolist()),
    )


@dataclass(frozen=True)
class _Decided:
    """One image that has gone through a tree."""

    tree: ProtoTree
    seen: SeenPhoto
    images: Float[Tensor, "1 3 h w"]
    feature_map: Float[Tensor, "1 D H W"]
    routed: TreeOutput
    decisions: TreePrediction

    @classmethod
    @torch.no_grad()
    def of(cls, tree: ProtoTree, network: Network, shown: Image.Image, seen: SeenPhoto) -> "_Decided":
        images = to_input(shown, tree.preprocessing)[None].to(tree.prototypes.device)
        feature_map = network(images)
        routed = tree.route(feature_map)
        return cls(tree, seen, images, feature_map, routed, tree.decide(routed))

    def matches(self, *, attribution: bool, occlusion: bool) -> dict[int, Match]:
        """The image's best patch for every prototype on one of the paths."""
        ways = [self.decisions.path(strategy).nodes[0].tolist() for strategy in _PATHS]
        nodes = np.array(sorted({node for way in ways for node in way if node >= 0}), dtype=np.int64)
        asked: list[int] = self.tree.prototypes_of(nodes).tolist()
        apart = distance_map(self.feature_map, self.tree.prototypes.detach()[asked])[0]
        maps = grids_of(self.tree.question.similarity(apart, self.tree.reach[asked][:, None, None]))
        patch = self.routed.patch[0, asked]
        similarity = self.tree.similarity(self.routed.distance[0, asked], asked).tolist()
        findings = [
            [peak_finding(self.tree, p, grid), cell_finding(self.tree, p, grid)]
            for p, grid in zip(patch.tolist(), maps, strict=True)
        ]
        if asked and (attribution or occlusion):
            probes = Probes.of(self.tree, self.images.expand(len(asked), -1, -1, -1), asked, patch)
            findings = _tested(self.tree, probes, findings, similarity, attribution=attribution, occlusion=occlusion)
        return {prototype: self.seen.match(self.tree, similarity[i], findings[i]) for i, prototype in enumerate(asked)}

    def path(
        self,
        strategy: Strategy,
        matches: Mapping[int, Match],
        pictures: PrototypePictures,
        notes: Mapping[int, str],
        spreads: Mapping[int, Spread],
    ) -> PathExplanation:
        path, n_nodes = self.decisions.path(strategy), self.tree.topology.n_nodes
        is_choice = self.tree.question.kind == "pairwise"

        def seen(prototype: int, p_right: float) -> SeenPatch:
            distance, reach = float(self.routed.distance[0, prototype]), LN2 * float(self.tree.reach[prototype])
            in_reach = distance <= reach if is_choice else p_right > 0.5
            match, picture, around = matches[prototype], pictures.crop(prototype), pictures.around(prototype)
            return SeenPatch(prototype, distance, in_reach, match, picture, notes.get(prototype, ""), around)

        turns = zip(path.nodes[0].tolist(), path.goes_right[0].tolist(), path.p_right[0].tolist(), strict=True)
        at = self.decisive()
        steps = tuple(
            Step(
                node=node,
                goes_right=right,
                p_right=p_right,
                right=seen(node, p_right),
                left=seen(node + n_nodes, p_right) if is_choice else None,
                at=at[node],
                spread=spreads.get(node),
            )
            for node, right, p_right in turns
            if node >= 0
        )
        class_probs = tuple(self.decisions.class_probs(strategy)[0].tolist())
        return PathExplanation(strategy, steps, int(path.leaf[0]), class_probs)

    def decisive(self) -> list[float]:
        """What decided at each node, in the units of a `Spread`."""
        n_nodes, distance = self.tree.topology.n_nodes, self.routed.distance
        left = distance[:, n_nodes:] if self.tree.question.kind == "pairwise" else None
        at: list[float] = decisive(self.tree, range(n_nodes), distance[:, :n_nodes], left)[0].tolist()
        return at

    def runner_up(self, strategy: Strategy) -> RunnerUp | None:
        decisions, tree = self.decisions, self.tree
        turns = tree.question.log_turns(self.routed.distance.double(), tree.reach.double())
        left, right = (side[0].detach().cpu().numpy() for side in turns)
        leaf_labels = decisions.leaf_probs.argmax(dim=1).cpu().numpy()
        answer = int(decisions.labels(strategy)[0])
        soft = decisions.soft[0].cpu().numpy()
        sharpness = tree.question.sharpness if tree.question.kind == "pairwise" else None
        return runner_up(left, right, tree.topology, leaf_labels, soft, answer, strategy, sharpness)


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


def _tested(
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
        fall = occlude(tree.features, probes, before)
        for own, grid in zip(findings, grids_of(fall), strict=True):
            own.append(grid_finding("occlusion", grid, tree.preprocessing))
    return [list(own) for own in tested(tree.features, probes, findings, before, generator)]
