"""The prototype tree, in the order of the paper: patches and distances, routing, strategies, and `ProtoTree` (§3–5).

Notation used for tensor shapes: B batch, D prototype dimension, H W feature map, E = D·H₁·W₁ numbers in a patch,
N internal nodes, P prototypes (one or two a node), L leaves, K classes, `height` edges on the longest path.
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
from prototree.backbones.crops import FULL_ONLY, Crops, checked_crops, patch_grid
from prototree.backbones.geometry import PatchGrid, Preprocessing
from prototree.core import leaves
from prototree.core.confidence import Calibration, distance_ratio, margin
from prototree.core.nodes import LN2, PAPER, NodeFunction
from prototree.core.topology import Strategy, Topology
from prototree.errors import ShapeError

# While `torch.export` writes down a tree, no step may depend on what an image shows.
is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)

# Squared distances below this are rounding of ‖z‖² + ‖p‖² in double precision: the patch is the prototype.
_ZERO = 1e-12


# ---- patches and their distances to the prototypes (Eq. 1 and 7) -----------------------------------------------------


@dataclass(frozen=True)
class NearestPatches:
    """Per image and prototype: the distance to the nearest patch, and which patch that is (row-major)."""

    distance: Float[Tensor, "B P"]
    patch: Int[Tensor, "B P"]


def extract_patches(feature_map: Float[Tensor, "B D H W"], size: tuple[int, int]) -> Float[Tensor, "B patches E"]:
    """All H₁×W₁ patches of a feature map, row by row, as vectors (§3)."""
    height, width = _checked_size(size, (feature_map.shape[2], feature_map.shape[3]))
    if size == (1, 1):
        return feature_map.flatten(2).transpose(1, 2)
    windows = feature_map.unfold(2, height, 1).unfold(3, width, 1)  # B D H' W' H₁ W₁
    return windows.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


def nearest_patches(
    feature_map: Float[Tensor, "B D H W"], prototypes: Float[Tensor, "P D H1 W1"], *, exact: bool = True
) -> NearestPatches:
    """Eq. 1: the patch of each image that is nearest to each prototype, and its distance.

    Which patch is nearest is decided by ‖z‖² − 2z·p in double precision, without gradient; the distance of the winners
    is measured by subtraction, which is exact and differentiable where ‖z‖² − 2z·p + ‖p‖² cancels. Without `exact` both
    come from the product in the numbers' own precision, which is faster and enough to choose by.
    """
    patches = extract_patches(feature_map, (prototypes.shape[2], prototypes.shape[3]))
    rows, vectors = patches.flatten(0, 1), prototypes.flatten(1)
    with torch.no_grad():
        z, p = (rows.double(), vectors.double()) if exact else (rows, vectors)
        partial = torch.addmm(z.square().sum(1)[:, None], z, p.T, alpha=-2)  # ‖p‖² does not change which is nearest
        lowest, index = partial.view(*patches.shape[:2], len(vectors)).min(dim=1)
    if not exact:
        return NearestPatches(_root(lowest + p.square().sum(1)), index)
    # Not len(index): that is a number to torch.export, and the exported tree would take this batch size alone.
    winners = index + patches.shape[1] * torch.arange(index.shape[0], device=index.device)[:, None]
    nearest = rows.index_select(0, winners.flatten()).view(*index.shape, rows.shape[1])
    return NearestPatches(torch.linalg.vector_norm(nearest - vectors, dim=2), index)


def pair_distances(
    patches: Float[Tensor, "R E"],
    prototypes: Float[Tensor, "P E"],
    row: Int[Tensor, " pairs"],
    prototype: Int[Tensor, " pairs"],
) -> Float[Tensor, " pairs"]:
    """The distance of patch `row[i]` to prototype `prototype[i]`, as exact as in `nearest_patches`."""
    z, p = patches.double(), prototypes.double()
    squared = torch.addmm(z.square().sum(1)[:, None] + p.square().sum(1), z, p.T, alpha=-2)
    return _root(squared[row, prototype]).to(patches.dtype)


def distance_map(
    feature_map: Float[Tensor, "B D H W"], prototypes: Float[Tensor, "P D H1 W1"]
) -> Float[Tensor, "B P H2 W2"]:
    """The distance of every patch to every prototype, by subtraction; its similarity is the map of Eq. 7."""
    size = (prototypes.shape[2], prototypes.shape[3])
    patches = extract_patches(feature_map, size)
    exact = "donot_use_mm_for_euclid_dist"
    distance = torch.cdist(patches, prototypes.flatten(1).expand(len(patches), -1, -1), compute_mode=exact)
    rows, columns = feature_map.shape[2] - size[0] + 1, feature_map.shape[3] - size[1] + 1
    return distance.transpose(1, 2).reshape(*distance.shape[0::2], rows, columns)


def _root(squared: Float[Tensor, "*pairs"]) -> Float[Tensor, "*pairs"]:
    """Square root with a gradient of 0 at 0."""
    is_zero = squared <= _ZERO
    return torch.where(is_zero, 0, torch.where(is_zero, 1, squared).sqrt())


def _checked_size(size: tuple[int, int], map_size: tuple[int, int]) -> tuple[int, int]:
    if not (1 <= size[0] <= map_size[0] and 1 <= size[1] <= map_size[1]):
        raise ShapeError(f"expected prototypes no larger than the feature map {map_size}, got {size}; enlarge images")
    return size


# ---- routing and the strategies (Eq. 3, §5.3) ------------------------------------------------------------------------


def log_path_probs(
    log_left: Float[Tensor, "B N"], log_right: Float[Tensor, "B N"], topology: Topology
) -> Float[Tensor, "B L"]:
    """Eq. 3: the log-probability of arriving in each leaf, one level of the tree at a time."""
    # Children interleaved as l0 r0 l1 r1 …, so that a level's children are one slice.
    edges = torch.stack([log_left, log_right], dim=2)  # B N 2
    arriving = log_right.new_zeros(log_right.shape[0], 1)  # the root's log-probability is 0
    parts = [] if topology.n_nodes else [arriving]
    for level in topology.levels:
        children = (arriving[:, :, None] + edges[:, level.nodes]).flatten(1)
        arriving = _columns(children, level.inner)
        parts.append(_columns(children, level.outer))
    return torch.cat(parts, dim=1)


def _columns(children: Float[Tensor, "B n"], positions: Int[ndarray, " m"]) -> Float[Tensor, "B m"]:
    if len(positions) == children.shape[1]:
        return children  # without a copy, on every level of a full tree
    return children[:, torch.as_tensor(positions, device=children.device)]


def max_path_leaves(log_path_probs: Float[Tensor, "B L"]) -> Int[Tensor, " B"]:
    """§5.3, first strategy: the leaf with the highest path probability (the first one on a tie)."""
    return log_path_probs.argmax(dim=1)


def greedy_leaves(p_right: Float[Tensor, "B N"], topology: Topology) -> Int[Tensor, " B"]:
    """§5.3, second strategy: at each node right if p_right > 0.5, else left."""
    # Leaves point to themselves, so that images on short paths wait for the others: ids are N + leaf.
    n_nodes, device = topology.n_nodes, p_right.device
    ends = torch.arange(n_nodes, n_nodes + topology.n_leaves)
    left, right = (
        torch.cat([torch.where(side >= 0, side, n_nodes + ~side), ends]).to(device)
        for side in map(torch.as_tensor, (topology.left.copy(), topology.right.copy()))
    )
    at = torch.zeros(p_right.shape[0], dtype=torch.long, device=device)
    for _ in topology.levels:
        goes_right = p_right.gather(1, at.clamp_max(n_nodes - 1)[:, None])[:, 0] > 0.5
        at = torch.where(goes_right, right[at], left[at])
    return at - n_nodes


@dataclass(frozen=True)
class DecisionPath:
    """The path of each image to one leaf, padded with −1 and False after the leaf."""

    leaf: Int[Tensor, " B"]
    nodes: Int[Tensor, "B height"]
    goes_right: Bool[Tensor, "B height"]
    p_right: Float[Tensor, "B height"]  # of a presence node: the similarity of the nearest patch

    @classmethod
    def to(cls, leaf: Int[Tensor, " B"], p_right: Float[Tensor, "B N"], topology: Topology) -> "DecisionPath":
        """The path to each image's leaf, with the probability of going right at each of its nodes."""
        chosen = leaf.cpu().numpy()
        nodes = torch.as_tensor(topology.paths[chosen], device=leaf.device)
        goes_right = torch.as_tensor(topology.goes_right[chosen], device=leaf.device)
        if not topology.n_nodes:
            return cls(leaf, nodes, goes_right, p_right.new_zeros(len(leaf), 0))
        return cls(leaf, nodes, goes_right, p_right.gather(1, nodes.clamp_min(0)).masked_fill(nodes < 0, 0))

    @property
    def length(self) -> Int[Tensor, " B"]:
        """The number of nodes on each path."""
        return (self.nodes >= 0).sum(dim=1)


