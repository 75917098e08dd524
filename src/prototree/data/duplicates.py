"""Duplicate images of a data set: exact copies by their bytes, and near-duplicates by a perceptual hash.

A copy in training and test makes every metric too good; one in two classes cannot be learned. No torch here.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int16, Int64, UInt64
from numpy import ndarray
from PIL import Image

from prototree.data.dataset import ImageData, Sample
from prototree.data.images import read_image
from prototree.data.scan import THREADS, file_digests
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


class SplitSample(NamedTuple):
    """An image, and the split that it is in."""

    sample: Sample
    split: str


Group = tuple[SplitSample, ...]
"""Images that are the same, or look alike, in the order of the data set."""


def exact_duplicates(data: ImageData) -> list[Group]:
    """Find the images that are there more than once, byte for byte; only files of equal length are read."""
    images = _all_images(data)
    return _repeated(images, _content_keys(images))


def near_duplicates(data: ImageData) -> list[Group]:
    """Find the images that look alike without being the same file; every image is decoded."""
    images = _all_images(data)
    keys = _content_keys(images)
    paths = {key: image.sample.path for key, image in zip(keys, images, strict=True)}
    with ThreadPoolExecutor(THREADS) as pool:
        hashed = zip(paths, pool.map(_hash_and_colours, paths.values()), strict=True)
        known = {key: value for key, value in hashed if value is not None}
    if not known:
        return []
    hashes, colours = (np.stack(values) for values in zip(*known.values(), strict=True))
    cluster = dict(zip(known, _clusters(hashes, colours).tolist(), strict=True))
    groups = _repeated(zip(images, keys, strict=True), [cluster.get(key, key) for key in keys])
    return [tuple(image for image, _ in group) for group in groups if len({key for _, key in group}) > 1]


def _hash_and_colours(path: Path) -> tuple[np.uint64, Int16[ndarray, "192"]] | None:
    """The pHash of an image (which of the 64 lowest frequencies of its grey values are above their median), and its
    8×8 colours at one brightness; None if it cannot be decoded.
    """
    try:
        image = read_image(path, at_least=4 * _SIDE)
    except DataError:
        return None
    grey = np.asarray(image.convert("L").resize((_SIDE, _SIDE), Image.Resampling.BOX), dtype=np.float64)
    frequencies = (_COSINES @ grey @ _COSINES.T).round(6).ravel()  # of a flat image exactly 0
    bits = np.packbits(frequencies > np.median(frequencies[1:])).view(np.uint64)[0]
    colours = np.asarray(image.resize((8, 8), Image.Resampling.BOX), dtype=np.float32).ravel()
    return np.uint64(bits), (colours * (128 / max(float(colours.mean()), 1.0))).astype(np.int16)


def near_pairs(hashes: UInt64[ndarray, " n"]) -> Iterator[tuple[Int64[ndarray, " pairs"], Int64[ndarray, " pairs"]]]:
    """All pairs of hashes that differ in at most `MAX_HAMMING` bits, at most `n` at a time and some repeatedly.

    The bits are cut into bands. Hashes that are near agree in at least one band, so that only those with the same band
    are compared.
    """
    for low, high in pairwise(band * 64 // _BANDS for band in range(_BANDS + 1)):
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


def _clusters(hashes: UInt64[ndarray, " n"], colours: Int16[ndarray, "n 192"]) -> Int64[ndarray, " n"]:
    """The cluster of each image: connected components of the pairs that look alike."""
    from scipy.sparse import coo_array  # slow to import, and for deep checks alone
    from scipy.sparse.csgraph import connected_components

    cluster = np.arange(len(hashes))
    for a, b in near_pairs(hashes):
        differ = cluster[a] != cluster[b]
        a, b = a[differ], b[differ]
        close = np.abs(colours[a] - colours[b]).mean(axis=1) <= MAX_COLOUR
        if close.any():
            pairs = (cluster[a[close]], cluster[b[close]])
            graph = coo_array((np.ones(len(pairs[0])), pairs), shape=(len(hashes), len(hashes)))
            cluster = connected_components(graph, directed=False)[1].astype(np.int64)[cluster]
    return cluster


def _all_images(data: ImageData) -> list[SplitSample]:
    """Every image once; a bootstrap sample holds some several times."""
    splits = (("training", data.train), ("test", data.test), ("validation", data.validation_split))
    once = {(sample.path, split): SplitSample(sample, split) for split, samples in splits for sample in samples}
    return list(once.values())


def _content_keys(images: Sequence[SplitSample]) -> list[object]:
    """For each image something that only its copies have too."""

    def length(path: Path) -> int | None:
        try:
            return os.stat(path).st_size
        except (OSError, ValueError):
            return None

    lengths = {image.sample.path: length(image.sample.path) for image in images}
    counts = Counter(lengths.values())
    digests = file_digests(path for path, n_bytes in lengths.items() if counts[n_bytes] > 1)
    return [digests.get(image.sample.path, image.sample.path) for image in images]


def _repeated(values: Iterable[Any], keys: Iterable[object]) -> list[tuple[Any, ...]]:
    """Groups of values that have a key in common."""
    groups: dict[object, list[Any]] = {}
    for value, key in zip(values, keys, strict=True):
        groups.setdefault(key, []).append(value)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def describe_duplicates(data: ImageData, groups: Sequence[Group]) -> list[str]:
    """What exact copies there are, one line for each kind, and folders that are links to others."""
    lines = [f"the folder {link} is a link to {target}" for link, target in _linked_folders(data)]
    *across, (_, parts) = _kinds(groups)
    lines += [f"{_images(len(pairs))} {where} {_names(data, pairs, '=', 1)}" for where, pairs in across if pairs]
    if parts:
        most = max(parts, key=len)
        times = f"{len(most):,} copies of one image in class {data.class_names[most[0].sample.label]}"
        many = f"{_images(len(parts))} more than once in a class, at most " if len(parts) > 1 else ""
        lines.append(f"{many}{times} {_names(data, [most], '=', 1)}")
    return lines


def describe_near_duplicates(data: ImageData, groups: Sequence[Group]) -> list[str]:
    """What images look alike, one line for each kind, with a few of them by name."""
    return [
        f"{len(pairs):,} group{'s' * (len(pairs) > 1)} of images {where} {_names(data, pairs, '~', _EXAMPLES)}"
        for where, pairs in _kinds(groups)
        if pairs
    ]


def warn_about_duplicates(data: ImageData) -> None:
    """Log which exact copies there are, before anything is trained on them."""
    if lines := describe_duplicates(data, exact_duplicates(data)):
        head = f"{data.root} holds the same image more than once, so its metrics may be too good:"
        advice = "keep one of each; prototree data check --deep also finds images that look alike"
        logger.warning("%s", "\n".join([head, *lines, advice]))


def _linked_folders(data: ImageData) -> list[tuple[str, str]]:
    """Folders of images that are another one under a second name, each with the other."""
    first: dict[str, Path] = {}
    links = dict[tuple[str, str], None]()
    for folder in dict.fromkeys(image.sample.path.parent for image in _all_images(data)):
        link, target = folder, first.setdefault(os.path.realpath(folder), folder)
        while link != target and link.name == target.name and not link.is_symlink() and not target.is_symlink():
            link, target = link.parent, target.parent
        if link != target and (link.is_symlink() or target.is_symlink()):
            links[(str(link), str(target)) if link.is_symlink() else (str(target), str(link))] = None
    return list(links)


def _kinds(groups: Sequence[Group]) -> list[tuple[str, list[Group]]]:
    """Pairs of images in two splits, pairs in two classes, and last the parts of groups that are of one class."""
    by_split = [{image.split: image for image in reversed(group)} for group in groups]
    kinds: list[tuple[str, list[Group]]] = [
        (f"in {a} and {b}", [(images[a], images[b]) for images in by_split if {a, b} <= images.keys()])
        for a, b in combinations(("training", "test", "validation"), 2)
    ]
    across = [(group[0], *(im for im in group if im.sample.label != group[0].sample.label)) for group in groups]
    kinds.append(("in more than one class", [group for group in across if len(group) > 1]))
    parts = [part for group in groups for part in _repeated(group, [image.sample.label for image in group])]
    return [*kinds, ("within a class", parts)]


def _images(count: int) -> str:
    return "1 image is" if count == 1 else f"{count:,} images are"


def _names(data: ImageData, groups: Sequence[Group], sign: str, count: int) -> str:
    """The first two images of the first groups by name, as text that can be written anywhere."""
    names = [
        f" {sign} ".join(os.fsencode(data.name(image.sample)).decode(errors="replace") for image in group[:2])
        for group in groups[:count]
    ]
    return f"({'first: ' if len(groups) > count else ''}{'; '.join(names)})"
