"""Decode an image as upright 8-bit RGB, whatever way it is stored, and encode small ones as WebP. No torch here.

Pillow decodes. Done here are EXIF rotation, transparency (put on white), 16-bit and floating-point greyscale (scaled,
where Pillow clips), a limit on pixels that holds before any memory is taken, and one error class (`DataError`, which
names the file). No setting of Pillow's is changed. AVIF is read where Pillow was built with it, HEIC where the package
pillow-heif is installed.
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
from PIL import Image, JpegImagePlugin, features
from PIL.Image import Transpose

from prototree.backbones.geometry import Size
from prototree.errors import DataError, NotAnImageError, TooLargeError
from prototree.io import open_regular

File = io.BufferedReader | io.BytesIO
Source = str | Path | bytes | File

MAX_PIXELS = 64_000_000
MAX_BYTES = 2**30  # of a file; four 16-bit channels of so many pixels have half of that
HEIC_REMEDY = "to read HEIC, install the package pillow-heif (pip install pillow-heif)"
HEIC_SUFFIXES = (".heic", ".heif", ".hif")

_SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
# Naming the formats keeps Pillow from trying its other plugins (some start programs) on untrusted files.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")
_HEIC = re.compile(rb".{4}ftyp(?:hei[cxms]|hev[cxms]|mif1|msf1)", re.DOTALL)
_HEIC_SIZE = re.compile(rb"ispe\0...(.{4})(.{4})", re.DOTALL)  # width and height of each image and tile in the file
_UNNAMED = "the image"  # what messages call one that came as bytes or pixels
_ORIENTATION_TAG = 0x0112
# What undoes each EXIF orientation.
_UPRIGHT = {
    2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM, 5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE, 8: Transpose.ROTATE_90,
}  # fmt: skip


@dataclass(frozen=True)
class LoadedImage:
    """A decoded upright RGB image, and the upright size of the file; the two differ after reduced decoding."""

    image: Image.Image
    size: Size


@cache
def suffixes() -> tuple[str, ...]:
    """File suffixes of the images that can be read here, which depends on what is installed."""
    avif = (".avif",) if features.check("avif") else ()
    return (*_SUFFIXES, *avif, *(HEIC_SUFFIXES if importlib.util.find_spec("pillow_heif") else ()))


def is_image(path: Path) -> bool:
    """Whether the name is that of an image we read; hidden files (and macOS's `._` companions) are not."""
    return path.suffix.lower() in suffixes() and not path.name.startswith(".")


def read_image(source: Source, *, at_least: int | None = None) -> Image.Image:
    """Decode a file, bytes or an open binary file as upright RGB (the first frame if there are several)."""
    return load_image(source, at_least=at_least).image


def load_image(source: Source, *, at_least: int | None = None) -> LoadedImage:
    """Decode an image as upright RGB, with the size of the whole image.

    With `at_least`, a JPEG may be decoded at a half, quarter or eighth of its size, as long as its shorter
    side keeps that many pixels; this is several times faster for large images that will be shrunk anyway.
    """
    with _opened(source) as (image, name):
        size = _upright_size(image)
        if at_least is not None and isinstance(image, JpegImagePlugin.JpegImageFile):
            image.draft(None, (at_least, at_least))
        return LoadedImage(_decode(image, name), size)


def reduction(size: Size, at_least: int | None) -> int:
    """The factor by which `load_image` reduces a JPEG of this size while decoding it."""
    times = min(size) // at_least if at_least else 1
    return next((factor for factor in (8, 4, 2) if times >= factor), 1)


def from_pillow(image: Image.Image) -> LoadedImage:
    """Convert an image that is already open to upright RGB, within the same limits."""
    _check_pixels(image.size, _UNNAMED)
    rgb = _decode(image, _UNNAMED)
    return LoadedImage(rgb, rgb.size)


def check_header(source: Source) -> Size:
    """Upright width and height from the first bytes of a file; a `DataError` if it is no image or too large."""
    with _opened(source) as (image, _):
        return _upright_size(image)


def webp(
    picture: UInt8[ndarray, "rows columns channels"], *, quality: int = 80, lossless: bool = False, method: int = 4
) -> bytes:
    """Encode an image of three or four channels as WebP; a higher `method` (0 to 6) is slower and gives fewer bytes."""
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
        except (OSError, ValueError) as error:  # ValueError: no file can have such a name
            raise DataError(f"{name!r} cannot be opened: {getattr(error, 'strerror', None) or error}") from error
    else:
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        name = str(getattr(source, "name", _UNNAMED))
    try:
        with _open_image(file, name) as image:
            _check_pixels(image.size, name)
            yield image, name
    finally:
        if file is not source:
            file.close()


def _open_image(file: File, name: str) -> Image.Image:
    try:
        return Image.open(file, formats=(*_FORMATS, *(("AVIF",) if features.check("avif") else ())))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        # Far above our own limit Pillow stops before it tells the width and height, only their product.
        match = re.search(r"(\d+) pixels", str(error))
        claim = f"{int(match[1]):,} pixels" if match else "far more pixels"
        raise TooLargeError(f"{name} claims {claim}, the limit is {MAX_PIXELS:,}; {_advice(name)}") from error
    except Exception as error:
        if (heic := _open_heic(file, name)) is not None:
            return heic
        if file.seek(0, os.SEEK_END) == 0:
            raise NotAnImageError(f"{name} is empty (0 bytes); {_advice(name)}") from error
        formats = "JPEG, PNG, WebP, BMP, TIFF, GIF, AVIF or HEIC"
        raise NotAnImageError(f"{name} is not an image we can read (expected {formats}); {_advice(name)}") from error


def _open_heic(file: File, name: str) -> Image.Image | None:
    """Open a HEIC image by its first bytes, whatever its name; None if the file holds none."""
    file.seek(0)
    content = file.read() if _HEIC.match(file.read(12)) else b""
    if not content:
        return None
    try:
        from pillow_heif import HeifImageFile
    except ImportError as error:
        raise NotAnImageError(f"{name} is a HEIC image; {HEIC_REMEDY}, or convert it to JPEG") from error
    for width, height in _HEIC_SIZE.findall(content):  # Pillow is told the size after cropping only
        _check_pixels((int.from_bytes(width), int.from_bytes(height)), name)
    file.seek(0)
    try:
        image: Image.Image = HeifImageFile(file)  # not registered with Pillow, whose other users would get it too
    except Exception as error:
        raise NotAnImageError(f"{name} is a damaged HEIC image ({error!r}); {_advice(name)}") from error
    return image


def _check_pixels(size: Size, name: str) -> None:
    width, height = size
    if width * height > MAX_PIXELS:
        claim = f"{width} x {height} = {width * height:,} pixels"
        raise TooLargeError(f"{name} claims {claim}, the limit is {MAX_PIXELS:,}; make it smaller, or {_advice(name)}")


def _advice(name: str) -> str:
    """What to do about an image that cannot be used; who handed over bytes has no file to remove."""
    return "choose another one" if name == _UNNAMED else "replace or remove it"


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation; 1 (upright) where there is none, it is damaged, or Pillow obeys it (TIFF)."""
    if image.format == "TIFF":
        return 1
    try:
        # The base class's method, since PNG's own would decode the whole image to look for a tag behind it.
        return int(Image.Image.getexif(image).get(_ORIENTATION_TAG, 1))
    except Exception:  # a damaged tag is no reason to refuse the image
        return 1


def _upright_size(image: Image.Image) -> Size:
    width, height = image.size
    return (height, width) if 5 <= _orientation(image) <= 8 else (width, height)


def _decode(image: Image.Image, name: str) -> Image.Image:
    """The opened image as upright RGB."""
    orientation = _orientation(image)
    try:
        image.load()
        rgb = _to_rgb(image)
    except Exception as error:  # decoders raise whatever their parser met
        raise DataError(f"{name} cannot be decoded ({str(error) or repr(error)}); {_advice(name)}") from error
    if orientation in _UPRIGHT:
        rgb = rgb.transpose(_UPRIGHT[orientation])
    rgb.info = {}  # its orientation and transparency have been applied; they must not be applied twice
    return rgb


def _to_rgb(image: Image.Image) -> Image.Image:
    """On white where it is transparent; greyscale of more than 8 bits scaled so that its white is white."""
    if image.mode == "F" or image.mode.startswith("I"):  # which Pillow would clip at 255
        values = np.nan_to_num(np.asarray(image, dtype=np.float64))
        brightest = float(values.max(initial=0.0))
        usual_whites = [1.0, 255.0, 65535.0] if image.mode == "F" else [65535.0]
        white = next((white for white in usual_whites if brightest <= white), brightest)
        image = Image.fromarray((values.clip(0.0) * (255.0 / white)).round().astype(np.uint8))
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")  # also of RGB a copy, detached from its file
