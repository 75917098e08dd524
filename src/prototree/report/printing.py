"""Drawings as PDF pages and as PNG, through matplotlib: it brings its own font with most of the world's letters."""

import io
import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from prototree.errors import MissingExtraError
from prototree.report.drawing import Block, Drawing, Label, Mark, Photo, Stroke
from prototree.report.words import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNITS_PER_INCH = 96.0

# For letters that the font at hand lacks, where the reader's machine has one of these.
_OTHER_FONTS = ("Noto Sans", "Noto Sans CJK SC", "Noto Sans Arabic", "Noto Sans Hebrew", "Noto Emoji", "Symbola")


def pdf(drawings: Iterable[Drawing], title: str) -> bytes:
    """One page a drawing."""
    with _matplotlib():
        from matplotlib.backends.backend_pdf import PdfPages

        file = io.BytesIO()
        # No date, so that the same tree gives the same file.
        with PdfPages(file, metadata={"Title": plain(title), "CreationDate": None, "Creator": "prototree"}) as pages:
            for drawing in drawings:
                pages.savefig(_figure(drawing, for_pdf=True))
    return file.getvalue()


def image(drawing: Drawing, scale: float = 2.0) -> Image.Image:
    """As pixels, `scale` of them a unit."""
    with _matplotlib():
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas: Any = FigureCanvasAgg(_figure(drawing, dpi=scale * UNITS_PER_INCH))
        canvas.draw()
        return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


@contextmanager
def _matplotlib() -> Iterator[None]:
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plot") from error
    from matplotlib import font_manager

    have = set(font_manager.get_font_names())
    fonts = ["DejaVu Sans", *(font for font in _OTHER_FONTS if font in have)]
    settings: Any = {"font.family": fonts, "pdf.fonttype": 42, "text.usetex": False, "path.simplify": False}
    quiet = logging.getLogger("fontTools")
    level = quiet.level
    with warnings.catch_warnings(), matplotlib.rc_context(settings):
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        quiet.setLevel(logging.ERROR)
        try:
            yield
        finally:
            quiet.setLevel(level)


def _figure(drawing: Drawing, *, dpi: float = UNITS_PER_INCH, for_pdf: bool = False) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(drawing.width / UNITS_PER_INCH, drawing.height / UNITS_PER_INCH), dpi=dpi)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)  # down the page, as everywhere else
    for order, mark in enumerate(drawing.marks):
        _add(axes, mark, order, for_pdf)
    return figure


def _add(axes: Any, mark: Mark, order: int, for_pdf: bool) -> None:
    points = 72 / UNITS_PER_INCH  # matplotlib measures text and lines in these
    if isinstance(mark, Label):
        axes.text(
            mark.x, mark.y, plain(mark.text), fontsize=0.94 * mark.size * points, color=mark.colour, zorder=order,
            ha={"start": "left", "middle": "center", "end": "right"}[mark.anchor], va="baseline",
            fontweight="bold" if mark.bold else "normal", parse_math=False,
        )  # fmt: skip
    elif isinstance(mark, Stroke):
        xs, ys = zip(*mark.points, strict=True)
        style = (0, (5 / mark.thickness, 4 / mark.thickness)) if mark.dashed else "-"
        axes.plot(
            xs, ys, color=mark.colour, linewidth=mark.thickness * points, linestyle=style, zorder=order, marker="",
            scalex=False, scaley=False, solid_joinstyle="round",
        )  # fmt: skip
    elif isinstance(mark, Photo):
        _add_photo(axes, mark, order, for_pdf)
    else:
        _add_block(axes, mark, order, points)


def _add_block(axes: Any, mark: Block, order: int, points: float) -> None:
    from matplotlib.patches import FancyBboxPatch, Rectangle

    look: dict[str, Any] = {
        "facecolor": mark.fill or "none",
        "edgecolor": mark.stroke or "none",
        "linewidth": mark.thickness * points if mark.stroke else 0,
        "zorder": order,
    }
    if mark.radius:
        style = f"round,pad=0,rounding_size={mark.radius}"
        patch: Any = FancyBboxPatch((mark.x, mark.y), mark.width, mark.height, boxstyle=style, **look)
    else:
        patch = Rectangle((mark.x, mark.y), mark.width, mark.height, **look)
    axes.add_patch(patch)


def _add_photo(axes: Any, mark: Photo, order: int, for_pdf: bool) -> None:
    picture = mark.picture
    if for_pdf:  # a picture of at most 256 colours takes a third of the room in a PDF
        picture = np.asarray(Image.fromarray(picture).quantize(256).convert("RGB"))
    axes.imshow(
        picture, extent=(mark.x, mark.x + mark.width, mark.y + mark.height, mark.y), zorder=order, aspect="auto",
        interpolation="none" if for_pdf else "antialiased", origin="upper",
    )  # fmt: skip
