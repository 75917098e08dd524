"""Local explanation (§5.3): how one tree, or an ensemble, decides about one image, with a counterfactual explanation.

Notation used for shapes: B batch, D prototype depth, H W feature map, N nodes, L leaves, K classes, m some leaves.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from PIL import Image
from torch import Tensor

from prototree.backbones.inference import frozen_features
from prototree.core.ensemble import Ensemble, tree_vote
from prototree.core.model import ProtoTree, TreeOutput, TreePrediction, distance_map
from prototree.core.topology import Strategy, Topology
from prototree.data.crops import FULL_IMAGE
from prototree.data.cub_cars import readable_names
from prototree.data.images import from_pillow, load_image
from prototree.data.transforms import eval_transform
from prototree.explanation.assets import PrototypePictures, open_photo, pictures_of, reduced, stored_histograms
from prototree.explanation.attribution import Probes, attribute, occlude
from prototree.explanation.localization import ImageContext, InputFrame, find_in_grid, find_match, occlude_findings
from prototree.explanation.neighbours import decisive
from prototree.explanation.records import (
    Counterfactual,
    DecisionExplanation,
    DecisionHistogram,
    EnsembleExplanation,
    Flip,
    Match,
    Nearer,
    PatchComparison,
    PathExplanation,
    Step,
)
from prototree.inference.predict import abstentions
from prototree.run import Run, run_or_tree_at

FEW_IMAGES = 8  # that a network explains as it is: making it faster takes as long
_PATHS: tuple[Strategy, ...] = ("greedy", "max_path")  # the explanation first
_SIDE = 480  # pixels of the longer side of the image that is explained

MARGIN = 1e-4  # how far past the balance a changed similarity goes, in log-odds: enough to be no tie in float32

ImageFile = str | Path | Image.Image
Model = Run | ProtoTree | str | Path
Network = Callable[[Float[Tensor, "B 3 h w"]], Float[Tensor, "B D H W"]]  # images to feature maps


@dataclass(frozen=True)
class Explainer:
    """A tree with what its explanations show: pictures of its prototypes, the user's notes, histograms of its nodes."""

    tree: ProtoTree
    pictures: PrototypePictures
    notes: Mapping[int, str] = field(default_factory=dict)
    histograms: Mapping[int, DecisionHistogram] = field(default_factory=dict)
    network: Network | None = None  # the tree's own as it runs fastest; None: as it is

    @classmethod
    def open(cls, model: Model, data: str | Path | None = None) -> "Explainer":
        """Open a run or a tree; `data` only where the run's pictures are not stored."""
        opened = run_or_tree_at(model)
        if isinstance(opened, ProtoTree):
            return cls(opened.eval(), PrototypePictures(opened))
        tree = opened.tree()
        pictures = pictures_of(opened, tree, opened.data(data) if data is not None else None)
        return cls(tree, pictures, opened.notes, stored_histograms(opened, tree))

    def for_many(self) -> "Explainer":
        """Fold the network, for more than a few images."""
        return replace(self, network=frozen_features(self.tree.features))

    def explain(
        self,
        image: ImageFile,
        *,
        name: str | None = None,
        label: int | None = None,
        attribution: bool = False,
        occlusion: bool = False,
    ) -> DecisionExplanation:
        """Explain one decision by both hard strategies, and what the runner-up would have needed."""
        tree, (pixels, context) = self.tree, self._open_image(image, name, label)
        images = eval_transform(pixels, tree.preprocessing)[None].to(tree.prototypes.device)
        with torch.no_grad():
            feature_map = (self.network or tree.features)(images)
            routed = tree.forward_features(feature_map)
            predicted = tree.decode(routed)
        nodes = {node for way in _PATHS for node in predicted.path(way).nodes[0].tolist() if node >= 0}
        asked: list[int] = tree.prototypes_of(np.array(sorted(nodes), dtype=np.int64)).tolist()
        matches = self._matches(context, images, feature_map, routed, asked, attribution, occlusion)
        return DecisionExplanation(
            image=context.image,
            photo=context.picture,
            size=context.photo.size,
            class_names=tree.class_names,
            label=label,
            class_probs=tuple(predicted.soft[0].tolist()),
            confidence=float(predicted.confidence[0]) if not predicted.abstained[0] else None,
            abstention=abstentions(tree, predicted)[0],
            paths={strategy: self._path(strategy, routed, predicted, matches) for strategy in _PATHS},
            counterfactuals={"greedy": self._counterfactual(routed, predicted)},
            node_kind=tree.node_function.kind,
            n_calibration=tree.calibration.n_images,
            ensemble_probs=tuple(tree_vote(tree, routed).soft[0].tolist()),
        )

    def _open_image(self, image: ImageFile, name: str | None, label: int | None) -> tuple[Image.Image, ImageContext]:
        """Read the image for the network, as for an evaluation, and in more detail to make pictures of."""
        preprocessing = self.tree.preprocessing
        if isinstance(image, Image.Image):
            seen = shown = from_pillow(image)
        else:
            seen = load_image(image, at_least=preprocessing.resize)
            shown = seen if seen.image.size == seen.size else open_photo(Path(image))
        name = name or ("image" if isinstance(image, Image.Image) else Path(image).name)
        frame = InputFrame(FULL_IMAGE, shown.size, preprocessing)
        return seen.image, ImageContext(name, label, frame, shown, reduced(shown, _SIDE))

    def _matches(
        self,
        context: ImageContext,
        images: Float[Tensor, "1 3 h w"],
        feature_map: Float[Tensor, "1 D H W"],
        routed: TreeOutput,
        asked: list[int],
        attribution: bool,
        occlusion: bool,
    ) -> dict[int, Match]:
        """Find the image's best patch for every prototype on one of the paths, by each method that is wanted."""
        tree, patch = self.tree, routed.patch[0, asked]
        dists = distance_map(feature_map, tree.prototypes.detach()[asked])[0]
        maps = tree.node_function.similarity(dists, tree.radius[asked][:, None, None]).float().cpu().numpy()
        similarity = tree.similarity(routed.distance[0, asked], asked).tolist()
        findings = [find_match(tree, number, grid) for number, grid in zip(patch.tolist(), maps, strict=True)]
        if asked and (attribution or occlusion):
            probes = Probes.of(tree, images.expand(len(asked), -1, -1, -1), asked, patch)
            generator = torch.Generator().manual_seed(0)
            if attribution:
                for finding, grid in zip(findings, attribute(tree.features, probes, generator), strict=True):
                    finding.append(find_in_grid("attribution", grid, tree.preprocessing))
            if occlusion:
                for finding, grid in zip(findings, occlude(tree.features, probes, similarity), strict=True):
                    finding.append(find_in_grid("occlusion", grid, tree.preprocessing))
            findings = occlude_findings(tree.features, probes, findings, similarity, generator)
        return {prototype: context.match(tree, similarity[i], findings[i]) for i, prototype in enumerate(asked)}

    def _path(
        self, strategy: Strategy, routed: TreeOutput, predicted: TreePrediction, matches: Mapping[int, Match]
    ) -> PathExplanation:
        tree, path, n_nodes = self.tree, predicted.path(strategy), self.tree.topology.n_nodes
        is_pairwise, distance = tree.node_function.kind == "pairwise", routed.distance
        left = distance[:, n_nodes:] if is_pairwise else None
        at = decisive(tree, range(n_nodes), distance[:, :n_nodes], left)[0].tolist()

        def compare(prototype: int, p_right: float) -> PatchComparison:
            dist = float(distance[0, prototype])
            in_radius = dist <= float(tree.radius[prototype]) if is_pairwise else p_right > 0.5
            match, note = matches[prototype], self.notes.get(prototype, "")
            crop, context = self.pictures.crop(prototype), self.pictures.context(prototype)
            return PatchComparison(prototype, dist, in_radius, match, crop, note, context)

        columns = zip(path.nodes[0].tolist(), path.goes_right[0].tolist(), path.p_right[0].tolist(), strict=True)
        steps = tuple(
            Step(
                node=node,
                goes_right=goes_right,
                p_right=p_right,
                right=compare(node, p_right),
                left=compare(node + n_nodes, p_right) if is_pairwise else None,
                at=at[node],
                histogram=self.histograms.get(node),
            )
            for node, goes_right, p_right in columns
            if node >= 0
        )
        return PathExplanation(strategy, steps, int(path.leaf[0]), tuple(predicted.class_probs(strategy)[0].tolist()))

    def _counterfactual(self, routed: TreeOutput, predicted: TreePrediction) -> Counterfactual | None:
        tree = self.tree
        left, right = tree.node_function.log_p_left_right(routed.distance.double(), tree.radius.double())
        return find_counterfactual(
            (right - left)[0].detach().cpu().numpy(),
            tree.topology,
            predicted.leaf_probs.argmax(dim=1).cpu().numpy(),
            predicted.soft[0].cpu().numpy(),
            int(predicted.labels("greedy")[0]),
            tree.node_function.sharpness if tree.node_function.kind == "pairwise" else None,
        )


