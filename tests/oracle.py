"""A slow, literal transcription of the paper's equations in float64, for checking the fast code against.

Products and loops as they are written in the paper; no logarithms, no matrix products, no shared code with the package.
"""

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from prototree.core.topology import Topology

Right = Callable[[Tensor, Tensor, int], Tensor]
"""The probability of one map to go right at a node."""


def patches(z: Tensor, size: tuple[int, int]) -> list[Tensor]:
    """All patches of one D×H×W map, row by row."""
    rows, columns = z.shape[1] - size[0] + 1, z.shape[2] - size[1] + 1
    return [z[:, i : i + size[0], j : j + size[1]] for i, j in itertools.product(range(rows), range(columns))]


def nearest(z: Tensor, p: Tensor) -> tuple[Tensor, int]:
    """Eq. 1 for one map and one prototype: distance and number of the nearest patch."""
    distances = [((patch - p) ** 2).sum().sqrt() for patch in patches(z, (p.shape[1], p.shape[2]))]
    best = min(range(len(distances)), key=lambda i: distances[i].item())
    return distances[best], best


def routes(topology: Topology, child: int | None = None) -> dict[int, list[tuple[int, bool]]]:
    """Leaf → its path as (node, turned right), by walking down from the root."""
    child = (0 if topology.n_nodes else ~0) if child is None else child
    if child < 0:
        return {~child: []}
    found = {}
    for right, side in ((False, topology.left), (True, topology.right)):
        for leaf, path in routes(topology, int(side[child])).items():
            found[leaf] = [(child, right), *path]
    return found


def presence(radius: float = math.log(2), sharpness: float = 1.0) -> Right:
    """Eq. 2 generalised: 2^(−(d/r)^β); the paper's exp(−d) is r = ln 2, β = 1."""

    def p_right(z: Tensor, prototypes: Tensor, node: int) -> Tensor:
        return 2.0 ** (-((nearest(z, prototypes[node])[0] / radius) ** sharpness))

    return p_right


def choice(sharpness: float) -> Right:
    """Which of two is nearer; the right prototypes come first, then the left ones."""

    def p_right(z: Tensor, prototypes: Tensor, node: int) -> Tensor:
        left = nearest(z, prototypes[len(prototypes) // 2 + node])[0]
        return 1 / (1 + torch.exp(-sharpness * (left - nearest(z, prototypes[node])[0])))

    return p_right


def path_prob(z: Tensor, prototypes: Tensor, path: list[tuple[int, bool]], right_of: Right | None = None) -> Tensor:
    """Eq. 3 for one map and one leaf."""
    ask = right_of or presence()
    probability = torch.ones((), dtype=z.dtype)
    for node, right in path:
        p_right = ask(z, prototypes, node)
        probability = probability * (p_right if right else 1 - p_right)
    return probability


def path_probs(z: Tensor, prototypes: Tensor, topology: Topology, right_of: Right | None = None) -> Tensor:
    """B×L."""
    ways, ask = routes(topology), right_of or presence()
    return torch.stack(
        [
            torch.stack([path_prob(image, prototypes, ways[leaf], ask) for leaf in range(topology.n_leaves)])
            for image in z
        ]
    )


def softmax(c: Tensor) -> Tensor:
    return torch.stack([torch.exp(row - row.max()) / torch.exp(row - row.max()).sum() for row in c])


def prediction(pi: Tensor, c: Tensor) -> Tensor:
    """Eq. 4, B×K."""
    sigma = softmax(c)
    return torch.stack([sum(image[leaf] * sigma[leaf] for leaf in range(len(c))) for image in pi])


def leaf_counts(pi: Tensor, c: Tensor, target: Tensor) -> Tensor:
    """Eq. 5 over a batch with targets B×K."""
    sigma, y_hat = softmax(c), prediction(pi, c)
    counts = torch.zeros_like(c)
    for b, leaf in itertools.product(range(len(pi)), range(len(c))):
        counts[leaf] += sigma[leaf] * target[b] * pi[b, leaf] / y_hat[b]
    return counts


def greedy(z: Tensor, prototypes: Tensor, topology: Topology, right_of: Right | None = None) -> int:
    """§5.3, second strategy, for one map."""
    child, ask = 0 if topology.n_nodes else ~0, right_of or presence()
    while child >= 0:
        child = int(topology.right[child] if ask(z, prototypes, child) > 0.5 else topology.left[child])
    return ~child


def max_path(pi: Tensor) -> list[int]:
    """§5.3, first strategy."""
    return [max(range(len(image)), key=lambda leaf, image=image: image[leaf].item()) for image in pi]
