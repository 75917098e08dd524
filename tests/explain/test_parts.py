"""Hiding, noise and part purity where it is known what there is to see: coloured cells, a network that sees colour."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.backbones.geometry import Box
from prototree.core.model import ProtoTree
from prototree.core.nodes import PAPER, NodeFunction
from prototree.core.topology import Topology
from prototree.data import ImageData, Part, Sample, open_data
from prototree.data.birds.dataset import make_species, write_birds
from prototree.data.birds.truth import part_pixels, read_species
from prototree.data.loading import ViewDataset
from prototree.data.views import FULL, evaluation_views, from_photo
from prototree.errors import ConfigError, DataError
from prototree.evaluation.parts import NEAREST, PartFigures
from prototree.explain.altered_photos import Outcome, Pair, alter_pairs
from prototree.explain.bird_differences import deciding_parts, on_differences, touches
from prototree.explain.parts import measure_parts, nearest_photos, taken_sides
from prototree.explain.prototypes import Progress
from prototree.features.batches import PhotoBatches, maps_of
from prototree.training.projection import SourcePhotos, measure_again, project
from tiny_training import write_squares

CELL, GREY = 16, (120, 120, 120)
RED, BLUE, BLUISH = (255, 0, 0), (0, 0, 255), (40, 40, 200)


class Colours(nn.Module):
    """A network whose map is each cell's mean colour."""

    def forward(self, images: Tensor) -> Tensor:
        return avg_pool2d(images, CELL)


def photo(path: Path, cells: dict[tuple[int, int], tuple[int, int, int]]) -> Sample:
    """Grey, 4×4 cells of which some have a colour; a part stands in the middle of each of those."""
    pixels = np.full((4 * CELL, 4 * CELL, 3), GREY, dtype=np.uint8)
    for (row, column), colour in cells.items():
        pixels[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL] = colour
    Image.fromarray(pixels).save(path)
    parts = (Part(f"part {row} {column}", (column + 0.5) * CELL, (row + 0.5) * CELL) for row, column in cells)
    return Sample(path, 0, parts=tuple(parts), size=(64, 64))


def colour_tree(backbone: Backbone, question: NodeFunction = PAPER) -> ProtoTree:
    """One node: red to the right, blue (of a pairwise node) to the left."""
    tree = ProtoTree(Topology.full(1), FeatureExtractor(backbone, 3), 2, question=question).eval()
    mean, std = (torch.tensor(values) for values in (tree.preprocessing.mean, tree.preprocessing.std))
    for number, colour in enumerate((RED, BLUE)[: question.patches_each]):
        tree.prototypes.data[number, :, 0, 0] = (torch.tensor(colour) / 255 - mean) / std
    return tree


def altered(tree: ProtoTree, sample: Sample, pair: Pair, *, parts: bool = True) -> Outcome:
    dataset = ViewDataset([sample], evaluation_views, tree.preprocessing)
    shown = [sample.parts if parts else ()]
    found = alter_pairs(tree, Colours(), dataset, [pair], shown, attribution=Colours(), progress=Progress(None, 1))
    return found[pair.prototype]


def test_hiding_the_only_red_cell_turns_the_photo_away(tiny_backbone: Backbone, tmp_path: Path) -> None:
    tree, sample = colour_tree(tiny_backbone), photo(tmp_path / "a.png", {(1, 2): RED})
    found = altered(tree, sample, Pair(0, 0, patch=6, peak=(1.0, 2.0)))
    cell = found.hiding["cell"]
    assert (cell.n_photos, cell.flip_rate) == (1, 1.0)
    assert cell.distance == pytest.approx(0.0, abs=1e-3)
    assert cell.distance_hidden > 1.0, "out of reach"
    assert found.stability == 1.0, "noise does not move a red cell"
    assert found.hiding["attribution"].flip_rate == 1.0
    assert set(found.hiding) == {"peak", "cell", "attribution"}


def test_a_second_red_cell_keeps_the_photo_where_it_is(tiny_backbone: Backbone, tmp_path: Path) -> None:
    tree, sample = colour_tree(tiny_backbone), photo(tmp_path / "a.png", {(0, 0): RED, (3, 3): RED})
    found = altered(tree, sample, Pair(0, 0, patch=0, peak=(0.0, 0.0)), parts=False)
    assert found.hiding["cell"].flip_rate == 0.0
    assert found.hiding["cell"].distance_hidden == pytest.approx(0.0, abs=1e-3)
    assert found.stability is None, "nothing is known of parts"


@pytest.mark.parametrize(("prototype", "patch", "strong", "weak"), [(0, 6, RED, BLUISH), (1, 6, BLUE, (200, 40, 40))])
def test_a_choice_turns_when_the_taken_sides_patch_is_hidden(
    tiny_backbone: Backbone,
    tmp_path: Path,
    prototype: int,
    patch: int,
    strong: tuple[int, int, int],
    weak: tuple[int, int, int],
) -> None:
    tree = colour_tree(tiny_backbone, NodeFunction("pairwise", 6.0))
    sample = photo(tmp_path / "a.png", {(1, 2): strong, (3, 0): weak})
    found = altered(tree, sample, Pair(0, prototype, patch, peak=(1.0, 2.0)))
    assert found.hiding["cell"].flip_rate == 1.0
    assert found.hiding["cell"].random_flip_rate < 1.0