def find_counterfactual(
    log_odds: Float[ndarray, " N"],
    topology: Topology,
    leaf_labels: Int[ndarray, " L"],
    class_probs: Float[ndarray, " K"],
    predicted: int,
    pairwise_sharpness: float | None = None,
) -> Counterfactual | None:
    """Find the smallest change that makes the runner-up the answer: the likeliest other class that has a leaf.

    A change is measured as the sum over nodes of how far the log-odds of going right move. So 0.5 → 0.6 counts less
    than 0.98 → 0.999, as it should: the second asks ten times the belief. The answer is that of the greedy path, so
    every wrong decision on the way to the new leaf must cross 0.5, and no other node need change. At pairwise nodes,
    their sharpness turns log-odds into distances. None where there is no other class.
    """
    others = [int(label) for label in np.unique(leaf_labels) if label != predicted]
    if not others:
        return None
    label = max(others, key=lambda k: class_probs[k])
    leaves = np.flatnonzero(leaf_labels == label)
    return Counterfactual(label, smallest_change(log_odds, topology, leaves, pairwise_sharpness))


def smallest_change(
    log_odds: Float[ndarray, " N"],
    topology: Topology,
    leaves: Int[ndarray, " m"],
    pairwise_sharpness: float | None = None,
) -> tuple[Flip, ...]:
    """Find the smallest change with which one of these leaves becomes the end of the greedy path."""
    nodes, goes_right = topology.paths[leaves], topology.goes_right[leaves]
    odds = log_odds.astype(np.float64)[nodes]
    # p > 0.5 goes right, so 0.5 itself goes left.
    wrong = np.where(goes_right, odds <= 0, odds > 0) & (nodes >= 0)
    change = np.where(wrong, MARGIN + np.abs(odds), 0.0)
    best = int(change.sum(axis=1).argmin())
    flips = []
    for i in np.flatnonzero(change[best]):
        node, before, by, nearer = int(nodes[best, i]), float(odds[best, i]), float(change[best, i]), None
        to_right = before <= 0
        if pairwise_sharpness is not None:  # log-odds are γ·(d_left − d_right)
            sides = (node, node + topology.n_nodes)
            prototype, sibling = sides if to_right else sides[::-1]
            nearer = Nearer(prototype, sibling, by / pairwise_sharpness)
        after = before + by if to_right else before - by
        p_right, needed = np.exp(-np.logaddexp(0.0, [-before, -after]))
        flips.append(Flip(node, float(p_right), float(needed), nearer))
    return tuple(flips)


