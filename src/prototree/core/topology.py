"""The shape of a binary tree as two integer arrays (§3): the children of each internal node.

A child is a node when not negative, `~leaf` otherwise. Nodes and leaves are numbered level by level from the root, left
to right; the root is node 0 (or, in a tree that is a single leaf, leaf 0).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from jaxtyping import Bool, Int
from numpy import ndarray

from prototree.errors import ShapeError

MAX_HEIGHT = 20  # 2**20 leaves; a full tree beyond that is a mistyped height

Strategy = Literal["soft", "max_path", "greedy"]
"""How to decide (§5.3): all leaves by their path probabilities, the likeliest leaf, or the likelier child each time."""
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
HARD: tuple[Strategy, ...] = ("max_path", "greedy")  # those that follow one path


@dataclass(frozen=True)
class Level:
    """One level of the tree, for computing all paths level by level.

    Interleave the left and right children of `nodes` as l0 r0 l1 r1 …: the children at positions `inner` are, in
    order, the nodes of the next level; those at positions `outer` are, in order, the next leaves.
    """

    nodes: slice
    inner: Int[ndarray, " n"]
    outer: Int[ndarray, " m"]


@dataclass(frozen=True, eq=False)
class Topology:
    """A binary tree with N internal nodes and L = N + 1 leaves."""

    left: Int[ndarray, " N"]
    right: Int[ndarray, " N"]

    def __post_init__(self) -> None:
        if self.left.shape != self.right.shape:
            raise ShapeError(f"expected as many left as right children, got {self.left.shape}, {self.right.shape}")
        children = self._children
        nodes, leaves = children[children >= 0], ~children[children < 0]
        n_leaves = self.n_leaves if self.n_nodes else 0
        if not (np.array_equal(nodes, np.arange(1, self.n_nodes)) and np.array_equal(leaves, np.arange(n_leaves))):
            raise ShapeError("expected children numbered level by level, left to right; use Topology.from_children")
        if (nodes <= np.nonzero(children >= 0)[0] // 2).any():
            raise ShapeError("expected every node below the root to be reachable from it; the children form a cycle")
        for array in (self.left, self.right):
            array.setflags(write=False)

    @classmethod
    def full(cls, height: int) -> "Topology":
        """The tree that training starts from: 2^h leaves, 2^h − 1 nodes."""
        if not 1 <= height <= MAX_HEIGHT:
            raise ShapeError(f"expected a height from 1 to {MAX_HEIGHT}, got {height}; ⌈log₂K⌉ + 1 is a good start")
        n_nodes = 2**height - 1
        children = np.arange(1, 2 * n_nodes + 1)
        children = np.where(children < n_nodes, children, ~(children - n_nodes))
        return cls(children[0::2].copy(), children[1::2].copy())

    @classmethod
    def from_children(
        cls, left: Sequence[int], right: Sequence[int], root: int = 0
    ) -> tuple["Topology", Int[ndarray, " N"], Int[ndarray, " L"]]:
        """Any numbering → level order, with the old id of each new node and of each new leaf."""
        nodes, leaves = [], []
        queue = [root]
        for child in queue:  # grows while it is read: breadth first
            if child < 0:
                leaves.append(~child)
            else:
                nodes.append(child)
                queue += (left[child], right[child])
                if len(nodes) > len(left):
                    raise ShapeError("expected a tree, got children that form a cycle or share a child")
        new_id = {node: i for i, node in enumerate(nodes)} | {~leaf: ~i for i, leaf in enumerate(leaves)}
        children = [np.array([new_id[side[node]] for node in nodes], dtype=np.int64) for side in (left, right)]
        return cls(*children), np.array(nodes, dtype=np.int64), np.array(leaves, dtype=np.int64)

    def keep_leaves(self, kept: Bool[ndarray, " L"]) -> tuple["Topology", Int[ndarray, " n"], Int[ndarray, " m"]]:
        """The tree without the other leaves and needless nodes (§5.1), and the old ids of its nodes and leaves."""
        if not kept.any():
            raise ShapeError("expected at least one leaf to keep, got none")
        gone = self.n_nodes + 1 + self.n_leaves  # an id no child has
        left, right = self.left.copy(), self.right.copy()
        stands_for = np.arange(self.n_nodes)  # what is left of the subtree below each node
        for node in reversed(range(self.n_nodes)):  # children before parents
            for side in (left, right):
                child = side[node]
                side[node] = stands_for[child] if child >= 0 else (child if kept[~child] else gone)
            if left[node] == gone or right[node] == gone:
                stands_for[node] = right[node] if left[node] == gone else left[node]
        root = int(stands_for[0]) if self.n_nodes else ~0
        return self.from_children(left.tolist(), right.tolist(), root)

    @property
    def n_nodes(self) -> int:
        return len(self.left)

    @property
    def n_leaves(self) -> int:
        return len(self.left) + 1

    @property
    def height(self) -> int:
        """Edges on the longest path."""
        return len(self.levels)

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        levels, start, stop = [], 0, min(1, self.n_nodes)
        while start < stop:
            children = self._children[2 * start : 2 * stop]
            inner, outer = np.nonzero(children >= 0)[0], np.nonzero(children < 0)[0]
            levels.append(Level(slice(start, stop), inner, outer))
            start, stop = stop, stop + len(inner)
        return tuple(levels)

    @cached_property
    def paths(self) -> Int[ndarray, "L height"]:
        """The nodes on the path to each leaf, root first, padded with −1."""
        return self._walk()[0]

    @cached_property
    def goes_right(self) -> Bool[ndarray, "L height"]:
        """Whether the path to each leaf turns right at each node of `paths` (False in the padding)."""
        return self._walk()[1]

    @cached_property
    def depths(self) -> Int[ndarray, " L"]:
        """Edges from the root to each leaf."""
        depths: ndarray = np.count_nonzero(self.paths >= 0, axis=1)
        return depths

    @property
    def _children(self) -> Int[ndarray, " twoN"]:
        return np.stack([self.left, self.right], axis=1).reshape(-1)

    def _walk(self) -> tuple[Int[ndarray, "L height"], Bool[ndarray, "L height"]]:
        paths = np.full((self.n_leaves, self.height), -1)
        turns = np.zeros((self.n_leaves, self.height), dtype=bool)
        ways: list[list[int]] = [[]] * self.n_nodes  # positions among the children on the way to each node
        for position, child in enumerate(self._children.tolist()):
            way = [*ways[position // 2], position]
            if child >= 0:
                ways[child] = way
            else:
                paths[~child, : len(way)], turns[~child, : len(way)] = np.array(way) // 2, np.array(way) % 2
        return paths, turns
