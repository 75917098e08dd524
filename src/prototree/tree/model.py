"""ProtoTree: an image's features go through a soft binary tree of prototypes to a class distribution (§3, Fig. 4).

Notation used for tensor shapes: B batch, D prototype depth, H W feature map, N internal nodes, L leaves, K classes.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor, nn

from prototree.errors import ShapeError
from prototree.network.backbone import FeatureExtractor
from prototree.network.geometry import PatchGrid
from prototree.network.preprocessing import Preprocessing
from prototree.tree import leaves, routing
from prototree.tree.patches import extract_patches, nearest_patches
from prototree.tree.routing import Path
from prototree.tree.strategies import Strategy
from prototree.tree.topology import Topology

# Up to this many prototypes a level, one matrix product with all of them beats subtractions on each level (measured
# with batches of 16; for a single image the subtractions always win).
_FEW_A_LEVEL = 40


@dataclass(frozen=True)
class PrototypeSource:
    """The training patch that a prototype is, once projected (Eq. 6)."""

    image: str  # relative to the data's root
    label: int
    view: str  # which crop of the photo the network saw
    patch: tuple[int, int]  # row and column in the feature map
    box: tuple[float, float, float, float]  # left, top, right, bottom in the photo's own pixels
    distance: float  # from the learned prototype to this patch
    region: tuple[float, float, float, float] | None = None  # of the photo that the view showed; None: all of it
    flip: bool = False  # whether the view was mirrored


@dataclass(frozen=True)
class Routed:
    """A batch that has gone through the tree."""

    distance: Float[Tensor, "B N"]  # to the nearest patch
    patch: Int[Tensor, "B N"]  # which one that is, row-major in the map of patches
    log_path_probs: Float[Tensor, "B L"]

    @property
    def similarity(self) -> Float[Tensor, "B N"]:
        """Eq. 2: the probability of going right at each node."""
        return routing.similarity(self.distance)


@dataclass(frozen=True)
class Decisions:
    """What the tree decides for a batch, by each of the three strategies (§5.3)."""

    soft: Float[Tensor, "B K"]
    max_path: Path
    greedy: Path
    leaf_probs: Float[Tensor, "L K"]

    def class_probs(self, strategy: Strategy = "soft") -> Float[Tensor, "B K"]:
        """Class probabilities: of the whole tree, or of the one leaf the path ends in."""
        return self.soft if strategy == "soft" else self.leaf_probs[self.path(strategy).leaf]

    def labels(self, strategy: Strategy = "soft") -> Int[Tensor, " B"]:
        """The most probable class."""
        return self.class_probs(strategy).argmax(dim=1)

    def path(self, strategy: Strategy) -> Path:
        """The way through the tree; the soft strategy has none."""
        if strategy == "soft":
            raise ShapeError("expected strategy 'max_path' or 'greedy', got 'soft', which takes every path")
        return self.max_path if strategy == "max_path" else self.greedy


class ProtoTree(nn.Module):
    """A soft decision tree whose nodes ask how near the image's best patch comes to a prototype.

    >>> tree = ProtoTree(Topology.full(height=9), FeatureExtractor(Backbone("resnet50")), class_names)
    >>> decisions = tree.predict(images)
    >>> decisions.labels("greedy"), decisions.greedy.nodes, decisions.greedy.similarity
    """

    def __init__(
        self,
        topology: Topology,
        features: FeatureExtractor,
        class_names: Sequence[str] | int,
        prototype_size: tuple[int, int] = (1, 1),
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        names = [str(k) for k in range(class_names)] if isinstance(class_names, int) else class_names
        if len(names) < 2:
            raise ShapeError(f"expected at least 2 classes, got {len(names)}; a tree that knows one decides nothing")
        self.topology = topology
        self.features = features
        self.class_names = tuple(names)
        self.preprocessing: Preprocessing = features.backbone.preprocessing
        self.sources: tuple[PrototypeSource | None, ...] = (None,) * topology.n_nodes
        shape = (topology.n_nodes, features.depth, *_checked_size(prototype_size, features.backbone.map_size))
        self.prototypes = nn.Parameter(0.5 + 0.1 * torch.randn(shape, generator=generator))
        # c of Eq. 4–5: trained without gradients, uniform at the start.
        self.leaf_logits = nn.Parameter(torch.zeros(topology.n_leaves, len(names)), requires_grad=False)

    @property
    def n_classes(self) -> int:
        return self.leaf_logits.shape[1]

    @property
    def grid(self) -> PatchGrid:
        """Where the patches that prototypes are compared with lie in the network's input."""
        (rows, columns), (height, width) = self.features.backbone.map_size, self.prototypes.shape[2:]
        return PatchGrid(rows, columns, self.preprocessing.size, height, width)

    def forward(self, images: Float[Tensor, "B 3 h w"]) -> Routed:
        """Images through the network and the tree."""
        if images.dim() != 4 or images.shape[1] != 3 or not len(images):
            raise ShapeError(f"expected a non-empty batch of images B×3×h×w, got {tuple(images.shape)}")
        return self.route(self.features(images))

    def route(
        self, feature_map: Float[Tensor, "B D H W"], prototypes: Float[Tensor, "N D H1 W1"] | None = None
    ) -> Routed:
        """Ready feature maps through the tree (Eq. 1–3), with its own prototypes or others in their place."""
        prototypes = self.prototypes if prototypes is None else prototypes
        expected = self.features.depth
        if feature_map.dim() != 4 or feature_map.shape[1] != expected or not len(feature_map):
            raise ShapeError(f"expected non-empty feature maps B×{expected}×H×W, got {tuple(feature_map.shape)}")
        with torch.autocast(feature_map.device.type, enabled=False):  # distances stay in full precision
            nearest = nearest_patches(feature_map.to(self.prototypes.dtype), prototypes.to(self.prototypes.dtype))
            log_path_probs = routing.log_path_probs(nearest.distance, self.topology)
        if not torch.isfinite(log_path_probs).all():
            raise ShapeError(
                "expected finite features, got NaN or infinity; look for broken input images or a learning rate that "
                "is too high"
            )
        return Routed(nearest.distance, nearest.patch, log_path_probs)

    def log_likelihood(self, routed: Routed, target: leaves.Labels | leaves.SoftLabels) -> Float[Tensor, " B"]:
        """Σ_k y_k log ŷ_k of each image; the training loss is minus its mean."""
        return leaves.log_likelihood(routed.log_path_probs, leaves.class_log_probs(self.leaf_logits), target)

    @torch.no_grad()
    def decide(self, routed: Routed) -> Decisions:
        """Soft, max-path and greedy decisions from one pass."""
        leaf_probs = leaves.class_log_probs(self.leaf_logits).exp()
        similarity, log_path_probs = routed.similarity, routed.log_path_probs
        greedy = routing.greedy_leaves(similarity, self.topology)
        max_path = routing.max_path_leaves(log_path_probs)
        return Decisions(
            soft=leaves.predict(log_path_probs, leaf_probs),
            max_path=routing.path_to(max_path, similarity, self.topology),
            greedy=routing.path_to(greedy, similarity, self.topology),
            leaf_probs=leaf_probs,
        )

    @torch.no_grad()
    def predict(self, images: Float[Tensor, "B 3 h w"]) -> Decisions:
        """Decisions for a batch of preprocessed images. Put the tree in `eval()` mode first."""
        return self.decide(self(images))

    @torch.no_grad()
    def follow(self, feature_map: Float[Tensor, "B D H W"]) -> Path:
        """The greedy path alone; where that is faster, only the prototypes on it are compared."""
        n_nodes, n_levels = self.topology.n_nodes, len(self.topology.levels)
        if not n_nodes or (len(feature_map) > 1 and n_nodes <= _FEW_A_LEVEL * n_levels):
            similarity = self.route(feature_map).similarity
            return routing.path_to(routing.greedy_leaves(similarity, self.topology), similarity, self.topology)
        size = (self.prototypes.shape[2], self.prototypes.shape[3])
        patches = extract_patches(feature_map.to(self.prototypes.dtype), size)
        prototypes = self.prototypes.flatten(1)

        def similarity_at(node: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
            distance = torch.linalg.vector_norm(patches - prototypes[node][:, None], dim=2).amin(dim=1)
            return routing.similarity(distance)

        start = torch.zeros(len(feature_map), dtype=torch.long, device=feature_map.device)
        return routing.follow_greedily(start, similarity_at, self.topology)

    def with_topology(self, topology: Topology, nodes: Int[ndarray, " n"], leaf_ids: Int[ndarray, " m"]) -> "ProtoTree":
        """A new tree of some of this one's nodes and leaves. The feature extractor is shared, the rest copied."""
        tree = copy.copy(self)
        tree._parameters = dict(self._parameters)
        tree.topology = topology
        tree.sources = tuple(self.sources[node] for node in nodes)
        tree.prototypes = nn.Parameter(self.prototypes.detach()[nodes].clone())
        tree.leaf_logits = nn.Parameter(self.leaf_logits.detach()[leaf_ids].clone(), requires_grad=False)
        return tree


def _checked_size(size: tuple[int, int], map_size: tuple[int, int]) -> tuple[int, int]:
    if not (1 <= size[0] <= map_size[0] and 1 <= size[1] <= map_size[1]):
        raise ShapeError(
            f"expected prototypes no larger than the feature map {map_size}, got {size}; use smaller prototypes, "
            "larger images or a finer feature level"
        )
    return size
