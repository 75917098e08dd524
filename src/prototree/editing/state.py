"""The tree between two edits, with cached distances of all images. States are immutable; an edit makes a new one.

Notation used for tensor shapes: M images, L leaves, K classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prototree.core.model import NearestPatches, ProtoTree, PrototypeSource, TreePrediction
from prototree.core.topology import STRATEGIES, Topology
from prototree.editing.edits import Exclude, Remove, Side
from prototree.errors import EditError


class UnknownNodeError(EditError):
    """A node that the tree does not have."""


@dataclass(frozen=True)
class EditMetrics:
    """Metrics of a tree on the validation images."""

    n_images: int
    accuracy: dict[str, float]  # by strategy
    fidelity: dict[str, float]  # agreement of a hard strategy with soft
    path_length: dict[str, float]  # mean number of nodes on the path
    n_prototypes: int


@dataclass(frozen=True, eq=False)
class TreeState:
    """A tree between two edits, with the distance of every image to each of its prototypes."""

    tree: ProtoTree
    training: NearestPatches
    validation: NearestPatches
    leaf_start: Float[Tensor, "L K"]  # where refitting begins: as trained, or 0 in leaves that other images reach now
    excluded: tuple[Exclude, ...]
    notes: Mapping[int, str]  # by node
    intended_classes: Int[Tensor, " L"]  # the class a leaf stands for; -1: the majority of the images that reach it

    def check_node(self, node: int) -> None:
        """Refuse the index of a node that the tree does not have."""
        n_nodes = self.tree.topology.n_nodes
        if node not in range(n_nodes):
            raise UnknownNodeError(
                f"expected a question from 1 to {n_nodes} (index 0 to {n_nodes - 1}), got {node + 1}"
            )

    def prototype_row(self, node: int, side: Side = "right") -> int:
        """Return the row of a node's prototype in the tensor of all prototypes."""
        self.check_node(node)
        if side == "left" and self.tree.node_function.kind == "pairwise":
            return node + self.tree.topology.n_nodes
        if side != "right":
            raise EditError(f"expected the side 'right' (or 'left' of a pairwise node) for {node + 1}, got {side!r}")
        return node

    @property
    def leaf_classes(self) -> Int[Tensor, " L"]:
        """The class each leaf is trained towards by fine-tuning.

        Replacing a prototype by a patch of the same side does not change which classes its subtree is to separate,
        even if the network cannot separate them yet and other images reach the leaves for now.
        """
        majority = self.tree.leaf_logits.detach().argmax(dim=1).cpu()
        return torch.where(self.intended_classes < 0, majority, self.intended_classes)

    @cached_property
    def prediction(self) -> TreePrediction:
        """Predictions for the validation images, from the cached distances."""
        with torch.no_grad():
            return self.tree.decode(self.tree.forward_distances(self.validation))

    def metrics(self, labels: Int[Tensor, " M"]) -> EditMetrics:
        """Compute metrics on the validation images, given their labels."""
        classes = {strategy: self.prediction.labels(strategy) for strategy in STRATEGIES}
        return EditMetrics(
            n_images=len(labels),
            accuracy={s: int((classes[s] == labels).sum()) / len(labels) for s in STRATEGIES},
            fidelity={s: int((classes[s] == classes["soft"]).sum()) / len(labels) for s in STRATEGIES[1:]},
            path_length={s: float(self.prediction.path(s).length.double().mean()) for s in STRATEGIES[1:]},
            n_prototypes=self.tree.n_prototypes,
        )


@torch.no_grad()
def replace_prototype(
    state: TreeState,
    row: int,
    vector: Float[Tensor, "D H W"],
    source: PrototypeSource,
    training: NearestPatches,
    validation: NearestPatches,
) -> TreeState:
    """Put another patch in one row of the prototypes; the leaves below its node are to be refitted from zero.

    `training` and `validation` have one column, the distances of all images to the new prototype.
    """
    tree = copy_tree(state.tree)
    tree.prototypes[row] = vector
    tree.sources = (*tree.sources[:row], source, *tree.sources[row + 1 :])
    node, is_right = tree.node_of(row)
    topology, intended = tree.topology, state.intended_classes
    is_below = leaves_below(topology, node)
    on_side = torch.from_numpy(((topology.paths == node) & (topology.goes_right == is_right)).any(axis=1))
    if source.label not in state.leaf_classes[on_side].tolist():
        intended = intended.masked_fill(is_below, -1)
    return replace(
        state,
        tree=tree,
        training=_with_column(state.training, row, training),
        validation=_with_column(state.validation, row, validation),
        leaf_start=state.leaf_start.masked_fill(is_below[:, None], 0.0),
        intended_classes=intended,
    )


def remove_node(state: TreeState, edit: Remove) -> TreeState:
    """Put one subtree of a node in its place."""
    topology, node = state.tree.topology, edit.node
    kept = int((topology.left if edit.keep == "left" else topology.right)[node])
    sides = (topology.left.tolist(), topology.right.tolist())
    left, right = ([kept if child == node else child for child in side] for side in sides)
    if topology.n_nodes == 1:
        raise EditError("expected at least one node to be left; a tree that is a single leaf decides nothing")
    smaller, nodes, leaves = Topology.from_children(left, right, root=kept if node == 0 else 0)
    if smaller.n_nodes == 0:
        raise EditError("expected at least one node to be left; keep the other side")
    rows, is_below = state.tree.prototypes_of(nodes), leaves_below(topology, kept)
    return replace(
        state,
        tree=state.tree.with_topology(smaller, nodes, leaves),
        training=NearestPatches(state.training.distance[:, rows], state.training.patch[:, rows]),
        validation=NearestPatches(state.validation.distance[:, rows], state.validation.patch[:, rows]),
        leaf_start=state.leaf_start.masked_fill(is_below[:, None], 0.0)[leaves],
        intended_classes=state.intended_classes.masked_fill(is_below, -1)[leaves],
        notes={new: state.notes[old] for new, old in enumerate(nodes.tolist()) if old in state.notes},
    )


def copy_tree(tree: ProtoTree) -> ProtoTree:
    """Copy a tree so that it can be changed; both share the network."""
    topology = tree.topology
    return tree.with_topology(topology, np.arange(topology.n_nodes), np.arange(topology.n_leaves))


def leaves_below(topology: Topology, node: int) -> Bool[Tensor, " L"]:
    """Mask the leaves below a node, or one leaf, given as `~leaf`."""
    is_below = np.arange(topology.n_leaves) == ~node if node < 0 else (topology.paths == node).any(axis=1)
    return torch.from_numpy(is_below)


def _with_column(nearest: NearestPatches, row: int, column: NearestPatches) -> NearestPatches:
    distance, patch = nearest.distance.clone(), nearest.patch.clone()
    distance[:, row], patch[:, row] = column.distance[:, 0], column.patch[:, 0]
    return NearestPatches(distance, patch)
