"""Do the boxes show what the species differ in? The generated birds know.

A node *decides between two species* if among the species of the leaves on its left and on its right there is a pair
that differs in one or two parts only; it is then asked about the parts in which its most similar pairs differ. Nodes
that only separate families, which differ in nearly everything, would overlap with anything and are not counted. A box
*overlaps* a part if a pixel of the part lies inside; the data set says which pixels belong to which part.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy import ndarray
from PIL import Image

from prototree.data import Box, ImageData, open_data
from prototree.data.birds.dataset import PART_NAMES, Species, differing_parts, make_species, write_birds
from prototree.explain.records import Match, Method, TreeExplanation
from prototree.explain.whole_tree import explain_tree
from prototree.pipeline.fit import fit

LOOK_ALIKES = 2  # parts in which two species may differ at most


@dataclass(frozen=True)
class Shares:
    """Of the nodes that decide between two species: how many boxes overlap a part in which these differ."""

    nodes: int
    overlap: float
    by_chance: float  # for boxes of the same size anywhere in the bird's box


def leaves_below(explanation: TreeExplanation, child: int) -> list[int]:
    if child < 0:
        return [int(np.argmax(explanation.leaf_probs[~child]))]
    below = (explanation.left[child], explanation.right[child])
    return [leaf for side in below for leaf in leaves_below(explanation, side)]


def deciding_parts(explanation: TreeExplanation, node: int, species: tuple[Species, ...]) -> set[str]:
    """The parts in which the most similar pairs across the node differ; none if it separates families."""
    left, right = (set(leaves_below(explanation, side[node])) for side in (explanation.left, explanation.right))
    pairs = [differing_parts(species[a], species[b]) for a in left for b in right if a != b]
    fewest = min(map(len, pairs), default=LOOK_ALIKES + 1)
    return {part for parts in pairs if len(parts) == fewest for part in parts} if fewest <= LOOK_ALIKES else set()


def overlaps(mask: ndarray, box: Box) -> bool:
    rows, columns = slice(round(box.top), max(round(box.bottom), 1)), slice(round(box.left), max(round(box.right), 1))
    return bool(mask[rows, columns].any())


def pixels_of(match: Match, parts: set[str], root: Path) -> ndarray:
    path = (root / match.image.replace("images/", "segmentations/", 1)).with_suffix(".png")
    part_map = np.asarray(Image.open(path))
    return np.isin(part_map, [PART_NAMES.index(part) + 1 for part in parts])


def share_on_parts(explanation: TreeExplanation, data: ImageData, method: Method) -> Shares:
    species = make_species(len(explanation.class_names), 0)
    by_name = {sample.path.relative_to(data.root).as_posix(): sample for sample in data.train}
    found, chance, random = [], [], np.random.default_rng(0)
    for prototype in explanation.prototypes:
        parts = deciding_parts(explanation, prototype.node, species)
        where = [where for where in prototype.source.where if where.method == method]
        if not parts or not where:
            continue
        mask, box = pixels_of(prototype.source, parts, data.root), where[0].box
        found.append(overlaps(mask, box))
        bird = by_name[prototype.source.image].box
        assert bird is not None
        for x, y in random.random((200, 2)):
            left = bird.left + x * max(bird.width - box.width, 0.0)
            top = bird.top + y * max(bird.height - box.height, 0.0)
            chance.append(overlaps(mask, Box.from_corner(float(left), float(top), box.width, box.height)))
    return Shares(len(found), float(np.mean(found)), float(np.mean(chance)))


def test_parts_are_where_the_annotation_says(tmp_path: Path) -> None:
    write_birds(tmp_path / "b", n_species=3, train_per_species=12, test_per_species=1, size=96)
    data = open_data(tmp_path / "b")
    for sample in data.train[::5]:
        image = sample.path.relative_to(data.root).as_posix()
        match = Match(image, 0, 1.0, (96, 96), np.zeros((1, 1, 3), np.uint8), np.zeros((1, 1, 3), np.uint8), ())
        for part in sample.parts:
            mask = pixels_of(match, {part.name}, data.root)
            assert overlaps(mask, Box(part.x - 8, part.y - 8, part.x + 8, part.y + 8).clip((96, 96))), part.name


@pytest.mark.slow
def test_boxes_of_the_demo_show_the_parts_in_which_species_differ(tmp_path: Path) -> None:
    data = open_data("birds")
    run = fit("birds", tmp_path / "run", preset_name="demo")
    explanation = explain_tree(run, data=data, nearest=1)
    for method in ("cell", "attribution"):
        shares = share_on_parts(explanation, data, method)  # type: ignore[arg-type]
        print(method, shares)
        assert shares.nodes >= 5
        assert shares.overlap >= 0.7
        assert shares.overlap > shares.by_chance