def test_a_photo_is_lost_where_a_choice_finds_nothing_within_reach(tiny_backbone: Backbone, tmp_path: Path) -> None:
    """Grey is a little nearer to red than to this blue, so the photo stays, but with nothing to show for it."""
    tree = colour_tree(tiny_backbone, NodeFunction("pairwise", 6.0))
    tree.prototypes.data[1] *= 3
    found = altered(tree, photo(tmp_path / "a.png", {(1, 2): RED}), Pair(0, 0, patch=6, peak=(1.0, 2.0)))
    hiding = found.hiding["cell"]
    assert (hiding.flip_rate, hiding.n_in_radius, hiding.lost) == (0.0, 1, 1.0)
    assert hiding.random_loss_rate is not None
    assert hiding.random_loss_rate < 1.0


def test_a_photo_with_nothing_within_reach_cannot_be_lost(tiny_backbone: Backbone, tmp_path: Path) -> None:
    tree = colour_tree(tiny_backbone, NodeFunction("pairwise", 6.0))
    found = altered(tree, photo(tmp_path / "a.png", {}), Pair(0, 0, patch=6, peak=(1.0, 2.0)))
    assert (found.hiding["cell"].n_photos, found.hiding["cell"].n_in_radius, found.hiding["cell"].lost) == (1, 0, None)


def test_where_one_patch_is_asked_for_lost_and_turned_away_are_the_same(
    tiny_backbone: Backbone, tmp_path: Path
) -> None:
    tree, sample = colour_tree(tiny_backbone), photo(tmp_path / "a.png", {(1, 2): RED})
    cell = altered(tree, sample, Pair(0, 0, patch=6, peak=(1.0, 2.0))).hiding["cell"]
    assert (cell.lost, cell.random_loss_rate) == (cell.flip_rate, cell.random_flip_rate)


def test_a_prototype_without_photos_has_no_figures(tiny_backbone: Backbone, tmp_path: Path) -> None:
    tree = colour_tree(tiny_backbone, NodeFunction("pairwise", 6.0))
    sample = photo(tmp_path / "a.png", {(1, 2): RED})
    dataset = ViewDataset([sample], evaluation_views, tree.preprocessing)
    pairs = [Pair(0, 0, 6, (1.0, 2.0))]
    tests = alter_pairs(tree, Colours(), dataset, pairs, [()], attribution=None, progress=Progress(None, 1))
    assert tests[1] == Outcome()


def test_which_prototypes_a_path_turns_to(tiny_backbone: Backbone) -> None:
    nodes, right = torch.tensor([[0, 2, -1], [0, 1, -1]]), torch.tensor([[True, False, False], [False, True, False]])
    for question, expected in (
        (PAPER, [[0], [1]]),  # a turn to the left is to no prototype
        (NodeFunction("pairwise", 6.0), [[0, 3 + 2], [1, 3 + 0]]),
    ):
        tree = ProtoTree(Topology.full(2), FeatureExtractor(tiny_backbone, 3), 2, question=question)
        taken = taken_sides(tree, nodes, right)
        assert [torch.nonzero(row)[:, 0].tolist() for row in taken] == expected


def test_the_nearest_photos_come_in_order_and_unreadable_ones_never() -> None:
    distance = torch.tensor([3.0, torch.inf, 1.0, 1.0, *range(10, 22)])
    assert nearest_photos(distance) == [2, 3, 0, *range(4, 11)]
    assert nearest_photos(torch.tensor([torch.inf])) == []


# Generated birds


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> ImageData:
    folder = write_birds(
        tmp_path_factory.mktemp("birds") / "b", n_species=3, train_per_species=6, test_per_species=4, size=64
    )
    return open_data(folder)


def projected(backbone: Backbone, data: ImageData) -> ProtoTree:
    torch.manual_seed(0)
    question = NodeFunction("pairwise", 6.0)
    tree = ProtoTree(Topology.full(2), FeatureExtractor(backbone, 8), data.class_names, question=question).eval()
    tree.leaf_logits.data = 5 * torch.eye(4, 3)
    batches = PhotoBatches(ViewDataset(data.train, evaluation_views, tree.preprocessing), 8, shuffle=False)
    found = project(tree, maps_of(batches, tree.features), SourcePhotos(data.root, batches.entries))
    measure_again(found, batches.entries)
    return found.tree.eval()


