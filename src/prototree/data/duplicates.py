"""Images that a data set holds more than once: exact copies by their bytes, and images that look alike by a perceptual
hash. A copy in training and test makes every metric too good; one in two classes cannot be learned. No torch here.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
from jaxtyping import Int16, Int64, UInt64
from numpy import ndarray
from PIL import Image

from prototree.data.dataset import ImageData, Sample
from prototree.data.images import read_image
from prototree.data.stat_cache import THREADS, photo_digests
from prototree.errors import DataError

logger = logging.getLogger(__name__)

MAX_HAMMING = 6  # of 64 bits: what recompression, another size, brightness or a cut of 1 % at each edge change at most
MAX_COLOUR = 6.0  # mean difference of 8×8 colours: hashes of different images may agree, their colours hardly ever do
MAX_NEIGHBOURS = 2048  # that a hash is compared with in each band, however many images are nearly the same
_EXAMPLES = 3
_SIDE, _KEPT = 32, 8  # of the grey image that is transformed, and of its lowest frequencies
_BANDS = MAX_HAMMING + 1  # hashes that differ in so few bits agree in at least one of so many parts
_ONES = np.array([value.bit_count() for value in range(2**16)], dtype=np.uint8)
_COSINES = np.cos(np.pi * np.outer(np.arange(_KEPT), 2 * np.arange(_SIDE) + 1) / (2 * _SIDE))


@dataclass(frozen=True)
class Placed:
    """An image, and the split that it is in."""

    sample: Sample
    split: str


Group = tuple[Placed, ...]
"""Images that are the same, or look alike, in the order of the data set."""
Pair = tuple[Placed, Placed]


def exact_copies(data: ImageData) -> list[Group]:
    """The images that are there more than once, byte for byte; only files of equal length are read."""
    placed = _placed(data)
    return _repeated(placed, _contents(placed))


def look_alikes(data: ImageData) -> list[Group]:
    """The images that look alike without being the same file; every image is decoded."""
    placed = _placed(data)
    contents = _contents(placed)
    paths = {content: one.sample.path for content, one in zip(contents, placed, strict=True)}
    with ThreadPoolExecutor(THREADS) as pool:
        found = dict(zip(paths, pool.map(_look, paths.values()), strict=True))
    crops = {content: look for content, look in found.items() if look is not None}
    if not crops:
        return []
    hashes = np.array([hash_ for hash_, _ in crops.values()], dtype=np.uint64)
    colours = np.stack([colours for _, colours in crops.values()])
    alike = dict(zip(crops, _chains(hashes, colours).tolist(), strict=True))
    groups = _repeated(placed, [alike.get(content, content) for content in contents])
    content_of = dict(zip(placed, contents, strict=True))
    return [group for group in groups if len({content_of[one] for one in group}) > 1]


def perceptual_hash(image: Image.Image) -> np.uint64:
    """pHash: which of the 64 lowest frequencies of the grey image are above their median."""
    grey = np.asarray(image.convert("L").resize((_SIDE, _SIDE), Image.Resampling.BOX), dtype=np.float64)
    frequencies = (_COSINES @ grey @ _COSINES.T).round(6).ravel()  # of a flat image exactly 0
    return np.uint64(np.packbits(frequencies > np.median(frequencies[1:])).view(np.uint64)[0])


def near_pairs(hashes: UInt64[ndarray, " n"]) -> Iterator[tuple[Int64[ndarray, " pairs"], Int64[ndarray, " pairs"]]]:
    """All pairs of hashes that differ in at most `MAX_HAMMING` bits, at most `n` at a time and some repeatedly.

    The bits are cut into bands. Hashes that are near agree in at least one band, so that only those with the same band
    are compared.
    """
    edges = [band * 64 // _BANDS for band in range(_BANDS + 1)]
    for low, high in pairwise(edges):
        band = (hashes >> np.uint64(low)) & np.uint64(2 ** (high - low) - 1)
        order = np.lexsort((hashes, band))
        band, ordered = band[order], hashes[order]
        left = np.arange(len(band))
        for step in range(1, min(len(band), MAX_NEIGHBOURS + 1)):
            left = left[: np.searchsorted(left, len(band) - step)]
            left = left[band[left] == band[left + step]]
            ones = _ONES[(ordered[left] ^ ordered[left + step]).view(np.uint16)].reshape(-1, 4)
            near = left[ones[:, 0] + ones[:, 1] + ones[:, 2] + ones[:, 3] <= MAX_HAMMING]
            yield order[near], order[near + step]


def _chains(hashes: UInt64[ndarray, " n"], colours: Int16[ndarray, "n 192"]) -> Int64[ndarray, " n"]:
    """For each image the first one that a chain of pairs that look alike leads to."""
    first = np.arange(len(hashes))
    for one, other in near_pairs(hashes):
        apart = first[one] != first[other]
        one, other = one[apart], other[apart]
        close = np.abs(colours[one] - colours[other]).mean(axis=1) <= MAX_COLOUR
        for pair in zip(one[close].tolist(), other[close].tolist(), strict=True):
            ends = [_end(first, place) for place in pair]
            first[max(ends)] = min(ends)
        while (first[first] != first).any():
            first = first[first]
    return first


def _end(first: Int64[ndarray, " n"], place: int) -> int:
    while first[place] != place:
        place = int(first[place])
    return place


def describe_copies(data: ImageData, copies: Sequence[Group]) -> list[str]:
    """What exact copies there are, one line for each kind, and folders that are links to others."""
    lines = [f"the folder {link} is a link to {target}" for link, target in _linked_folders(data)]
    for where, pairs in _across(copies):
        lines.append(f"{_images(len(pairs))} {where} {_named(data, pairs, '=', 1)}")
    if parts := _within_classes(copies):
        most = max(parts, key=len)
        times = f"{len(most):,} copies of one image in class {data.class_names[most[0].sample.label]}"
        many = f"{_images(len(parts))} more than once in a class, at most " if len(parts) > 1 else ""
        lines.append(f"{many}{times} {_named(data, [(most[0], most[1])], '=', 1)}")
    return lines


def describe_look_alikes(data: ImageData, alike: Sequence[Group]) -> list[str]:
    """What images look alike, one line for each kind, with a few of them by name."""
    within = [(part[0], part[1]) for part in _within_classes(alike)]
    kinds = [*_across(alike), *([("within a class", within)] if within else [])]
    return [
        f"{len(pairs):,} group{'s' * (len(pairs) > 1)} of images {where} {_named(data, pairs, '~', _EXAMPLES)}"
        for where, pairs in kinds
    ]


def warn_of_copies(data: ImageData) -> None:
    """Says which exact copies there are, before anything is learned from them."""
    if lines := describe_copies(data, exact_copies(data)):
        logger.warning(
            "%s holds the same image more than once, so its metrics may be too good:\n%s\n"
            "keep one of each; prototree data check --deep also finds images that look alike",
            data.root,
            "\n".join(lines),
        )


def _placed(data: ImageData) -> list[Placed]:
    """Every image once; a bootstrap sample holds some several times."""
    splits = (("training", data.train), ("test", data.test), ("validation", data.validation))
    once = {(sample.path, split): Placed(sample, split) for split, samples in splits for sample in samples}
    return list(once.values())


def _contents(placed: Sequence[Placed]) -> list[object]:
    """For each image something that only its copies have too."""
    lengths = {one.sample.path: _length(one.sample.path) for one in placed}
    counts = Counter(lengths.values())
    digests = photo_digests(path for path, length in lengths.items() if counts[length] > 1)
    return [digests.get(one.sample.path, one.sample.path) for one in placed]


def _length(path: Path) -> int | None:
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):
        return None


def _repeated(placed: Iterable[Placed], keys: Iterable[object]) -> list[Group]:
    """Those that have a key in common with another."""
    groups: dict[object, list[Placed]] = {}
    for one, key in zip(placed, keys, strict=True):
        groups.setdefault(key, []).append(one)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _look(path: Path) -> tuple[np.uint64, Int16[ndarray, "192"]] | None:
    """The hash of an image and its 8×8 colours at one brightness; None if it cannot be decoded."""
    try:
        image = read_image(path, at_least=4 * _SIDE)
    except DataError:
        return None
    colours = np.asarray(image.resize((8, 8), Image.Resampling.BOX), dtype=np.float32).ravel()
    return perceptual_hash(image), (colours * (128 / max(float(colours.mean()), 1.0))).astype(np.int16)


def _linked_folders(data: ImageData) -> list[tuple[str, str]]:
    """Folders of images that are another one under a second name, each with the other."""
    first: dict[str, Path] = {}
    links = dict[tuple[str, str], None]()
    for folder in dict.fromkeys(one.sample.path.parent for one in _placed(data)):
        link, target = folder, first.setdefault(os.path.realpath(folder), folder)
        if link == target:
            continue
        while link.name == target.name and not link.is_symlink() and not target.is_symlink():
            link, target = link.parent, target.parent
        if link.is_symlink() or target.is_symlink():
            links[(str(link), str(target)) if link.is_symlink() else (str(target), str(link))] = None
    return list(links)


def _across(groups: Sequence[Group]) -> list[tuple[str, list[Pair]]]:
    """The kinds of groups that are in two splits or classes, each with one pair of every group."""
    kinds = list[tuple[str, list[Pair]]]()
    for splits in combinations(("training", "test", "validation"), 2):
        pairs = [
            tuple(next((one for one in group if one.split == split), None) for split in splits) for group in groups
        ]
        kinds.append((f"in {splits[0]} and {splits[1]}", [(one, other) for one, other in pairs if one and other]))
    labels = [next((one for one in group if one.sample.label != group[0].sample.label), None) for group in groups]
    across = [(group[0], other) for group, other in zip(groups, labels, strict=True) if other]
    kinds.append(("in more than one class", across))
    return [(where, pairs) for where, pairs in kinds if pairs]


def _within_classes(groups: Sequence[Group]) -> list[Group]:
    """The parts of groups that are of one class."""
    return [part for group in groups for part in _repeated(group, [one.sample.label for one in group])]


def _images(count: int) -> str:
    return "1 image is" if count == 1 else f"{count:,} images are"


def _named(data: ImageData, pairs: Sequence[Pair], sign: str, count: int) -> str:
    """The first pairs by name."""
    names = [f"{_printable(data, one)} {sign} {_printable(data, other)}" for one, other in pairs[:count]]
    return f"({'first: ' if len(pairs) > count else ''}{'; '.join(names)})"


def _printable(data: ImageData, one: Placed) -> str:
    """The name of an image as text that can be written anywhere; a file's name need not be UTF-8."""
    return os.fsencode(data.name(one.sample)).decode(errors="replace")
