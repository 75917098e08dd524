"""Figures as lists of marks, and such a figure as SVG. `printing` makes PDF and PNG from the same marks.

Lengths are in units of a CSS pixel; text is placed by its baseline.
"""

import base64
import math
import unicodedata
from dataclasses import dataclass, replace
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

from prototree.explain.records import Picture
from prototree.report.images import jpeg
from prototree.report.text import plain

Anchor = Literal["start", "middle", "end"]

PAPER, INK, SOFT_INK, FAINT, RULE = "#ffffff", "#1d2521", "#5d6863", "#f3f5f2", "#cdd5cf"
PRESENT_INK, ABSENT_INK, BOX_INK = "#0b6e62", "#737d77", "#ffd400"


@dataclass(frozen=True)
class Block:
    """A filled or outlined rectangle."""

    x: float
    y: float
    width: float
    height: float
    fill: str = ""
    stroke: str = ""
    thickness: float = 1.0
    radius: float = 0.0


@dataclass(frozen=True)
class Stroke:
    """A line through some points."""

    points: tuple[tuple[float, float], ...]
    colour: str = RULE
    thickness: float = 1.5
    dashed: bool = False


@dataclass(frozen=True)
class Label:
    """One line of text."""

    x: float
    y: float
    text: str
    size: float = 11.0
    colour: str = INK
    anchor: Anchor = "middle"
    bold: bool = False


@dataclass(frozen=True)
class PhotoMark:
    """A picture stretched over a rectangle."""

    x: float
    y: float
    width: float
    height: float
    picture: Picture


Mark = Block | Stroke | Label | PhotoMark


@dataclass(frozen=True)
class Drawing:
    """A figure of some width and height; later marks lie over earlier ones."""

    width: float
    height: float
    marks: tuple[Mark, ...]

    def svg(self, title: str) -> str:
        """As a file that stands alone."""
        body = "\n".join(map(_svg_mark, self.marks))
        return (
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'width="{self.width:.0f}" height="{self.height:.0f}" '
            f'viewBox="0 0 {self.width:.1f} {self.height:.1f}" font-family="{_FONTS}">\n'
            f"<title>{escape(plain(title))}</title>\n"
            f'<rect width="100%" height="100%" fill="{PAPER}"/>\n{body}\n</svg>\n'
        )


def moved(mark: Mark, across: float, down: float) -> Mark:
    """The mark at another place."""
    if isinstance(mark, Stroke):
        return replace(mark, points=tuple((x + across, y + down) for x, y in mark.points))
    return replace(mark, x=mark.x + across, y=mark.y + down)


def scaled(mark: Mark, factor: float) -> Mark:
    """The mark as it is in a figure so many times as large."""
    if isinstance(mark, Stroke):
        points = tuple((factor * x, factor * y) for x, y in mark.points)
        return replace(mark, points=points, thickness=factor * mark.thickness)
    place = replace(mark, x=factor * mark.x, y=factor * mark.y)
    if isinstance(place, Label):
        return replace(place, size=factor * place.size)
    sized = replace(place, width=factor * place.width, height=factor * place.height)
    if isinstance(sized, Block):
        return replace(sized, thickness=factor * sized.thickness, radius=factor * sized.radius)
    return sized


def text_width(text: str, size: float) -> float:
    """About how wide a line is; there is no font at hand to ask, so this is on the safe side."""
    ems = 0.0
    for character in text:
        if unicodedata.combining(character):
            continue
        wide = unicodedata.east_asian_width(character) in "WF"
        ems += 1.05 if wide else 0.34 if character in " .,:;'|!ijlt()[]·" else 0.74 if character.isupper() else 0.57
    return ems * size


