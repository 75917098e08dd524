"""Trees as the published code saves them, rebuilt from the description of their file: linked modules, one pickle.

Their answer is written down here as literally as can be, node by node, so that imported trees have something to agree
with.
"""

import pickle
from pathlib import Path

import timm
import torch
from torch import Tensor, nn


class Leaf(nn.Module):
    def __init__(self, values: Tensor, kontschieder: bool) -> None:
        super().__init__()
        self._dist_params = nn.Parameter(values, requires_grad=False)
        self._kontschieder_normalization = kontschieder

    def distribution(self) -> Tensor:
        if self._kontschieder_normalization:
            return self._dist_params / self._dist_params.sum()
        return torch.softmax(self._dist_params, dim=0)


class Branch(nn.Module):
    def __init__(self, index: int, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self._index = index
        self.l, self.r = left, right


class Prototypes(nn.Module):
    def __init__(self, n: int, depth: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.prototype_vectors = nn.Parameter(0.5 + 0.1 * torch.randn(n, depth, *size))


class PublishedTree(nn.Module):
    """A pruned tree: the nodes 2 and 5 of a full one are gone, their prototypes still there."""

    def __init__(
        self,
        n_classes: int = 4,
        *,
        kontschieder: bool = False,
        log_probabilities: bool = False,
        size: tuple[int, int] = (1, 1),
        network: str = "test_resnet",
    ) -> None:
        super().__init__()
        torch.manual_seed(0)

        def leaf() -> Leaf:
            values = 3 * torch.rand(n_classes)
            values[0] = 0  # a class that the leaf has never seen
            return Leaf(values, kontschieder)

        deep = Branch(4, leaf(), Branch(6, leaf(), leaf()))
        self._root = Branch(0, Branch(1, leaf(), deep), Branch(3, leaf(), leaf()))
        self._parents = {self._root.l: self._root, self._root.r: self._root}
        self._log_probabilities = log_probabilities
        self._kontschieder_normalization = kontschieder
        self._net = timm.create_model(network, num_classes=0)
        self._net.eval()
        self._add_on = nn.Sequential(nn.Conv2d(self._net.num_features, 8, 1, bias=False), nn.Sigmoid())
        self.prototype_layer = Prototypes(7, 8, size)
        # Rows are not in the order of the nodes.
        row = {0: 3, 1: 0, 3: 6, 4: 1, 6: 2}
        self._out_map = {node: row[node._index] for node in self.modules() if isinstance(node, Branch)}

    def probabilities(self, images: Tensor) -> Tensor:
        """What the tree says, image by image and node by node."""
        maps = self._add_on(self._net.forward_features(images))
        return torch.stack([self._at(self._root, one) for one in maps])

    def _at(self, node: nn.Module, z: Tensor) -> Tensor:
        if isinstance(node, Leaf):
            return node.distribution()
        prototype = self.prototype_layer.prototype_vectors[self._out_map[node]]
        height, width = prototype.shape[1:]
        apart = [
            (z[:, i : i + height, j : j + width] - prototype).square().sum().sqrt()
            for i in range(z.shape[1] - height + 1)
            for j in range(z.shape[2] - width + 1)
        ]
        right = torch.exp(-torch.stack(apart).min())
        return (1 - right) * self._at(node.l, z) + right * self._at(node.r, z)


def write_published(tree: object, folder: Path, classes: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "tree.pkl", "wb") as file:
        pickle.dump(tree, file)
    (folder / "classes.txt").write_text("\n".join(classes) + "\n")
    return folder
