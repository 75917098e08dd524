"""Drawings as PDF pages and as PNG, through matplotlib: it brings a font with most of the world's letters, and
`lettering` finds others.

Marks are handed to matplotlib's renderers directly. Its artists would take ten times as long for a large tree, and
would store a picture anew each time it is shown.
"""

import io
import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8
from numpy import ndarray
from PIL import Image

from prototree.errors import MissingExtraError
from prototree.explain.records import Picture
from prototree.report.lettering import families_for
from prototree.report.marks import Block, Drawing, Label, Mark, PhotoMark, Stroke
from prototree.report.text import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNITS_PER_INCH = 96.0
_POINTS = 72 / UNITS_PER_INCH  # matplotlib measures text and lines in these


def pdf(drawings: Iterable[Drawing], title: str) -> bytes:
    """One page a drawing."""
    drawings = list(drawings)
    with _matplotlib(drawings):
        from matplotlib.backends.backend_pdf import PdfPages

        file, pictures = io.BytesIO(), PdfPictures()
        # No date, so that the same tree gives the same file.
        with PdfPages(file, metadata={"Title": plain(title), "CreationDate": None, "Creator": "prototree"}) as pages:
            for drawing in drawings:
                pages.savefig(_figure(drawing, UNITS_PER_INCH, pictures))
    return file.getvalue()


def image(drawing: Drawing, scale: float = 2.0) -> Image.Image:
    """As pixels, `scale` of them a unit."""
    with _matplotlib([drawing]):
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas: Any = FigureCanvasAgg(_figure(drawing, scale * UNITS_PER_INCH, PdfPictures()))
        canvas.draw()
        return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


class PdfPictures:
    """The pictures of a PDF, each once: the renderer stores the same array only the first time."""

    def __init__(self) -> None:
        self._stored: dict[tuple[tuple[int, ...], bytes], UInt8[ndarray, "_ _ 4"]] = {}

    def for_pdf(self, picture: Picture) -> UInt8[ndarray, "_ _ 4"]:
        """With at most 256 colours, which takes a third of the room, and its lowest row first."""
        key = picture.shape, picture.tobytes()
        if key not in self._stored:
            few = Image.fromarray(picture).quantize(256, Image.Quantize.FASTOCTREE)
            self._stored[key] = np.asarray(few.convert("RGBA"))[::-1]
        return self._stored[key]


@contextmanager
def _matplotlib(drawings: Sequence[Drawing]) -> Iterator[None]:
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plot") from error
    fonts = families_for(mark.text for drawing in drawings for mark in drawing.marks if isinstance(mark, Label))
    settings: Any = {"font.family": fonts, "pdf.fonttype": 42, "text.usetex": False}
    quiet = logging.getLogger("fontTools")
    level = quiet.level
    with warnings.catch_warnings(), matplotlib.rc_context(settings):
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        quiet.setLevel(logging.ERROR)
        try:
            yield
        finally:
            quiet.setLevel(level)


def _figure(drawing: Drawing, dpi: float, pictures: PdfPictures) -> "Figure":
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

    class Marks(Artist):
        def draw(self, renderer: Any) -> None:
            _Painter(drawing, renderer, pictures).draw()

    figure = Figure(figsize=(drawing.width / UNITS_PER_INCH, drawing.height / UNITS_PER_INCH), dpi=dpi)
    figure.add_artist(Marks())
    return figure


class _Painter:
    """One drawing on one renderer, which counts in its own dots from the lower left corner."""

    def __init__(self, drawing: Drawing, renderer: Any, pictures: PdfPictures) -> None:
        self.drawing, self.renderer, self.pictures = drawing, renderer, pictures
        self.dots = renderer.points_to_pixels(_POINTS)  # a unit

    def draw(self) -> None:
        for mark in self.drawing.marks:
            self._draw_mark(mark)

    def _at(self, x: float, y: float) -> tuple[float, float]:
        return x * self.dots, (self.drawing.height - y) * self.dots

    def _draw_mark(self, mark: Mark) -> None:
        if isinstance(mark, Label):
            self._label(mark)
        elif isinstance(mark, PhotoMark):
            self._photo(mark)
        elif isinstance(mark, Stroke):
            from matplotlib.path import Path

            pen = self._pen(mark.colour, mark.thickness, mark.dashed)
            self._path(pen, Path([self._at(x, y) for x, y in mark.points]), None)
        else:
            self._block(mark)

    def _pen(self, colour: str, thickness: float, dashed: bool = False) -> Any:
        pen = self.renderer.new_gc()
        pen.set_foreground(colour or "none")
        pen.set_linewidth(thickness * _POINTS if colour else 0.0)
        pen.set_joinstyle("round")
        if dashed:
            pen.set_dashes(0, [5 * _POINTS, 4 * _POINTS])
        return pen

    def _path(self, pen: Any, path: Any, fill: Any) -> None:
        from matplotlib.transforms import IdentityTransform

        self.renderer.draw_path(pen, path, IdentityTransform(), fill)
        pen.restore()

    def _block(self, mark: Block) -> None:
        from matplotlib.colors import to_rgba
        from matplotlib.patches import BoxStyle

        left, bottom = self._at(mark.x, mark.y + mark.height)
        radius = mark.radius * self.dots
        style = BoxStyle.Round(pad=0, rounding_size=radius) if radius else BoxStyle.Square(pad=0)
        path = style(left, bottom, mark.width * self.dots, mark.height * self.dots, 1.0)
        self._path(self._pen(mark.stroke, mark.thickness), path, to_rgba(mark.fill) if mark.fill else None)

    def _label(self, mark: Label) -> None:
        from matplotlib.font_manager import FontProperties

        # The font is a little wider than those of SVG viewers.
        font = FontProperties(size=0.94 * mark.size * _POINTS, weight="bold" if mark.bold else "normal")
        text = plain(mark.text)
        if not text:
            return
        x, y = self._at(mark.x, mark.y)
        width, _, _ = self.renderer.get_text_width_height_descent(text, font, False)
        x -= {"start": 0.0, "middle": 0.5, "end": 1.0}[mark.anchor] * width
        pen = self._pen(mark.colour, 1.0)
        # Only renderers of pixels count text from the upper edge.
        self.renderer.draw_text(pen, x, self._from_top(y), text, font, 0)
        pen.restore()

    def _from_top(self, y: float) -> float:
        return self.drawing.height * self.dots - y if self.renderer.flipy() else y

    def _photo(self, mark: PhotoMark) -> None:
        from matplotlib.transforms import Affine2D

        left, bottom = self._at(mark.x, mark.y + mark.height)
        width, height = mark.width * self.dots, mark.height * self.dots
        pen = self.renderer.new_gc()
        if self.renderer.option_scale_image():
            picture = self.pictures.for_pdf(mark.picture)
            self.renderer.draw_image(pen, left, bottom, picture, Affine2D().scale(width, height))
        else:
            size = max(1, round(width)), max(1, round(height))
            pixels = Image.fromarray(mark.picture).resize(size, Image.Resampling.LANCZOS).convert("RGBA")
            self.renderer.draw_image(pen, round(left), round(bottom), np.array(pixels)[::-1])
        pen.restore()