def explain_image(
    model: Model,
    image: ImageFile,
    pictures: PrototypePictures | None = None,
    *,
    name: str | None = None,
    label: int | None = None,
    attribution: bool = False,
    occlusion: bool = False,
    notes: Mapping[int, str] | None = None,
    histograms: Mapping[int, DecisionHistogram] | None = None,
    network: Network | None = None,
) -> DecisionExplanation:
    """Explain how a tree decides about one image, and what the runner-up would have needed.

    A run also provides the pictures of its prototypes, its notes and, if they were counted, the histograms of its
    nodes. Without options it costs one forward pass and the pictures. `attribution` also finds what each similarity on
    the path depends on and tests every box by occluding it (about 15 passes per prototype on the path); `occlusion`
    takes 49 more. For many images, pass the tree's own network in its fastest form as `network`.

    Examples:
        >>> decision = explain_image("runs/photos", "bird.jpg")
        >>> len(decision.paths["greedy"].steps) >= 1, len(decision.class_probs)
        (True, 3)
    """
    if pictures is not None and isinstance(model, ProtoTree):
        explainer = Explainer(model.eval(), pictures)
    else:
        explainer = Explainer.open(model)
    explainer = replace(
        explainer,
        pictures=pictures or explainer.pictures,
        notes=explainer.notes if notes is None else notes,
        histograms=explainer.histograms if histograms is None else histograms,
        network=network,
    )
    return explainer.explain(image, name=name, label=label, attribution=attribution, occlusion=occlusion)


def open_explainers(models: Sequence[Model], data: str | Path | None = None) -> list[Explainer]:
    """Open trees that explain together; refuses those that do not fit together."""
    explainers = [Explainer.open(model, data) for model in models]
    Ensemble([explainer.tree for explainer in explainers])
    return explainers


def explain_decision(
    explainers: Sequence[Explainer],
    image: ImageFile,
    *,
    label: int | None = None,
    attribution: bool = False,
    occlusion: bool = False,
) -> DecisionExplanation | EnsembleExplanation:
    """Explain the decision of one tree, or of several with the mean of what they say in an ensemble."""
    decisions = tuple(
        explainer.explain(image, label=label, attribution=attribution, occlusion=occlusion) for explainer in explainers
    )
    if len(decisions) == 1:
        return decisions[0]
    mean = np.mean([decision.ensemble_probs for decision in decisions], axis=0)
    return EnsembleExplanation(decisions, tuple(mean.tolist()))


def class_of_folder(path: Path, class_names: Sequence[str]) -> int | None:
    """Look up the true class of an image that lies in a folder named after it, as training data does; else None."""
    folder = path.resolve().parent.name
    names = [folder, *readable_names([folder])]
    return next((class_names.index(name) for name in names if name in class_names), None)
