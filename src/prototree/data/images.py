"""From file to photo and back. Reads a photo as upright 8-bit RGB, whatever way it is stored; anything else is a
`DataError` that names the file. Writes small pictures as WebP. No torch here.

Pillow decodes. What it leaves to the caller is done here: the camera's rotation mark, transparency (put on
white), 16-bit and floating-point greyscale (scaled, where Pillow clips), a limit on pixels that holds before
any memory is taken, and one kind of error for the many that decoders raise. No setting of Pillow's is
changed, so nothing here affects other users of it in the process. AVIF is read where Pillow was built with it, HEIC
where the package pillow-heif is installed.
"""

import importlib.util
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from numpy import ndarray
from PIL import Image, JpegImagePlugin

from prototree.backbones.geometry import Size
from prototree.errors import DataError, NotAnImageError, TooLargeError
from prototree.files import open_regular

File = io.BufferedReader | io.BytesIO
Source = str | Path | bytes | File

MAX_PIXELS = 64_000_000
MAX_BYTES = 2**30  # of a file; four 16-bit channels of so many pixels have half of that
HEIC_REMEDY = "to read HEIC, install the package pillow-heif (pip install pillow-heif)"
HEIC_SUFFIXES = (".heic", ".heif", ".hif")

_SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
# Naming the formats keeps Pillow from trying its other plugins (some start programs) on files nobody vouches
# for.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")
_HEIC = re.compile(rb".{4}ftyp(?:hei[cxms]|hev[cxms]|mif1|msf1)", re.DOTALL)
_HEIC_SIZE = re.compile(rb"ispe\0...(.{4})(.{4})", re.DOTALL)  # width and height of each image and tile in the file
_UNNAMED = "the image"  # what messages call one that came as bytes or pixels
_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True)
class Photo:
    """A decoded upright RGB picture, and the upright size of the file; the two differ after reduced decoding."""

    image: Image.Image
    size: Size


@cache
def suffixes() -> tuple[str, ...]:
    """How the names of images end that can be read here, which depends on what is installed."""
    avif = (".avif",) if _reads_avif() else ()
    return (*_SUFFIXES, *avif, *(HEIC_SUFFIXES if importlib.util.find_spec("pillow_heif") else ()))


@cache
def _reads_avif() -> bool:
    return importlib.util.find_spec("PIL._avif") is not None


def is_image(path: Path) -> bool:
    """Whether the name is that of an image we read; hidden files (and macOS's `._` companions) are not."""
    return path.suffix.lower() in suffixes() and not path.name.startswith(".")


def read_image(source: Source, *, at_least: int | None = None) -> Image.Image:
    """The picture in a file, in bytes or in an open binary file, as upright RGB (the first frame if it has
    several).

    With `at_least`, a JPEG may be decoded at a half, quarter or eighth of its size, as long as its shorter
    side keeps that many pixels; this is several times faster for large photos that will be shrunk anyway.
    """
    return read_photo(source, at_least=at_least).image


def read_photo(source: Source, *, at_least: int | None = None) -> Photo:
    """As `read_image`, with the size of the whole photo."""
    with _opened(source) as (image, name):
        orientation, size = _orientation(image), _upright_size(image)
        if at_least is not None and isinstance(image, JpegImagePlugin.JpegImageFile):
            image.draft(None, (at_least, at_least))
        try:
            image.load()
            rgb = _to_rgb(image)
        except Exception as error:  # decoders raise whatever their parser met
            raise DataError(f"{name} cannot be decoded ({_say(error)}); {_advice(name)}") from error
    if orientation in _UPRIGHT:
        rgb = rgb.transpose(_UPRIGHT[orientation])
    rgb.info = {}  # its rotation mark and transparency have been applied; they must not be applied twice
    return Photo(rgb, size)


def reduction(size: Size, at_least: int | None) -> int:
    """By how much a JPEG of this size is reduced while it is decoded: photos reduced alike are the same picture."""
    times = min(size) // at_least if at_least else 1
    return next((factor for factor in (8, 4, 2) if times >= factor), 1)


def from_pillow(image: Image.Image) -> Photo:
    """A picture that is already open, as upright RGB within the same limits."""
    _check_pixels(image.size, _UNNAMED)
    orientation = _orientation(image)
    try:
        rgb = _to_rgb(image)
    except Exception as error:
        raise DataError(f"{_UNNAMED} cannot be decoded ({_say(error)}); {_advice(_UNNAMED)}") from error
    if orientation in _UPRIGHT:
        rgb = rgb.transpose(_UPRIGHT[orientation])
    rgb.info = {}
    return Photo(rgb, rgb.size)


def check_header(source: Source) -> Size:
    """Upright width and height from the first bytes of a file; a `DataError` if it is no image or too large."""
    with _opened(source) as (image, _):
        return _upright_size(image)


