"""`prototree data check`: the numbers of a data set as text, and its images as one contact sheet."""

import io
import math
import os
import statistics
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

from prototree.data.dataset import ImageData
from prototree.data.folder import describe_ignored, describe_unsupported, unsupported_images
from prototree.data.images import read_image
from prototree.errors import ConfigError, DataError
from prototree.io import write_file

_SHOWN = 5  # classes with the fewest images
_PAPER, _INK, _FAINT = (255, 255, 255), (33, 37, 41), (134, 142, 150)
_GAP, _MARGIN = 4, 28


def _groups_text(n_groups: int, n_images: int) -> str:
    if n_groups == n_images:
        return f"{n_groups:,} of one image each, which keep nothing together; check the column group"
    return f"{n_groups:,} of {n_images:,} images, each kept together in splits"


def summarize(
    data: ImageData, copies: Sequence[str] | None = None, near_duplicates: Sequence[str] | None = None
) -> str:
    """Describe the data set in a few aligned lines, with what is there more than once, if it was looked for."""
    samples = data.train + data.test + data.validation_split
    sizes = [sample.size for sample in samples if sample.size is not None]
    train, test = (Counter(sample.label for sample in split) for split in (data.train, data.test))
    labels = range(data.n_classes)
    fewest = sorted(labels, key=lambda label: train[label])[:_SHOWN]
    validation = f", {len(data.validation_split):,} validation" if data.validation_split else ""
    n_bad = len(data.unreadable) + len(unsupported_images(data.ignored))
    reasons = [describe_unsupported(data.ignored), *(file.reason for file in data.unreadable)]
    n_groups = len({sample.group for sample in samples} - {""})
    n_boxes, n_parts = sum(sample.box is not None for sample in samples), sum(len(sample.parts) for sample in samples)
    rows = [
        ("data", str(data.root)),
        ("format", "list" if data.kind == "manifest" else data.kind),
        ("classes", f"{data.n_classes:,}"),
        ("images", f"{len(data.train):,} training, {len(data.test):,} test{validation}"),
        ("per class", f"{'training':<10}{_range([train[label] for label in labels])}"),
        ("", f"{'test':<10}{_range([test[label] for label in labels])}"),
        ("fewest", ", ".join(f"{data.class_names[label]} ({train[label]})" for label in fewest)),
        ("pixels", f"{'width':<10}{_range([width for width, _ in sizes])}"),
        ("", f"{'height':<10}{_range([height for _, height in sizes])}"),
        *([("groups", _groups_text(n_groups, len(samples)))] if n_groups else []),
        *([("known", f"{n_boxes:,} boxes, {n_parts:,} visible parts")] if n_boxes or n_parts else []),
        ("left out", f"{n_bad:,} file{'s' if n_bad > 1 else ''}" if n_bad else "nothing"),
        *(("", reason) for reason in reasons if reason),
    ]
    if ignored := describe_ignored(data.ignored):
        rows.append(("not used", ignored))
    for name, lines in (("copies", copies), ("look alike", near_duplicates)):
        if lines is not None:
            rows += zip([name, *[""] * len(lines)], lines or ["none"], strict=False)
    return "\n".join(f"{name:<11}{value}".rstrip() for name, value in rows)


def _range(values: Sequence[int]) -> str:
    low, median, high = (min(values), statistics.median(values), max(values)) if values else (0, 0, 0)
    return f"{low:g} to {high:g}, median {median:g}" if low < high else f"{low:g} each"


def contact_sheet(data: ImageData, path: str | Path, *, per_class: int = 6, thumbnail: int = 96) -> None:
    """Write a PNG of a few training images of every class, spread evenly over the class's list."""
    if per_class < 1 or thumbnail < 16:
        raise ConfigError(f"expected per_class >= 1 and thumbnail >= 16, got {per_class} and {thumbnail}")
    text_size = max(round(thumbnail * 0.16), 9)
    caption, header = round(text_size * 1.5), text_size * 4
    # A block is a caption above a row of thumbnails; blocks fill columns from top to bottom, about as wide as high.
    width, height = per_class * (thumbnail + _GAP) - _GAP, caption + thumbnail + round(thumbnail * 0.18)
    columns = max(round(math.sqrt(data.n_classes * 1.45 * thumbnail / (width + _GAP + _MARGIN))), 1)
    n_rows = math.ceil(data.n_classes / columns)
    sheet = Image.new("RGB", (columns * (width + _MARGIN) + _MARGIN, header + n_rows * height + _MARGIN // 2), _PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(text_size)

    def write_line(name: str, counts: str, left: int, baseline: float, right: int) -> None:
        """A name, cut to what fits between the edges, and counts at the right."""
        room = right - left - font.getlength(counts) - font.getlength("m")
        while font.getlength(name) > (room if room > 0 else right - left) and len(name) > 1:
            name = name.removesuffix("…")[:-1].rstrip() + "…"
        draw.text((left, baseline), name, fill=_INK, font=font, anchor="ls")
        if room > 0:
            draw.text((right, baseline), counts, fill=_FAINT, font=font, anchor="rs")

    counts = f"{data.n_classes} classes, {len(data.train):,} training and {len(data.test):,} test images"
    write_line(data.root.stem or str(data.root), counts, _MARGIN, header * 0.55, sheet.width - _MARGIN)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for label, name in enumerate(data.class_names):
            paths = [sample.path for sample in data.train if sample.label == label]
            column, row = divmod(label, n_rows)
            left, top = _MARGIN + column * (width + _MARGIN), header + row * height
            write_line(name, f"{len(paths):,}", left, top + caption * 0.68, left + width)
            count = min(per_class, len(paths))
            chosen = [paths[index * len(paths) // count] for index in range(count)]
            for index, image in enumerate(pool.map(_thumbnail, chosen, [thumbnail] * count)):
                sheet.paste(image, (left + index * (thumbnail + _GAP), top + caption))
    content = io.BytesIO()
    sheet.save(content, format="PNG")
    write_file(Path(path), content.getvalue())


def _thumbnail(path: Path, side: int) -> Image.Image:
    """The middle of the image as a square; a grey one where it cannot be read."""
    try:
        image = read_image(path, at_least=side)
    except DataError:
        return Image.new("RGB", (side, side), _FAINT)
    return ImageOps.fit(image, (side, side), Image.Resampling.BICUBIC)