# ---- the tree --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrototypeSource:
    """The training patch that a projected prototype comes from (Eq. 6)."""

    image: str  # relative to the data's root
    label: int
    crop: str  # name of the crop of the image that the network saw
    patch: tuple[int, int]  # row and column in the feature map
    patch_box: tuple[float, float, float, float]  # left, top, right, bottom in the image's own pixels
    distance: float  # from the learned prototype to this patch
    crop_region: tuple[float, float, float, float] | None = None  # of the image that the crop showed; None: all
    flip: bool = False  # whether the crop was mirrored
    display_box: tuple[float, float, float, float] | None = None  # around the middle of the match


@dataclass(frozen=True)
class TreeOutput:
    """A batch that has gone through the tree."""

    distance: Float[Tensor, "B P"]  # of each prototype to the nearest patch
    patch: Int[Tensor, "B P"]  # which one that is, row-major in the map of patches
    log_path_probs: Float[Tensor, "B L"]
    p_right: Float[Tensor, "B N"]  # Eq. 2: the probability of going right at each node, without gradient


@dataclass(frozen=True)
class LeafTable:
    """The class distribution of every leaf, and its most probable class; computed once for many batches."""

    probs: Float[Tensor, "L K"]
    labels: Int[Tensor, " L"]


@dataclass(frozen=True)
class TreePrediction:
    """What the tree predicts for a batch, by each of the three strategies (§5.3)."""

    soft: Float[Tensor, "B K"]
    max_path: DecisionPath
    greedy: DecisionPath
    leaf_probs: Float[Tensor, "L K"]
    margin: Float[Tensor, " B"]  # of the greedy prediction over the best other one
    confidence: Float[Tensor, " B"]  # that the greedy prediction is right
    distance_ratio: Float[Tensor, "B height"]  # at each step of the greedy path, distance / distance_p95; 0: unknown
    ood_score: Float[Tensor, " B"]  # the greatest of them
    abstained: Bool[Tensor, " B"]  # whether the tree gives no answer

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
    """Soft decision tree whose nodes compare the nearest patches of an image with their prototypes (§3).

    Args:
        topology: Children of every node.
        features: Backbone and head that turn images into feature maps.
        class_names: Names of the classes, or how many there are.
        prototype_size: Rows and columns of a prototype, in cells of the feature map.
        generator: Random generator for the initial prototypes.
        node_function: Kind and sharpness of the nodes; by default those of the paper.

    Attributes:
        prototypes: Prototype vectors, P × D × rows × columns.
        leaf_logits: Unnormalised class scores of the leaves, L × K.
        radius: Distance at which the similarity of each prototype is one half.
        distance_p95: 95th percentile of the distance of each side's training images; 0 where it is unknown.
        sources: The training patch that each prototype comes from; None before projection.
        calibration: Turns the margin of a path into a confidence; holds the limits for abstaining.

    Examples:
        >>> from prototree.backbones.backbone import Backbone, FeatureExtractor
        >>> from prototree.core.topology import Topology
        >>> features = FeatureExtractor(Backbone("resnet18", None, image_size=64), prototype_dim=16)
        >>> tree = ProtoTree(Topology.full(height=2), features, ["cat", "dog", "owl"]).eval()
        >>> tree.prototypes.shape, tree.leaf_logits.shape  # N×D×1×1, L×K
        (torch.Size([3, 16, 1, 1]), torch.Size([4, 3]))
        >>> tree.predict(torch.rand(2, 3, 64, 64)).labels("greedy").shape
        torch.Size([2])
    """

    radius: Float[Tensor, " P"]
    distance_p95: Float[Tensor, " sides"]

    def __init__(
        self,
        topology: Topology,
        features: FeatureExtractor,
        class_names: Sequence[str] | int,
        prototype_size: tuple[int, int] = (1, 1),
        generator: torch.Generator | None = None,
        node_function: NodeFunction = PAPER,
    ) -> None:
        super().__init__()
        names = [str(k) for k in range(class_names)] if isinstance(class_names, int) else class_names
        if len(names) < 2:
            raise ShapeError(f"expected at least 2 classes, got {len(names)}; a tree that knows one decides nothing")
        self.topology = topology
        self.features = features
        self.class_names = tuple(names)
        self.preprocessing: Preprocessing = features.backbone.preprocessing
        self.node_function = node_function
        self.calibration = Calibration()
        n_prototypes = node_function.prototypes_per_node * topology.n_nodes
        self.sources: tuple[PrototypeSource | None, ...] = (None,) * n_prototypes
        shape = (n_prototypes, features.prototype_dim, *_checked_size(prototype_size, features.backbone.map_size))
        self.prototypes = nn.Parameter(0.5 + 0.1 * torch.randn(shape, generator=generator))
        self.register_buffer("radius", torch.full((n_prototypes,), LN2))  # where the similarity is one half
        # 95th percentile of the distance of images that go right, then of those that go left, at each node; 0: unknown.
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

    def patch_name(self, prototype: int) -> str:
        """The name that people see of a prototype: `7`, or `7L` and `7R` where question 7 compares two."""
        node, is_right = self.node_of(prototype)
        return f"{node + 1}{'' if self.node_function.prototypes_per_node == 1 else 'R' if is_right else 'L'}"

    def prototypes_of(self, nodes: Int[ndarray, " n"]) -> Int[ndarray, " p"]:
        """The prototypes of some nodes: all right ones, then all left ones."""
        sides = range(self.node_function.prototypes_per_node)
        return np.concatenate([nodes + side * self.topology.n_nodes for side in sides])

    def similarity(
        self, distance: Float[Tensor, "*pairs p"], prototypes: Sequence[int] | None = None
    ) -> Float[Tensor, "*pairs p"]:
        """The similarity of patches at these distances; the last dimension is all prototypes, or those named."""
        radius = self.radius if prototypes is None else self.radius[list(prototypes)]
        return self.node_function.similarity(distance, radius)

    @property
    def grid(self) -> PatchGrid:
        """Where in the network's input the patches lie that prototypes are compared with."""
        backbone, patch = self.features.backbone, (self.prototypes.shape[2], self.prototypes.shape[3])
        return patch_grid(backbone.map_size, self.preprocessing.size, backbone.crops, patch)

    def set_crops(self, crops: Crops) -> "ProtoTree":
        """Set the centre crops of every image that the tree sees from now on (`backbones.crops`)."""
        if checked_crops(crops) != FULL_ONLY and tuple(self.prototypes.shape[2:]) != (1, 1):
            raise ShapeError(f"expected prototypes of one cell with several crops, got {tuple(self.prototypes.shape)}")
        features, backbone = copy.copy(self.features), copy.copy(self.features.backbone)  # others may share them
        features._modules = dict(self.features._modules)
        features.backbone, backbone.crops = backbone, crops
        self.features = features
        return self

    def forward(self, images: Float[Tensor, "B 3 h w"]) -> TreeOutput:
        """Send images through the network and the tree.

        Args:
            images: A batch of preprocessed images.

        Returns:
            Distances, nearest patches, path probabilities, and the probability of going right at each node.
        """
        if images.dim() != 4 or images.shape[1] != 3 or not images.shape[0]:
            raise ShapeError(f"expected a non-empty batch of images B×3×h×w, got {tuple(images.shape)}")
        return self.forward_features(self.features(images))

    def forward_features(
        self, feature_map: Float[Tensor, "B D H W"], prototypes: Float[Tensor, "P D H1 W1"] | None = None
    ) -> TreeOutput:
        """Eq. 1–3: feature maps through the tree, with its own prototypes or others."""
        prototypes = self.prototypes if prototypes is None else prototypes
        expected = self.features.prototype_dim
        if feature_map.dim() != 4 or feature_map.shape[1] != expected or not feature_map.shape[0]:
            raise ShapeError(f"expected non-empty feature maps B×{expected}×H×W, got {tuple(feature_map.shape)}")
        with torch.autocast(feature_map.device.type, enabled=False):  # distances stay in full precision
            nearest = nearest_patches(feature_map.to(self.prototypes.dtype), prototypes.to(self.prototypes.dtype))
            return self.forward_distances(nearest)

    def forward_distances(
        self,
        nearest: NearestPatches,
        node_function: NodeFunction | None = None,
        radius: Float[Tensor, " P"] | None = None,
    ) -> TreeOutput:
        """Eq. 2–3 from the distances to all prototypes, with the tree's own node function and radii or others."""
        node_function, radius = node_function or self.node_function, self.radius if radius is None else radius
        left, right = node_function.log_p_left_right(nearest.distance, radius)
        path_probs = log_path_probs(left, right, self.topology)
        if not is_exporting() and not torch.isfinite(path_probs).all():
            raise ShapeError("expected finite features, got NaN or infinity; the learning rate may be too high")
        return TreeOutput(nearest.distance, nearest.patch, path_probs, right.detach().exp())

    def log_likelihood(self, output: TreeOutput, target: leaves.Labels | leaves.SoftLabels) -> Float[Tensor, " B"]:
        """Σ_k y_k log ŷ_k of each image; the training loss is minus its mean."""
        return leaves.log_likelihood(output.log_path_probs, leaves.class_log_probs(self.leaf_logits), target)

    @torch.no_grad()
    def leaf_table(self) -> LeafTable:
        leaf_probs = leaves.class_log_probs(self.leaf_logits).exp()
        if not is_exporting() and not torch.isfinite(leaf_probs).all():
            raise ShapeError("expected finite leaves, got NaN or infinity; load the tree again, or train it again")
        return LeafTable(leaf_probs, leaf_probs.argmax(dim=1))

    @torch.no_grad()
    def decode(self, output: TreeOutput, table: LeafTable | None = None) -> TreePrediction:
        """Soft, max-path and greedy predictions from one pass; `table` is the tree's own `leaf_table`."""
        table = table or self.leaf_table()
        p_right, path_probs = output.p_right, output.log_path_probs
        greedy = DecisionPath.to(greedy_leaves(p_right, self.topology), p_right, self.topology)
        margins = margin(path_probs, greedy.leaf, table.labels)
        confidence = self.calibration.of(margins)
        ratio = distance_ratio(output.distance, greedy.nodes, greedy.goes_right, self.distance_p95)
        ood_score = ratio.amax(dim=1) if ratio.shape[1] else torch.zeros_like(confidence)
        return TreePrediction(
            soft=leaves.predict(path_probs, table.probs),
            max_path=DecisionPath.to(max_path_leaves(path_probs), p_right, self.topology),
            greedy=greedy,
            leaf_probs=table.probs,
            margin=margins,
            confidence=confidence,
            distance_ratio=ratio,
            ood_score=ood_score,
            abstained=~self.calibration.accepts(confidence, ood_score),
        )

    @torch.no_grad()
    def predict(self, images: Float[Tensor, "B 3 h w"]) -> TreePrediction:
        """Predict a batch of preprocessed images by all three strategies. Put the tree in `eval()` mode first.

        Args:
            images: A batch of preprocessed images.

        Returns:
            Class probabilities, paths, confidence and abstention.
        """
        return self.decode(self(images))

    def with_topology(self, topology: Topology, nodes: Int[ndarray, " n"], leaf_ids: Int[ndarray, " m"]) -> "ProtoTree":
        """A new tree of some of this one's nodes and leaves. The feature extractor is shared, the rest copied."""
        tree = copy.copy(self)
        tree._parameters, tree._buffers = dict(self._parameters), dict(self._buffers)
        tree.topology = topology
        kept = self.prototypes_of(nodes)
        tree.sources = tuple(self.sources[prototype] for prototype in kept)
        tree.prototypes = nn.Parameter(self.prototypes.detach()[kept].clone())
        tree.radius = self.radius[kept].clone()
        tree.distance_p95 = self.distance_p95[np.concatenate([nodes, nodes + self.topology.n_nodes])].clone()
        tree.leaf_logits = nn.Parameter(self.leaf_logits.detach()[leaf_ids].clone(), requires_grad=False)
        return tree
