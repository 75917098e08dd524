"""Ground truth of the generated birds: how each species looks, which pixels show which part, and whether a prototype
sits on a part in which the two sides of its node differ.

A node *decides between look-alikes* if among the species of the leaves on its left and on its right there is a pair
that differs in one or two parts only; it is then about the parts in which its most similar pairs differ. Nodes that
only part families, which differ in nearly everything, would touch a difference anywhere and are not counted, and
neither is a prototype whose image shows none of these parts, such as a crest that its species lacks.
"""

from collections.abc import Collection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from prototree.backbones.geometry import Box
from prototree.core.model import ProtoTree
from prototree.core.projection import side_classes
from prototree.data import ImageData, Sample
from prototree.data.crops import image_size
from prototree.data.loader import stable_seed
from prototree.errors import DataError
from prototree.evaluation.schema import Method, OnDifference
from prototree_birds import LOOKS
from prototree_birds.species import PART_NAMES, Look, Species, differing_parts

LOOK_ALIKES = 2  # parts in which two species may differ at most
_DRAWS = 200


def read_species(folder: Path, class_names: tuple[str, ...]) -> tuple[Species, ...] | None:
    """The species of a data set that `write_birds` wrote, in the order of its classes; None for any other data."""
    file = folder / LOOKS
    if not file.is_file():
        return None
    try:
        rows = [line.split() for line in file.read_text(encoding="utf-8").splitlines()]
        looks = {
            (int(number), int(part)): Look(*("" if word == "-" else word for word in words))
            for number, part, *words in rows
        }
        return tuple(
            Species(name, tuple(looks[number, part] for part in range(1, len(PART_NAMES) + 1)))
            for number, name in enumerate(class_names, start=1)
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{file} does not say how every part of every species looks; write the birds again") from error


def part_pixels(folder: Path, image: str, parts: Collection[str]) -> NDArray[np.bool_]:
    """Which pixels of a photo, named by its path within the data, show one of the parts."""
    path = (folder / image.replace("images/", "segmentations/", 1)).with_suffix(".png")
    try:
        with Image.open(path) as part_map:
            labels = np.asarray(part_map)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}); write the birds again") from error
    shown: NDArray[np.bool_] = np.isin(labels, [PART_NAMES.index(part) + 1 for part in parts])
    return shown


def on_differences(tree: ProtoTree, data: ImageData) -> dict[int, dict[Method, OnDifference]]:
    """By prototype and method, for the prototypes that it can be said of; empty for other data than generated birds."""
    species = read_species(data.root, data.class_names)
    if species is None:
        return {}
    left, right = (side.tolist() for side in side_classes(tree))
    by_name = {data.name(sample): sample for sample in data.train}
    results = {}
    for prototype, source in enumerate(tree.sources):
        node, _ = tree.node_of(prototype)
        parts = deciding_parts(left[node], right[node], species)
        if source is None or source.image not in by_name or not parts:
            continue
        shown = part_pixels(data.root, source.image, parts)
        if shown.any():
            boxes: dict[Method, tuple[float, float, float, float]] = {"cell": source.patch_box}
            if source.display_box is not None:
                boxes = {"peak": source.display_box, **boxes}
            sample = by_name[source.image]
            results[prototype] = {name: _on_difference(parts, shown, Box(*box), sample) for name, box in boxes.items()}
    return results


def deciding_parts(left: list[bool], right: list[bool], species: tuple[Species, ...]) -> tuple[str, ...]:
    """The parts in which the most similar species of two sides differ; none if all differ in many."""
    sides = [[bird for bird, there in zip(species, side, strict=True) if there] for side in (left, right)]
    pairs = [differing_parts(a, b) for a in sides[0] for b in sides[1] if a != b]
    fewest = min(map(len, pairs), default=LOOK_ALIKES + 1)
    if fewest > LOOK_ALIKES:
        return ()
    return tuple(dict.fromkeys(part for parts in pairs if len(parts) == fewest for part in parts))


def touches(pixels: NDArray[np.bool_], box: Box) -> bool:
    """Whether one of the pixels lies in the box."""
    rows = slice(max(round(box.top), 0), max(round(box.bottom), 1))
    columns = slice(max(round(box.left), 0), max(round(box.right), 1))
    return bool(pixels[rows, columns].any())


def _on_difference(parts: tuple[str, ...], shown: NDArray[np.bool_], box: Box, sample: Sample) -> OnDifference:
    """Whether the box touches the parts, and how often a box of its size anywhere on the bird does."""
    bird = sample.box or Box.whole(image_size(sample))
    width, height = max(bird.width - box.width, 0.0), max(bird.height - box.height, 0.0)
    draws = np.random.default_rng(stable_seed("difference", sample.path.name)).random((_DRAWS, 2)).tolist()
    boxes = [Box.from_corner(bird.left + x * width, bird.top + y * height, box.width, box.height) for x, y in draws]
    return OnDifference(parts, touches(shown, box), sum(touches(shown, other) for other in boxes) / _DRAWS)