def purity_by_hand(tree: ProtoTree, samples: tuple[Sample, ...], prototype: int) -> float:
    """PIP-Net's definition, one photo after the other."""
    rows = []
    for sample in samples:
        image = ViewDataset([sample], evaluation_views, tree.preprocessing)[0].image
        with torch.no_grad():
            routed = tree(image[None])
        row, column = divmod(int(routed.patch[0, prototype]), tree.grid.columns)
        rows.append((float(routed.distance[0, prototype]), row, column, sample))
    seen: dict[str, list[bool]] = {}
    for _, row, column, sample in sorted(rows, key=lambda one: one[0])[:NEAREST]:
        cell, half = 64 / tree.grid.rows, 64 / 7 / 2
        hits: dict[str, bool] = {}
        for part in sample.parts:
            x, y = from_photo((part.x, part.y), FULL, (64, 64), tree.preprocessing)
            inside = abs(x - (column + 0.5) * cell) <= half and abs(y - (row + 0.5) * cell) <= half
            name = part.name.replace("left ", "").replace("right ", "")
            hits[name] = hits.get(name, False) or inside
        for name, hit in hits.items():
            seen.setdefault(name, []).append(hit)
    return max(sum(hits) / len(hits) for hits in seen.values())


def test_the_figures_of_a_tree_agree_with_counting_by_hand(tiny_backbone: Backbone, birds: ImageData) -> None:
    tree, ticks = projected(tiny_backbone, birds), list[tuple[int, int]]()
    found = measure_parts(tree, birds, photos=1, attribution=False, tick=lambda *done: ticks.append(done))
    for split, samples in (("train", birds.train), ("test", birds.test)):
        for one in found.prototypes:
            expected = purity_by_hand(tree, samples, one.prototype)
            assert one.purity["cell"][split].share == pytest.approx(expected), (split, one.prototype)  # type: ignore[index]
        assert 0 <= found.baselines[split].random_patch <= 1  # type: ignore[index]
    assert ticks[-1][0] <= ticks[-1][1]
    hiding = found.hiding("peak")
    assert hiding is not None
    taken = sum(1 for one in found.prototypes if one.hiding)
    assert hiding.n_photos == taken <= tree.n_prototypes
    again = measure_parts(tree, birds, photos=1, attribution=False)
    assert again == found, "the same figures every time"


def test_no_photo_is_altered_where_none_is_asked_for(tiny_backbone: Backbone, birds: ImageData) -> None:
    tree = projected(tiny_backbone, birds)
    assert measure_parts(tree, birds, photos=0).hiding("peak") is None
    with pytest.raises(ConfigError, match="at least 0, got -1"):
        measure_parts(tree, birds, photos=-1)


def test_data_without_parts_gives_hiding_alone(tiny_backbone: Backbone, tmp_path: Path) -> None:
    data = open_data(write_squares(tmp_path / "photos", train=3, test=2))
    found = measure_parts(projected(tiny_backbone, data), data, photos=1, attribution=False)
    assert found.purity("test") is None
    assert found.stability is None
    assert found.hiding("cell") is not None
    assert isinstance(found, PartFigures)
    assert not any(one.on_difference for one in found.prototypes)


def test_species_are_read_back_as_they_were_drawn(birds: ImageData) -> None:
    species = read_species(birds.root, birds.class_names)
    assert species is not None
    assert [bird.crops for bird in species] == [bird.crops for bird in make_species(3, 0)]
    assert read_species(birds.root / "images", birds.class_names) is None


def test_a_damaged_list_of_looks_is_named(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "looks.txt").write_text("1 1 cone\n")
    with pytest.raises(DataError, match=r"looks\.txt does not say"):
        read_species(tmp_path, ("a", "b"))


def test_a_node_is_about_what_its_look_alikes_differ_in() -> None:
    species = make_species(12, 0)
    family, others = [True] + [False] * 11, [False] + [True] * 11
    parts = deciding_parts(family, others, species)
    assert len(parts) >= 1
    assert deciding_parts(family, family, species) == (), "nobody differs from itself"


def test_prototypes_are_judged_by_the_pixels_of_the_part(tiny_backbone: Backbone, birds: ImageData) -> None:
    tree = projected(tiny_backbone, birds)
    found = on_differences(tree, birds)
    assert found
    for prototype, own in found.items():
        source = tree.sources[prototype]
        assert source is not None
        assert source.shown is not None
        assert set(own) == {"peak", "cell"}
        pixels = part_pixels(birds.root, source.image, own["cell"].parts)
        left, top, right, bottom = (round(edge) for edge in source.box)
        assert own["cell"].touches == bool(pixels[top:bottom, left:right].any())
        assert 0 <= own["cell"].by_chance <= 1


def test_a_box_touches_what_lies_in_it() -> None:
    pixels = np.zeros((10, 10), dtype=bool)
    pixels[2, 7] = True
    assert touches(pixels, Box(7.0, 2.0, 8.0, 3.0))
    assert not touches(pixels, Box(2.0, 7.0, 3.0, 8.0)), "rows are rows"
    assert touches(pixels, Box(-5.0, -5.0, 8.0, 3.0))
