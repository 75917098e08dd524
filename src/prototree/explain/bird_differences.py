"""Of generated birds it is known what there is to see: does a prototype sit on a part in which its two sides differ?

A node *decides between look-alikes* if among the species of the leaves on its left and on its right there is a pair
that differs in one or two parts only; it is then about the parts in which its most similar pairs differ. Nodes that
only part families, which differ in nearly everything, would touch a difference anywhere and are not counted, and
neither is a prototype whose photo shows none of these parts, such as a crest that its species lacks.
"""

import numpy as np
from numpy.typing import NDArray

from prototree.backbones.geometry import Box
from prototree.core.model import ProtoTree
from prototree.data import ImageData, Sample
from prototree.data.birds.species import Species, differing_parts
from prototree.data.birds.truth import part_pixels, read_species
from prototree.data.loading import derived_seed
from prototree.data.views import photo_size
from prototree.evaluation.parts import OnDifference
from prototree.training.projection import side_classes

LOOK_ALIKES = 2  # parts in which two species may differ at most
_DRAWS = 200


def on_differences(tree: ProtoTree, data: ImageData) -> dict[int, dict[str, OnDifference]]:
    """By prototype and method, for the prototypes that it can be said of; empty for other data than generated birds."""
    species = read_species(data.root, data.class_names)
    if species is None:
        return {}
    left, right = (side.tolist() for side in side_classes(tree))
    by_name = {data.name(sample): sample for sample in data.train}
    found = {}
    for prototype, source in enumerate(tree.sources):
        node, _ = tree.node_of(prototype)
        parts = deciding_parts(left[node], right[node], species)
        if source is None or source.image not in by_name or not parts:
            continue
        shown = part_pixels(data.root, source.image, parts)
        if shown.any():
            boxes = {"cell": source.box} if source.shown is None else {"peak": source.shown, "cell": source.box}
            sample = by_name[source.image]
            found[prototype] = {name: _on_difference(parts, shown, Box(*box), sample) for name, box in boxes.items()}
    return found


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
    bird = sample.box or Box.whole(photo_size(sample))
    chosen = np.random.default_rng(derived_seed("difference", sample.path.name)).random((_DRAWS, 2))
    elsewhere = [
        Box.from_corner(
            bird.left + float(x) * max(bird.width - box.width, 0.0),
            bird.top + float(y) * max(bird.height - box.height, 0.0),
            box.width,
            box.height,
        )
        for x, y in chosen
    ]
    by_chance = sum(touches(shown, one) for one in elsewhere) / _DRAWS
    return OnDifference(parts, touches(shown, box), by_chance)