def hue_ink(hue: float) -> str:
    """A colour of this hue, in degrees, as dark as the others: oklch(0.56 0.12 hue), which is what the page has."""
    a, b = 0.12 * math.cos(math.radians(hue)), 0.12 * math.sin(math.radians(hue))
    long, middle, short = (
        (0.56 + x * a + y * b) ** 3
        for x, y in ((0.3963377774, 0.2158037573), (-0.1055613458, -0.0638541728), (-0.0894841775, -1.2914855480))
    )
    linear = (
        4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * middle + 1.7076147010 * short,
    )
    bent = (12.92 * x if x <= 0.0031308 else 1.055 * x ** (1 / 2.4) - 0.055 for x in (max(x, 0.0) for x in linear))
    return "#" + "".join(f"{round(255 * min(x, 1.0)):02x}" for x in bent)


def wrapped(text: str, size: float, width: float, most_lines: int | None) -> list[str]:
    """The text in at most so many lines, the last one cut with an ellipsis if need be; None: as many as it takes, and
    words that are too long for a line are broken."""
    lines: list[str] = []
    words = plain(text).split(" ")
    if most_lines is None:
        words = [piece for word in words for piece in _broken(word, size, width)]
    for word in words:
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    if most_lines is not None and len(lines) > most_lines:
        lines = [*lines[: most_lines - 1], " ".join(lines[most_lines - 1 :])]
    return [_cut(line, size, width) for line in lines]


def paragraph(
    text: str, x: float, y: float, width: float, *, size: float = 11.0, most_lines: int | None = 2,
    anchor: Anchor = "middle", colour: str = INK, bold: bool = False,
) -> list[Label]:  # fmt: skip
    """Lines of text under each other, the first with its baseline at `y`."""
    lines = wrapped(text, size, width, most_lines)
    return [Label(x, y + 1.25 * size * i, line, size, colour, anchor, bold) for i, line in enumerate(lines)]


_FONTS = "'Helvetica Neue', Arial, 'Liberation Sans', 'DejaVu Sans', 'Noto Sans', 'Noto Sans CJK SC', sans-serif"


def _broken(word: str, size: float, width: float) -> list[str]:
    """The word in pieces that fit, a letter together with the marks upon it."""
    pieces = [""]
    for character in word:
        joins = unicodedata.category(character).startswith("M") or character in "\u200d\ufe0f"
        if pieces[-1] and not joins and text_width(pieces[-1] + character, size) > width:
            pieces.append("")
        pieces[-1] += character
    return pieces


def _cut(line: str, size: float, width: float) -> str:
    if text_width(line, size) <= width:
        return line
    while line and text_width(line + "…", size) > width:
        line = line[:-1]
    return line.rstrip() + "…"


def _svg_mark(mark: Mark) -> str:
    if isinstance(mark, Label):
        weight = ' font-weight="600"' if mark.bold else ""
        return (
            f'<text x="{mark.x:.1f}" y="{mark.y:.1f}" font-size="{mark.size:.1f}" fill="{mark.colour}" '
            f'text-anchor="{mark.anchor}"{weight}>{escape(plain(mark.text))}</text>'
        )
    if isinstance(mark, Stroke):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in mark.points)
        dashes = ' stroke-dasharray="5 4"' if mark.dashed else ""
        return (
            f'<polyline points="{points}" fill="none" stroke="{mark.colour}" stroke-width="{mark.thickness:.1f}" '
            f'stroke-linejoin="round"{dashes}/>'
        )
    place = f'x="{mark.x:.1f}" y="{mark.y:.1f}" width="{mark.width:.1f}" height="{mark.height:.1f}"'
    if isinstance(mark, PhotoMark):
        content = quoteattr(f"data:image/jpeg;base64,{base64.b64encode(jpeg(mark.picture)).decode()}")
        return f'<image {place} preserveAspectRatio="none" xlink:href={content}/>'
    return (
        f'<rect {place} rx="{mark.radius:.1f}" fill="{mark.fill or "none"}" stroke="{mark.stroke or "none"}" '
        f'stroke-width="{mark.thickness:.1f}"/>'
    )