def webp(
    picture: UInt8[ndarray, "rows columns channels"], *, quality: int = 80, lossless: bool = False, method: int = 4
) -> bytes:
    """A picture, of three channels or of four with transparency, as a WebP file.

    A higher `method` (0 to 6) takes longer and gives fewer bytes.
    """
    file = io.BytesIO()
    image = Image.fromarray(np.ascontiguousarray(picture))
    image.save(file, "WEBP", quality=quality, lossless=lossless, method=method)
    return file.getvalue()


@contextmanager
def _opened(source: Source) -> Iterator[tuple[Image.Image, str]]:
    """An opened but not yet decoded image within the pixel limit, and its name for messages."""
    if isinstance(source, str | Path):
        name = str(source)
        try:
            file: File = open_regular(source, MAX_BYTES)
        except OSError as error:
            raise DataError(f"{name} cannot be opened: {error.strerror or error}") from error
        except ValueError as error:  # no file can have such a name
            raise DataError(f"{name!r} cannot be opened: {error}") from error
    else:
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        name = str(getattr(source, "name", _UNNAMED))
    try:
        with _open_image(file, name) as image:
            yield image, name
    finally:
        if file is not source:
            file.close()


def _open_image(file: File, name: str) -> Image.Image:
    try:
        image: Image.Image = Image.open(file, formats=(*_FORMATS, *(("AVIF",) if _reads_avif() else ())))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        # Far above our own limit Pillow stops before it tells the width and height, only their product.
        found = re.search(r"(\d+) pixels", str(error))
        raise _too_large(name, f"{int(found[1]):,} pixels" if found else "far more pixels") from error
    except Exception as error:
        if (heic := _open_heic(file, name)) is None:
            raise _no_image(file, name) from error
        image = heic
    _check_pixels(image.size, name)
    return image


def _open_heic(file: File, name: str) -> Image.Image | None:
    """A HEIC image by its first bytes, whatever its name; None if the file holds none.

    The size that is told is that after cropping, so all sizes in the file are held to the limit.
    """
    file.seek(0)
    content = file.read() if _HEIC.match(file.read(12)) else b""
    if not content:
        return None
    try:
        from pillow_heif import HeifImageFile
    except ImportError as error:
        raise NotAnImageError(f"{name} is a HEIC image; {HEIC_REMEDY}, or convert it to JPEG") from error
    for width, height in _HEIC_SIZE.findall(content):
        _check_pixels((int.from_bytes(width), int.from_bytes(height)), name)
    file.seek(0)
    try:
        image: Image.Image = HeifImageFile(file)  # not registered with Pillow, whose other users would get it too
    except Exception as error:
        raise NotAnImageError(f"{name} is a damaged HEIC image ({_say(error)}); {_advice(name)}") from error
    return image


def _no_image(file: File, name: str) -> NotAnImageError:
    if file.seek(0, os.SEEK_END) == 0:
        return NotAnImageError(f"{name} is empty (0 bytes); {_advice(name)}")
    return NotAnImageError(
        f"{name} is not an image we can read (expected JPEG, PNG, WebP, BMP, TIFF, GIF, AVIF or HEIC); {_advice(name)}"
    )


def _check_pixels(size: Size, name: str) -> None:
    if size[0] * size[1] > MAX_PIXELS:
        raise _too_large(name, f"{size[0]} x {size[1]} = {size[0] * size[1]:,} pixels")


def _too_large(name: str, claim: str) -> TooLargeError:
    otherwise = "" if name == _UNNAMED else " or remove it"
    return TooLargeError(f"{name} claims {claim}, the limit is {MAX_PIXELS:,}; make it smaller{otherwise}")


def _advice(name: str) -> str:
    """What to do about an image that cannot be used; who handed over bytes has no file to remove."""
    return "choose another one" if name == _UNNAMED else "replace or remove it"


def _say(error: Exception) -> str:
    return str(error) or type(error).__name__


def _orientation(image: Image.Image) -> int:
    """The camera's rotation mark; 1 (upright) where there is none, it is damaged, or Pillow obeys it (TIFF)."""
    if image.format == "TIFF":
        return 1
    try:
        # The base class's method, since PNG's own would decode the whole picture to look for a mark behind
        # it.
        return int(Image.Image.getexif(image).get(_ORIENTATION_TAG, 1))
    except Exception:  # a damaged mark is no reason to refuse the picture
        return 1


def _upright_size(image: Image.Image) -> Size:
    width, height = image.size
    return (height, width) if 5 <= _orientation(image) <= 8 else (width, height)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image.copy()  # detached from its file
    if image.mode == "F" or image.mode.startswith("I"):
        image = _to_eight_bits(image)
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Greyscale of more than 8 bits, scaled so that its white is white; Pillow would clip it at 255."""
    values = np.nan_to_num(np.asarray(image, dtype=np.float64))
    brightest = float(values.max(initial=0.0))
    usual_whites = [1.0, 255.0, 65535.0] if image.mode == "F" else [65535.0]
    white = next((white for white in usual_whites if brightest <= white), brightest)
    return Image.fromarray((values.clip(0.0) * (255.0 / white)).round().astype(np.uint8))
