"""A look at a data set before any training: its numbers as text, and its photos as one contact sheet."""

import io
import math
import os
import statistics
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

from prototree.data.dataset import ImageData, Kind, Problem, Sample
from prototree.data.ignored import describe_others, describe_unread, unread_images
from prototree.data.images import read_image
from prototree.errors import ConfigError, DataError
from prototree.files import write_file

_SHOWN = 5

_PAPER = (255, 255, 255)
_INK = (33, 37, 41)
_FAINT = (134, 142, 150)
_GAP = 4
_MARGIN = 28


@dataclass(frozen=True)
class Spread:
    """Smallest, middle and largest of some numbers."""

    smallest: int
    median: float
    largest: int

    @classmethod
    def of(cls, values: Sequence[int]) -> "Spread":
        if not values:
            return cls(0, 0.0, 0)
        return cls(min(values), float(statistics.median(values)), max(values))


@dataclass(frozen=True)
class DataSummary:
    """What a data set holds; `smallest_classes` are names and training images of the classes with fewest."""

    root: Path
    kind: Kind
    n_classes: int
    n_train: int
    n_test: int
    n_validation: int
    train_per_class: Spread
    test_per_class: Spread
    widths: Spread
    heights: Spread
    n_boxes: int
    n_parts: int
    smallest_classes: tuple[tuple[str, int], ...]
    problems: tuple[Problem, ...]
    ignored: tuple[Path, ...]


def summarise(data: ImageData) -> DataSummary:
    """Counts of a data set; reads no file."""
    samples = data.train + data.test + data.validation
    sizes = [sample.size for sample in samples if sample.size is not None]
    train, test = (Counter(sample.label for sample in split) for split in (data.train, data.test))
    labels = range(data.n_classes)
    fewest_first = sorted(labels, key=lambda label: train[label])
    return DataSummary(
        root=data.root,
        kind=data.kind,
        n_classes=data.n_classes,
        n_train=len(data.train),
        n_test=len(data.test),
        n_validation=len(data.validation),
        train_per_class=Spread.of([train[label] for label in labels]),
        test_per_class=Spread.of([test[label] for label in labels]),
        widths=Spread.of([width for width, _ in sizes]),
        heights=Spread.of([height for _, height in sizes]),
        n_boxes=sum(sample.box is not None for sample in samples),
        n_parts=sum(len(sample.parts) for sample in samples),
        smallest_classes=tuple((data.class_names[label], train[label]) for label in fewest_first[:_SHOWN]),
        problems=data.problems,
        ignored=data.ignored,
    )


def render(summary: DataSummary, copies: Sequence[str] | None = None, alike: Sequence[str] | None = None) -> str:
    """The summary as a few aligned lines of plain text, with what is there more than once, if it was looked for."""
    validation = f", {summary.n_validation:,} validation" if summary.n_validation else ""
    rows = [
        ("data", str(summary.root)),
        ("format", summary.kind),
        ("classes", f"{summary.n_classes:,}"),
        ("images", f"{summary.n_train:,} training, {summary.n_test:,} test{validation}"),
        ("per class", f"{'training':<10}{_say(summary.train_per_class)}"),
        ("", f"{'test':<10}{_say(summary.test_per_class)}"),
        ("fewest", ", ".join(f"{name} ({count})" for name, count in summary.smallest_classes)),
        ("pixels", f"{'width':<10}{_say(summary.widths)}"),
        ("", f"{'height':<10}{_say(summary.heights)}"),
    ]
    if summary.n_boxes or summary.n_parts:
        rows.append(("known", f"{summary.n_boxes:,} boxes, {summary.n_parts:,} visible parts"))
    n_bad = len(summary.problems) + len(unread_images(summary.ignored))
    rows.append(("left out", f"{n_bad:,} file{'s' if n_bad > 1 else ''}" if n_bad else "nothing"))
    reasons = [describe_unread(summary.ignored), *(problem.reason for problem in summary.problems)]
    rows += [("", reason) for reason in reasons if reason]
    if others := describe_others(summary.ignored):
        rows.append(("not used", others))
    for name, lines in (("copies", copies), ("look alike", alike)):
        if lines is not None:
            rows += [(name, lines[0]), *(("", line) for line in lines[1:])] if lines else [(name, "none")]
    return "\n".join(f"{name:<11}{value}".rstrip() for name, value in rows)


def _say(spread: Spread) -> str:
    return f"{spread.smallest:g} to {spread.largest:g}, median {spread.median:g}"


