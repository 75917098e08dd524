"""Occlusion and noise where it is known what there is to see: coloured cells, a network that sees colour."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.model import ProtoTree
from prototree.core.nodes import PAPER, NodeFunction
from prototree.core.topology import Topology
from prototree.data import Part, Sample
from prototree.data.crops import evaluation_views
from prototree.data.loader import ViewDataset
from prototree.evaluation.occlusion_test import Pair, PairSummary, run_occlusion_test
from prototree.explanation.prototypes import Progress

CELL, GREY = 16, (120, 120, 120)
RED, BLUE, BLUISH, REDDISH = (255, 0, 0), (0, 0, 255), (40, 40, 200), (200, 40, 40)
PAIRWISE = NodeFunction("pairwise", 6.0)
Cells = dict[tuple[int, int], tuple[int, int, int]]


class Colours(nn.Module):
    """A network whose map is each cell's mean colour."""

    def forward(self, images: Tensor) -> Tensor:
        return avg_pool2d(images, CELL)


def image(path: Path, cells: Cells) -> Sample:
    """Grey, 4×4 cells of which some have a colour; a part stands in the middle of each of those."""
    pixels = np.full((4 * CELL, 4 * CELL, 3), GREY, dtype=np.uint8)
    for (row, column), colour in cells.items():
        pixels[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL] = colour
    Image.fromarray(pixels).save(path)
    parts = (Part(f"part {row} {column}", (column + 0.5) * CELL, (row + 0.5) * CELL) for row, column in cells)
    return Sample(path, 0, parts=tuple(parts), size=(64, 64))


@pytest.fixture
def tested(tiny_backbone: Backbone, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Test one image on a tree of one node: red to the right, blue (of a pairwise node) to the left."""

    def run(cells: Cells, node_function: NodeFunction, prototype=0, patch=6, *, parts=True, blue=1.0):  # type: ignore[no-untyped-def]
        tree = ProtoTree(Topology.full(1), FeatureExtractor(tiny_backbone, 3), 2, node_function=node_function).eval()
        mean, std = (torch.tensor(values) for values in (tree.preprocessing.mean, tree.preprocessing.std))
        for number, colour in enumerate((RED, BLUE)[: node_function.prototypes_per_node]):
            tree.prototypes.data[number, :, 0, 0] = (torch.tensor(colour) / 255 - mean) / std
        tree.prototypes.data[1:] *= blue
        sample = image(tmp_path / "a.png", cells)
        dataset = ViewDataset([sample], evaluation_views, tree.preprocessing)
        pair = Pair(0, prototype, patch, (float(patch // 4), float(patch % 4)))
        shown, network = [sample.parts if parts else ()], Colours()
        progress = Progress(None, 1)
        return run_occlusion_test(tree, network, dataset, [pair], shown, attribution=network, progress=progress)

    return run


def test_occluding_the_only_red_cell_flips_the_image(tested) -> None:  # type: ignore[no-untyped-def]
    found = tested({(1, 2): RED}, PAPER)[0]
    assert set(found.occlusion) == {"peak", "cell", "attribution"}
    cell = found.occlusion["cell"]
    assert (cell.n_images, cell.flip_rate) == (1, 1.0)
    assert cell.distance == pytest.approx(0.0, abs=1e-3)
    assert cell.distance_occluded > 1.0, "out of the radius"
    assert (cell.loss_rate, cell.random_loss_rate) == (cell.flip_rate, cell.random_flip_rate), "the same for presence"
    assert found.stability == 1.0, "noise does not move a red cell"
    assert found.occlusion["attribution"].flip_rate == 1.0


def test_a_second_red_cell_keeps_the_image_where_it_is(tested) -> None:  # type: ignore[no-untyped-def]
    found = tested({(0, 0): RED, (3, 3): RED}, PAPER, patch=0, parts=False)[0]
    assert found.occlusion["cell"].flip_rate == 0.0
    assert found.occlusion["cell"].distance_occluded == pytest.approx(0.0, abs=1e-3)
    assert found.stability is None, "nothing is known of parts"


@pytest.mark.parametrize(("prototype", "strong", "weak"), [(0, RED, BLUISH), (1, BLUE, REDDISH)])
def test_a_pairwise_node_flips_when_the_nearer_patch_is_occluded(  # type: ignore[no-untyped-def]
    tested, prototype: int, strong: tuple[int, int, int], weak: tuple[int, int, int]
) -> None:
    found = tested({(1, 2): strong, (3, 0): weak}, PAIRWISE, prototype)
    assert found[prototype].occlusion["cell"].flip_rate == 1.0
    assert found[prototype].occlusion["cell"].random_flip_rate < 1.0
    assert found[1 - prototype] == PairSummary(), "a prototype without images has no metrics"


def test_an_image_is_lost_where_a_pairwise_node_finds_nothing_within_the_radius(tested) -> None:  # type: ignore[no-untyped-def]
    """Grey is a little nearer to red than to this blue, so the image stays, but with nothing to show for it."""
    rates = tested({(1, 2): RED}, PAIRWISE, blue=3)[0].occlusion["cell"]
    assert (rates.flip_rate, rates.n_in_radius, rates.loss_rate) == (0.0, 1, 1.0)
    assert rates.random_loss_rate < 1.0
    rates = tested({}, PAIRWISE)[0].occlusion["cell"]
    assert (rates.n_images, rates.n_in_radius, rates.loss_rate) == (1, 0, None), "nothing to lose"
