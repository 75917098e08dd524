"""What pages show of each class: some of its photos, and the answers for its test photos."""

import logging
from collections.abc import Iterable, Sequence

from prototree.data import ImageData
from prototree.data.images import read_photo
from prototree.errors import DataError
from prototree.explain.prototype_pictures import CLASS_SIDE, reduced
from prototree.explain.records import ClassExplanation, Picture

log = logging.getLogger(__name__)

_PHOTOS = 4  # of a class
_MOST_PHOTOS = 1200  # of all classes, so that a page of many classes stays small


def class_photos(data: ImageData) -> list[tuple[Picture, ...]]:
    """Some training photos of each class, spread evenly over it. One that cannot be read is left out."""
    of_class: list[list[int]] = [[] for _ in data.class_names]
    for place, sample in enumerate(data.train):
        of_class[sample.label].append(place)
    most = max(1, min(_PHOTOS, _MOST_PHOTOS // max(len(of_class), 1)))
    return [tuple(_read(data, _evenly(places, most))) for places in of_class]


def explain_classes(
    photos: Sequence[tuple[Picture, ...]], confusion: Iterable[tuple[int, int, int]]
) -> tuple[ClassExplanation, ...]:
    """The photos, and the answers for test photos: true class, answer and number of photos of each pair."""
    n_test, right = [0] * len(photos), [0] * len(photos)
    wrong: list[list[tuple[int, int]]] = [[] for _ in photos]
    for true, said, count in confusion:
        n_test[true] += count
        if true == said:
            right[true] = count
        else:
            wrong[true].append((said, count))
    return tuple(
        ClassExplanation(
            photos=own,
            n_test=n_test[label],
            accuracy=right[label] / n_test[label] if n_test[label] else None,
            taken_for=tuple(sorted(wrong[label], key=lambda pair: -pair[1])),
        )
        for label, own in enumerate(photos)
    )


def _evenly(places: Sequence[int], most: int) -> list[int]:
    count = min(most, len(places))
    return [places[i * len(places) // count] for i in range(count)]


def _read(data: ImageData, places: Sequence[int]) -> list[Picture]:
    found = []
    for place in places:
        try:
            found.append(reduced(read_photo(data.train[place].path, at_least=CLASS_SIDE), CLASS_SIDE))
        except DataError as error:
            log.warning("a photo of %s is left out: %s", data.class_names[data.train[place].label], error)
    return found
