"""ProtoTree: an image's features go through a soft binary tree of prototypes to a class distribution (§3, Fig. 4).

Notation used for tensor shapes: B batch, D prototype depth, H W feature map, N internal nodes, P prototypes (one or two
a node, see `questions`), L leaves, K classes.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor, nn

from prototree.backbones.backbone import FeatureExtractor
from prototree.backbones.crops import FULL_ONLY, Crops, checked, patch_grid
from prototree.backbones.geometry import PatchGrid
from prototree.backbones.preprocessing import Preprocessing
from prototree.core import leaves, routing
from prototree.core.confidence import Calibration, distance_ratio, margin
from prototree.core.nodes import PAPER, NodeFunction
from prototree.core.patches import NearestPatches, extract_patches, is_exporting, nearest_patches
from prototree.core.routing import DecisionPath
from prototree.core.strategies import Strategy
from prototree.core.topology import Topology
from prototree.errors import ShapeError

# Up to this many prototypes a level, one matrix product with all of them beats subtractions on each level (measured
# with batches of 16; for a single image the subtractions always win).
_FEW_A_LEVEL = 40


@dataclass(frozen=True)
class PrototypeSource:
    """The training patch that a projected prototype comes from (Eq. 6).

    Examples:
        >>> source = prototree.load("runs/photos").sources[0]
        >>> source.image.endswith(".png"), len(source.patch), len(source.box), source.distance < 1e-5
        (True, 2, 4, True)
    """

    image: str  # relative to the data's root
    label: int
    view: str  # which crop of the photo the network saw
    patch: tuple[int, int]  # row and column in the feature map
    box: tuple[float, float, float, float]  # left, top, right, bottom in the photo's own pixels
    distance: float  # from the learned prototype to this patch
    region: tuple[float, float, float, float] | None = None  # of the photo that the view showed; None: all of it
    flip: bool = False  # whether the view was mirrored
    shown: tuple[float, float, float, float] | None = None  # around the middle of the match, where it was looked for


@dataclass(frozen=True)
class TreeOutput:
    """A batch that has gone through the tree.

    Examples:
        >>> routed = tree.route(maps)  # maps: B×D×H×W
        >>> routed.distance.shape, routed.log_path_probs.shape, routed.p_right.shape  # B×P, B×L, B×N
        (torch.Size([2, 3]), torch.Size([2, 4]), torch.Size([2, 3]))
    """

    distance: Float[Tensor, "B P"]  # of each prototype to the nearest patch
    patch: Int[Tensor, "B P"]  # which one that is, row-major in the map of patches
    log_path_probs: Float[Tensor, "B L"]
    p_right: Float[Tensor, "B N"]  # Eq. 2: the probability of going right at each node, without gradient


@dataclass(frozen=True)
class LeafTable:
    """The class distribution of every leaf, and its most probable class."""

    probs: Float[Tensor, "L K"]
    labels: Int[Tensor, " L"]


@dataclass(frozen=True)
class TreePrediction:
    """What the tree decides for a batch, by each of the three strategies (§5.3).

    Examples:
        >>> decisions = tree.predict(torch.rand(2, 3, 64, 64))  # a tree of 3 classes and height 2
        >>> decisions.soft.shape, decisions.confidence.shape  # B×K, B
        (torch.Size([2, 3]), torch.Size([2]))
        >>> decisions.labels("greedy").shape, decisions.greedy.nodes.shape  # B, B×height
        (torch.Size([2]), torch.Size([2, 2]))
    """

    soft: Float[Tensor, "B K"]
    max_path: DecisionPath
    greedy: DecisionPath
    leaf_probs: Float[Tensor, "L K"]
    margin: Float[Tensor, " B"]  # of the greedy answer over the best other one
    confidence: Float[Tensor, " B"]  # that the greedy answer is right
    distance_ratio: Float[
        Tensor, "B height"
    ]  # distance found at each turn of the greedy path, where 1 is usual; 0: unknown
    ood_score: Float[Tensor, " B"]  # the greatest of them
    is_known: Bool[Tensor, " B"]  # whether the tree gives an answer at all

    def class_probs(self, strategy: Strategy = "soft") -> Float[Tensor, "B K"]:
        """Class probabilities: of the whole tree, or of the one leaf the path ends in."""
        return self.soft if strategy == "soft" else self.leaf_probs[self.path(strategy).leaf]

    def labels(self, strategy: Strategy = "soft") -> Int[Tensor, " B"]:
        """The most probable class."""
        return self.class_probs(strategy).argmax(dim=1)

    def path(self, strategy: Strategy) -> DecisionPath:
        """The path through the tree; the soft strategy has none."""
        if strategy == "soft":
            raise ShapeError("expected strategy 'max_path' or 'greedy', got 'soft', which takes every path")
        return self.max_path if strategy == "max_path" else self.greedy


class ProtoTree(nn.Module):
    """A soft decision tree. Each node compares the nearest patches of an image with its prototypes.

    Examples:
        >>> features = FeatureExtractor(Backbone("resnet18", None, image_size=64), prototype_dim=16)
        >>> tree = ProtoTree(Topology.full(height=2), features, ["cat", "dog", "owl"]).eval()
        >>> tree.prototypes.shape, tree.leaf_logits.shape  # N×D×1×1, L×K
        (torch.Size([3, 16, 1, 1]), torch.Size([4, 3]))
        >>> tree.predict(torch.rand(2, 3, 64, 64)).labels("greedy").shape
        torch.Size([2])
    """

    reach: Float[Tensor, " P"]
    distance_p95: Float[Tensor, " turns"]

    def __init__(
        self,
        topology: Topology,
        features: FeatureExtractor,
        class_names: Sequence[str] | int,
        prototype_size: tuple[int, int] = (1, 1),
        generator: torch.Generator | None = None,
        question: NodeFunction = PAPER,
    ) -> None:
        super().__init__()
        names = [str(k) for k in range(class_names)] if isinstance(class_names, int) else class_names
        if len(names) < 2:
            raise ShapeError(f"expected at least 2 classes, got {len(names)}; a tree that knows one decides nothing")
        self.topology = topology
        self.features = features
        self.class_names = tuple(names)
        self.preprocessing: Preprocessing = features.backbone.preprocessing
        self.question = question
        self.calibration = Calibration()
        n_prototypes = question.patches_each * topology.n_nodes
        self.sources: tuple[PrototypeSource | None, ...] = (None,) * n_prototypes
        shape = (n_prototypes, features.prototype_dim, *_checked_size(prototype_size, features.backbone.map_size))
        self.prototypes = nn.Parameter(0.5 + 0.1 * torch.randn(shape, generator=generator))
        self.register_buffer("reach", torch.ones(n_prototypes))  # in units of ln 2
        # How far photos that turn right, then those that turn left, usually are at each node; 0: not known.
        self.register_buffer("distance_p95", torch.zeros(2 * topology.n_nodes))
        # c of Eq. 4–5: trained without gradients, uniform at the start.
        self.leaf_logits = nn.Parameter(torch.zeros(topology.n_leaves, len(names)), requires_grad=False)

    @property
    def n_classes(self) -> int:
        return self.leaf_logits.shape[1]

    @property
    def n_prototypes(self) -> int:
        return len(self.prototypes)

    def node_of(self, prototype: int) -> tuple[int, bool]:
        """The node that a prototype belongs to, and whether it is the one of the right side."""
        return prototype % self.topology.n_nodes, prototype < self.topology.n_nodes

    def prototypes_of(self, nodes: Int[ndarray, " n"]) -> Int[ndarray, " p"]:
        """The prototypes of some nodes: all right ones, then all left ones."""
        return np.concatenate([nodes + side * self.topology.n_nodes for side in range(self.question.patches_each)])

    def similarity(
        self, distance: Float[Tensor, "*pairs p"], prototypes: Sequence[int] | None = None
    ) -> Float[Tensor, "*pairs p"]:
        """The similarity of patches at these distances; the last dimension is all prototypes, or those named."""
        reach = self.reach if prototypes is None else self.reach[list(prototypes)]
        return self.question.similarity(distance, reach)

    @property
    def grid(self) -> PatchGrid:
        """Where in the network's input the patches lie that prototypes are compared with."""
        backbone, patch = self.features.backbone, (self.prototypes.shape[2], self.prototypes.shape[3])
        return patch_grid(backbone.map_size, self.preprocessing.size, backbone.crops, patch)

    def look(self, crops: Crops) -> "ProtoTree":
        """Sets which parts of every picture the tree looks at from now on (`network.crops`)."""
        if checked(crops) != FULL_ONLY and tuple(self.prototypes.shape[2:]) != (1, 1):
            raise ShapeError(
                f"expected prototypes of one cell in a tree that looks {len(crops)} times, because larger ones would "
                f"reach from one look into another; got {self.prototypes.shape[2]}×{self.prototypes.shape[3]} cells"
            )
        features, backbone = copy.copy(self.features), copy.copy(self.features.backbone)  # others may share them
        features._modules = dict(self.features._modules)
        features.backbone, backbone.crops = backbone, crops
        self.features = features
        return self

    def forward(self, images: Float[Tensor, "B 3 h w"]) -> TreeOutput:
        """Images through the network and the tree."""
        if images.dim() != 4 or images.shape[1] != 3 or not images.shape[0]:
            raise ShapeError(f"expected a non-empty batch of images B×3×h×w, got {tuple(images.shape)}")
        return self.route(self.features(images))

    def route(
        self, feature_map: Float[Tensor, "B D H W"], prototypes: Float[Tensor, "P D H1 W1"] | None = None
    ) -> TreeOutput:
        """Sends feature maps through the tree (Eq. 1–3), with its own prototypes or others."""
        prototypes = self.prototypes if prototypes is None else prototypes
        expected = self.features.prototype_dim
        if feature_map.dim() != 4 or feature_map.shape[1] != expected or not feature_map.shape[0]:
            raise ShapeError(f"expected non-empty feature maps B×{expected}×H×W, got {tuple(feature_map.shape)}")
        with torch.autocast(feature_map.device.type, enabled=False):  # distances stay in full precision
            nearest = nearest_patches(feature_map.to(self.prototypes.dtype), prototypes.to(self.prototypes.dtype))
            return self.routed(nearest)

    def routed(
        self, nearest: NearestPatches, question: NodeFunction | None = None, reach: Float[Tensor, " P"] | None = None
    ) -> TreeOutput:
        """Eq. 2–3 from the distances to all prototypes, with the tree's own question and reaches or others."""
        left, right = (question or self.question).log_turns(nearest.distance, self.reach if reach is None else reach)
        log_path_probs = routing.log_path_probs(left, right, self.topology)
        if not is_exporting() and not torch.isfinite(log_path_probs).all():
            raise ShapeError(
                "expected finite features, got NaN or infinity; look for broken input images or a learning rate that "
                "is too high"
            )
        return TreeOutput(nearest.distance, nearest.patch, log_path_probs, right.detach().exp())

    def log_likelihood(self, routed: TreeOutput, target: leaves.Labels | leaves.SoftLabels) -> Float[Tensor, " B"]:
        """Σ_k y_k log ŷ_k of each image; the training loss is minus its mean."""
        return leaves.log_likelihood(routed.log_path_probs, leaves.class_log_probs(self.leaf_logits), target)

    @torch.no_grad()
    def leaf_table(self) -> "LeafTable":
        """What the leaves say, computed once for many batches."""
        leaf_probs = leaves.class_log_probs(self.leaf_logits).exp()
        if not is_exporting() and not torch.isfinite(leaf_probs).all():
            raise ShapeError("expected finite leaves, got NaN or infinity; load the tree again, or train it again")
        return LeafTable(leaf_probs, leaf_probs.argmax(dim=1))

    @torch.no_grad()
    def decide(self, routed: TreeOutput, table: "LeafTable | None" = None) -> TreePrediction:
        """Soft, max-path and greedy decisions from one pass; `table` is the tree's own `leaf_table`."""
        table = table or self.leaf_table()
        p_right, log_path_probs = routed.p_right, routed.log_path_probs
        greedy = routing.greedy_leaves(p_right, self.topology)
        max_path = routing.max_path_leaves(log_path_probs)
        path = routing.path_to(greedy, p_right, self.topology)
        ahead = margin(log_path_probs, greedy, table.labels)
        confidence, apart = self.calibration.of(ahead), distance_ratio(routed.distance, path, self.distance_p95)
        ood_score = apart.amax(dim=1) if apart.shape[1] else torch.zeros_like(confidence)
        return TreePrediction(
            soft=leaves.predict(log_path_probs, table.probs),
            max_path=routing.path_to(max_path, p_right, self.topology),
            greedy=path,
            leaf_probs=table.probs,
            margin=ahead,
            confidence=confidence,
            distance_ratio=apart,
            ood_score=ood_score,
            is_known=self.calibration.knows(confidence, ood_score),
        )

    @torch.no_grad()
    def predict(self, images: Float[Tensor, "B 3 h w"]) -> TreePrediction:
        """Decisions for a batch of preprocessed images. Put the tree in `eval()` mode first."""
        return self.decide(self(images))

    @torch.no_grad()
    def follow(self, feature_map: Float[Tensor, "B D H W"]) -> DecisionPath:
        """Only the greedy path; if that is faster, only the prototypes on it are compared."""
        n_nodes, n_levels = self.topology.n_nodes, len(self.topology.levels)
        if not n_nodes or (len(feature_map) > 1 and n_nodes <= _FEW_A_LEVEL * n_levels):
            p_right = self.route(feature_map).p_right
            return routing.path_to(routing.greedy_leaves(p_right, self.topology), p_right, self.topology)
        size = (self.prototypes.shape[2], self.prototypes.shape[3])
        patches = extract_patches(feature_map.to(self.prototypes.dtype), size)
        prototypes, sides = self.prototypes.flatten(1), range(self.question.patches_each)

        def right_at(node: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
            own = torch.stack([node + side * n_nodes for side in sides], dim=1)  # B, one or two
            apart = torch.linalg.vector_norm(patches[:, :, None] - prototypes[own][:, None], dim=3).amin(dim=1)
            # Images are told apart here, not nodes: each has its own node's prototypes and reaches.
            turns = [self.question.log_turns(d[None], r)[1] for d, r in zip(apart, self.reach[own], strict=True)]
            return torch.cat(turns)[:, 0].exp()

        start = torch.zeros(len(feature_map), dtype=torch.long, device=feature_map.device)
        return routing.follow_greedily(start, right_at, self.topology)

    def with_topology(self, topology: Topology, nodes: Int[ndarray, " n"], leaf_ids: Int[ndarray, " m"]) -> "ProtoTree":
        """A new tree of some of this one's nodes and leaves. The feature extractor is shared, the rest copied."""
        tree = copy.copy(self)
        tree._parameters, tree._buffers = dict(self._parameters), dict(self._buffers)
        tree.topology = topology
        kept = self.prototypes_of(nodes)
        tree.sources = tuple(self.sources[prototype] for prototype in kept)
        tree.prototypes = nn.Parameter(self.prototypes.detach()[kept].clone())
        tree.reach = self.reach[kept].clone()
        tree.distance_p95 = self.distance_p95[np.concatenate([nodes, nodes + self.topology.n_nodes])].clone()
        tree.leaf_logits = nn.Parameter(self.leaf_logits.detach()[leaf_ids].clone(), requires_grad=False)
        return tree


def _checked_size(size: tuple[int, int], map_size: tuple[int, int]) -> tuple[int, int]:
    if not (1 <= size[0] <= map_size[0] and 1 <= size[1] <= map_size[1]):
        raise ShapeError(
            f"expected prototypes no larger than the feature map {map_size}, got {size}; use smaller prototypes, "
            "larger images or a finer feature level"
        )
    return size