def contact_sheet(data: ImageData, path: str | Path, *, per_class: int = 6, thumbnail: int = 96) -> None:
    """Writes a PNG of a few training photos of every class, spread evenly over the class's list."""
    if per_class < 1 or thumbnail < 16:
        raise ConfigError(f"expected per_class >= 1 and thumbnail >= 16, got {per_class} and {thumbnail}")
    sheet = _Sheet.planned(data.n_classes, per_class, thumbnail)
    by_class: dict[int, list[Sample]] = {label: [] for label in range(data.n_classes)}
    for sample in data.train:
        by_class[sample.label].append(sample)
    picture = Image.new("RGB", (sheet.width, sheet.height), _PAPER)
    draw = ImageDraw.Draw(picture)
    _write_title(draw, data, sheet)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for label, samples in by_class.items():
            left, top = sheet.corner(label)
            _write_name(draw, data.class_names[label], len(samples), (left, top), sheet)
            thumbnails = pool.map(lambda sample: _thumbnail(sample, thumbnail), _evenly(samples, per_class))
            for place, small in enumerate(thumbnails):
                picture.paste(small, (left + place * (thumbnail + _GAP), top + sheet.caption))
    content = io.BytesIO()
    picture.save(content, format="PNG")
    write_file(Path(path), content.getvalue())


@dataclass(frozen=True)
class _Sheet:
    """Where things go: blocks (a caption above a row of thumbnails) fill columns from top to bottom."""

    thumbnail: int
    per_class: int
    columns: int
    rows: int

    @classmethod
    def planned(cls, n_classes: int, per_class: int, thumbnail: int) -> "_Sheet":
        block_width = per_class * (thumbnail + _GAP) + _MARGIN
        block_height = thumbnail * 1.45
        # About as wide as high, and never a single tower of classes.
        columns = max(round(math.sqrt(n_classes * block_height / block_width)), 1)
        return cls(thumbnail, per_class, columns, math.ceil(n_classes / columns))

    @property
    def text_size(self) -> int:
        return max(round(self.thumbnail * 0.16), 9)

    @property
    def caption(self) -> int:
        return round(self.text_size * 1.5)

    @property
    def header(self) -> int:
        return self.text_size * 4

    @property
    def block(self) -> tuple[int, int]:
        width = self.per_class * (self.thumbnail + _GAP) - _GAP
        return width, self.caption + self.thumbnail + round(self.thumbnail * 0.18)

    @property
    def width(self) -> int:
        return self.columns * (self.block[0] + _MARGIN) + _MARGIN

    @property
    def height(self) -> int:
        return self.header + self.rows * self.block[1] + _MARGIN // 2

    def corner(self, label: int) -> tuple[int, int]:
        column, row = divmod(label, self.rows)
        return _MARGIN + column * (self.block[0] + _MARGIN), self.header + row * self.block[1]


def _write_title(draw: ImageDraw.ImageDraw, data: ImageData, sheet: _Sheet) -> None:
    large, small = _font(round(sheet.text_size * 1.5)), _font(sheet.text_size)
    title = data.root.stem or str(data.root)
    place = (float(_MARGIN), sheet.header * 0.45)
    draw.text(place, title, fill=_INK, font=large, anchor="lm")
    counts = f"{data.n_classes} classes, {len(data.train):,} training and {len(data.test):,} test images"
    after = place[0] + large.getlength(title) + sheet.text_size
    if after + small.getlength(counts) < sheet.width - _MARGIN:
        draw.text((after, place[1] + 1), counts, fill=_FAINT, font=small, anchor="lm")


def _write_name(draw: ImageDraw.ImageDraw, name: str, count: int, corner: tuple[int, int], sheet: _Sheet) -> None:
    font = _font(sheet.text_size)
    number = f"{count:,}"
    room = sheet.block[0] - font.getlength(number) - sheet.text_size
    shown = name
    while font.getlength(shown) > room and len(shown) > 1:
        shown = shown.removesuffix("…")[:-1].rstrip() + "…"
    baseline = corner[1] + sheet.caption * 0.68
    draw.text((corner[0], baseline), shown, fill=_INK, font=font, anchor="ls")
    draw.text((corner[0] + sheet.block[0], baseline), number, fill=_FAINT, font=font, anchor="rs")


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _evenly(samples: Sequence[Sample], count: int) -> list[Sample]:
    count = min(count, len(samples))
    return [samples[place * len(samples) // count] for place in range(count)]


def _thumbnail(sample: Sample, side: int) -> Image.Image:
    """The middle of the photo as a square; a grey one where it cannot be read."""
    try:
        image = read_image(sample.path, at_least=side)
    except DataError:
        return Image.new("RGB", (side, side), _FAINT)
    return ImageOps.fit(image, (side, side), Image.Resampling.BICUBIC)
