"""A tree between two edits, with what is known of every photo. States are never changed; an edit makes a new one.

Notation used for tensor shapes: M photos, P prototypes, L leaves, K classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from prototree.core.model import ProtoTree, PrototypeSource, TreeOutput, TreePrediction
from prototree.core.patches import NearestPatches
from prototree.core.topology import Topology
from prototree.editing.edits import Exclude, Remove, Side
from prototree.errors import EditError


@dataclass(frozen=True, eq=False)
class TreeState:
    """A tree between two edits, with the distance of every photo to every one of its prototypes."""

    tree: ProtoTree
    training: NearestPatches
    feedback: NearestPatches
    leaf_start: Float[Tensor, "L K"]  # what refitting begins with: as trained, or 0 where the photos are others now
    excluded: tuple[Exclude, ...]
    notes: Mapping[int, str]  # by node
    meant: Int[Tensor, " L"]  # the class that a leaf stands for, whatever photos reach it now; -1: theirs

    def expect(self, node: int) -> None:
        """Refuses a number that no node has."""
        n_nodes = self.tree.topology.n_nodes
        if node not in range(n_nodes):
            raise EditError(f"expected a prototype from 0 to {n_nodes - 1}, got {node}")

    def prototype(self, node: int, side: Side = "right") -> int:
        """The number among all prototypes of the one on a side of a node."""
        self.expect(node)
        if side == "right":
            return node
        if self.tree.question.kind != "pairwise":
            raise EditError(
                f"expected the side 'right', got {side!r}: prototype {node} has no left one beside it; only nodes that "
                "compare two prototypes have"
            )
        return node + self.tree.topology.n_nodes

    def words_for(self, prototype: int) -> str:
        """A prototype by its node's number and, where there are two, its side."""
        node, is_right = self.tree.node_of(prototype)
        side = f" ({'right' if is_right else 'left'} side)" if self.tree.question.kind == "pairwise" else ""
        return f"prototype {node}{side}"

    @property
    def leaf_classes(self) -> Int[Tensor, " L"]:
        """What the leaves stand for when the network learns on.

        A patch that somebody put in place of another one of its side asks a better question about the same classes. If
        the network cannot answer it yet, other photos may reach the leaves; they do not say what was meant.
        """
        return torch.where(self.meant < 0, self.tree.leaf_logits.detach().argmax(dim=1).cpu(), self.meant)

    @cached_property
    def decisions(self) -> TreePrediction:
        """What the tree decides for the photos of the feedback."""
        return self.tree.decide(routed(self.tree, self.feedback))


@torch.no_grad()
def with_prototype(
    state: TreeState,
    prototype: int,
    vector: Float[Tensor, "D H W"],
    source: PrototypeSource,
    training: NearestPatches,
    feedback: NearestPatches,
) -> TreeState:
    """With another patch as one prototype. Its reach stays, and leaves below its node are fitted from zero.

    `training` and `feedback` have one column: all photos' distances to the new prototype.
    """
    tree = copied(state.tree)
    tree.prototypes[prototype] = vector
    tree.sources = (*tree.sources[:prototype], source, *tree.sources[prototype + 1 :])
    node, is_right = tree.node_of(prototype)
    return replace(
        state,
        tree=tree,
        meant=_meant_with(state, node, is_right, source.label),
        training=_with_column(state.training, prototype, training),
        feedback=_with_column(state.feedback, prototype, feedback),
        leaf_start=_emptied(state.leaf_start, tree.topology, node),
    )


def with_reach(state: TreeState, prototype: int, reach: float) -> TreeState:
    """With another reach of one prototype."""
    tree = copied(state.tree)
    tree.reach[prototype] = reach
    return replace(state, tree=tree)


def without_node(state: TreeState, edit: Remove) -> TreeState:
    """One of a node's subtrees takes its place."""
    topology = state.tree.topology
    if topology.n_nodes == 1:
        raise EditError("expected at least one node to be left; a tree that is a single leaf decides nothing")
    kept = int((topology.left if edit.keep == "left" else topology.right)[edit.node])
    smaller, nodes, leaf_ids = _spliced(topology, edit.node, kept)
    if smaller.n_nodes == 0:
        raise EditError("expected at least one node to be left; keep the other side")
    columns = state.tree.prototypes_of(nodes)
    return replace(
        state,
        tree=state.tree.with_topology(smaller, nodes, leaf_ids),
        training=NearestPatches(state.training.distance[:, columns], state.training.patch[:, columns]),
        feedback=NearestPatches(state.feedback.distance[:, columns], state.feedback.patch[:, columns]),
        leaf_start=_emptied(state.leaf_start, topology, kept)[leaf_ids],
        meant=state.meant.masked_fill(_below(topology, kept), -1)[leaf_ids],
        notes={new: state.notes[old] for new, old in enumerate(nodes.tolist()) if old in state.notes},
    )


def routed(tree: ProtoTree, nearest: NearestPatches) -> TreeOutput:
    """Photos through the tree, from their distances."""
    with torch.no_grad():
        return tree.routed(nearest)


def copied(tree: ProtoTree) -> ProtoTree:
    """The same tree, to be changed; the network is shared."""
    topology = tree.topology
    return tree.with_topology(topology, np.arange(topology.n_nodes), np.arange(topology.n_leaves))


def _spliced(topology: Topology, node: int, kept: int) -> tuple[Topology, Int[ndarray, " n"], Int[ndarray, " m"]]:
    """The tree with one child of a node in its place, with the old number of each node and leaf."""
    left, right = topology.left.tolist(), topology.right.tolist()
    for side in (left, right):
        side[:] = [kept if child == node else child for child in side]
    return Topology.from_children(left, right, root=kept if node == 0 else 0)


def _with_column(nearest: NearestPatches, index: int, column: NearestPatches) -> NearestPatches:
    distance, patch = nearest.distance.clone(), nearest.patch.clone()
    distance[:, index], patch[:, index] = column.distance[:, 0], column.patch[:, 0]
    return NearestPatches(distance, patch)


def _meant_with(state: TreeState, node: int, is_right: bool, label: int) -> Int[Tensor, " L"]:
    """Leaves keep what they stand for if the new patch is of a class on its side; else the photos say it."""
    topology = state.tree.topology
    on_side = torch.from_numpy(((topology.paths == node) & (topology.goes_right == is_right)).any(axis=1))
    if label in state.leaf_classes[on_side].tolist():
        return state.meant
    return state.meant.masked_fill(_below(topology, node), -1)


def _emptied(leaf_start: Float[Tensor, "L K"], topology: Topology, node: int) -> Float[Tensor, "L K"]:
    """With nothing in the leaves below a node, or in one leaf, given as `~leaf`."""
    return leaf_start.masked_fill(_below(topology, node)[:, None], 0.0)


def _below(topology: Topology, node: int) -> Bool[Tensor, " L"]:
    """The leaves below a node, or one leaf, given as `~leaf`."""
    is_below = np.arange(topology.n_leaves) == ~node if node < 0 else (topology.paths == node).any(axis=1)
    return torch.from_numpy(is_below)
