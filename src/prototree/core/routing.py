"""How an image goes through the tree: path probabilities in log space and the three strategies (Eq. 2–4, §5.3).

Notation used for tensor shapes: B batch, N internal nodes, L leaves, `height` edges on the longest path.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from prototree.core.topology import Topology


def log_path_probs(
    log_left: Float[Tensor, "B N"], log_right: Float[Tensor, "B N"], topology: Topology
) -> Float[Tensor, "B L"]:
    """Eq. 3: the log-probability of arriving in each leaf, one level of the tree at a time."""
    # Children interleaved as l0 r0 l1 r1 …, so that a level's children are one slice.
    edges = torch.stack([log_left, log_right], dim=2)  # B N 2
    arriving = log_right.new_zeros(log_right.shape[0], 1)  # the root's log-probability is 0
    leaves = [] if topology.n_nodes else [arriving]
    for level in topology.levels:
        children = (arriving[:, :, None] + edges[:, level.nodes]).flatten(1)
        arriving = _pick(children, level.inner)
        leaves.append(_pick(children, level.outer))
    return torch.cat(leaves, dim=1)


RightAt = Callable[[Int[Tensor, " B"]], Float[Tensor, " B"]]
"""The probability of each image to go right at its own node."""


def greedy_leaves(p_right: Float[Tensor, "B N"], topology: Topology) -> Int[Tensor, " B"]:
    """§5.3, second strategy: at each node right if p_right > 0.5, else left."""
    start = torch.zeros(p_right.shape[0], dtype=torch.long, device=p_right.device)
    return _descend(start, lambda at: p_right.gather(1, at[:, None])[:, 0], topology)[0]


def follow_greedily(start: Int[Tensor, " B"], right_at: RightAt, topology: Topology) -> "DecisionPath":
    """The greedy path, asking only the nodes that lie on it. `start` is the root for every image."""
    leaf, found = _descend(start, right_at, topology)
    chosen = leaf.cpu().numpy()
    nodes = torch.as_tensor(topology.paths[chosen], device=leaf.device)
    turns = torch.as_tensor(topology.goes_right[chosen], device=leaf.device)
    return DecisionPath(leaf, nodes, turns, found.masked_fill(nodes < 0, 0))


def _descend(
    at: Int[Tensor, " B"], right_at: RightAt, topology: Topology
) -> tuple[Int[Tensor, " B"], Float[Tensor, "B height"]]:
    """The leaves, and the probability of going right at every step (anything behind the leaf)."""
    # Leaves point to themselves, so that images on short paths wait for the others: ids are N + leaf.
    n_nodes, n_leaves = topology.n_nodes, topology.n_leaves
    ends = torch.arange(n_nodes, n_nodes + n_leaves)
    left, right = (
        torch.cat([torch.where(side >= 0, side, n_nodes + ~side), ends]).to(at.device)
        for side in map(torch.as_tensor, (topology.left.copy(), topology.right.copy()))
    )
    found = []
    for _ in topology.levels:
        found.append(right_at(at.clamp_max(n_nodes - 1)))
        at = torch.where(found[-1] > 0.5, right[at], left[at])
    return at - n_nodes, torch.stack(found, dim=1) if found else torch.zeros(at.shape[0], 0, device=at.device)


def max_path_leaves(log_path_probs: Float[Tensor, "B L"]) -> Int[Tensor, " B"]:
    """§5.3, first strategy: the leaf with the highest path probability (the first one on a tie)."""
    return log_path_probs.argmax(dim=1)


@dataclass(frozen=True)
class DecisionPath:
    """The path of each image to one leaf, padded with −1 and False after the leaf.

    Examples:
        >>> path = tree.predict(torch.rand(2, 3, 64, 64)).greedy
        >>> path.leaf.shape, path.nodes.shape, path.p_right.shape  # B, B×height, B×height
        (torch.Size([2]), torch.Size([2, 2]), torch.Size([2, 2]))
        >>> path.nodes[:, 0].tolist()  # every path begins at the root
        [0, 0]
    """

    leaf: Int[Tensor, " B"]
    nodes: Int[Tensor, "B height"]
    goes_right: Bool[Tensor, "B height"]
    p_right: Float[Tensor, "B height"]  # where a node asks for one patch: the similarity that was found

    @property
    def length(self) -> Int[Tensor, " B"]:
        """How many questions were asked."""
        return (self.nodes >= 0).sum(dim=1)


def path_to(leaf: Int[Tensor, " B"], p_right: Float[Tensor, "B N"], topology: Topology) -> DecisionPath:
    """The nodes on the way to each image's leaf, the turns taken, and the probability of going right at each."""
    chosen = leaf.cpu().numpy()
    nodes = torch.as_tensor(topology.paths[chosen], device=leaf.device)
    turns = torch.as_tensor(topology.goes_right[chosen], device=leaf.device)
    if not topology.n_nodes:
        return DecisionPath(leaf, nodes, turns, p_right.new_zeros(len(leaf), 0))
    found = p_right.gather(1, nodes.clamp_min(0)).masked_fill(nodes < 0, 0)
    return DecisionPath(leaf, nodes, turns, found)


def _pick(children: Float[Tensor, "B n"], positions: Int[ndarray, " m"]) -> Float[Tensor, "B m"]:
    """Columns of `children`; all of them without a copy, which is the case on every level of a full tree."""
    if len(positions) == children.shape[1]:
        return children
    return children[:, torch.as_tensor(positions, device=children.device)]
