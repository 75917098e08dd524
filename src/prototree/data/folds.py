"""All photos of a data set in parts of the same size, each of which is left out once to be tested on. No torch here."""

import random
import re
from dataclasses import replace

from prototree.data.dataset import ImageData, Sample
from prototree.errors import ConfigError

MAX_FOLDS = 100


def parsed_fold(fold: str) -> tuple[int, int]:
    """`2/5` as the second (counted from 0) of five."""
    found = re.fullmatch(r"\s*(\d{1,4})\s*/\s*(\d{1,4})\s*", fold)
    part, parts = map(int, found.groups()) if found else (0, 0)
    if not (2 <= parts <= MAX_FOLDS and 1 <= part <= parts):
        raise ConfigError(f"expected a fold such as 2/5, of 2 to {MAX_FOLDS} parts, got {fold!r}")
    return part - 1, parts


def take_fold(data: ImageData, fold: str) -> ImageData:
    """The photos of one part as the test set, and all others to learn from.

    Every class is dealt out evenly. Who is in which part depends on the names of the photos alone: not on the split
    that the data has, nor on the order of its files.
    """
    part, parts = parsed_fold(fold)
    of_class: dict[int, list[Sample]] = {}
    for sample in sorted((*data.train, *data.test), key=lambda sample: str(sample.path)):
        of_class.setdefault(sample.label, []).append(sample)
    train, test, dealt = list[Sample](), list[Sample](), 0
    for label in sorted(of_class):
        own = of_class[label]
        random.Random(f"folds/{data.class_names[label]}").shuffle(own)
        for sample in own:
            # Goes on where the class before ended, so that parts differ by at most one photo.
            (test if dealt % parts == part else train).append(sample)
            dealt += 1
    return replace(data, train=tuple(train), test=tuple(test))
