"""A zoo of files that are called images: each is read as upright RGB, or left out with one clear line."""

import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data_files import smooth_photo, write_classes
from prototree.data import open_data
from prototree.data.images import load_image
from prototree.errors import DataError, ProtoTreeError
from prototree.pipeline.fit import fit
from tiny_training import TINY, TINY_DISTILL, write_squares


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds next to nothing."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return header + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


PHOTO = smooth_photo((40, 30))
JPEG = encoded(PHOTO, "JPEG")
NOISE = np.random.default_rng(0).integers(0, 256, 4000, dtype=np.uint8).tobytes()
FRAMES = [smooth_photo((20, 20), seed) for seed in range(3)]

READABLE = {
    "grey.jpg": encoded(PHOTO.convert("L"), "JPEG"),
    "cmyk.jpg": encoded(PHOTO.convert("CMYK"), "JPEG"),
    "progressive.jpg": encoded(PHOTO, "JPEG", progressive=True),
    "palette.png": encoded(PHOTO.convert("P"), "PNG"),
    "one bit.png": encoded(PHOTO.convert("1"), "PNG"),
    "alpha.png": encoded(PHOTO.convert("RGBA"), "PNG"),
    "grey alpha.png": encoded(PHOTO.convert("LA"), "PNG"),
    "sixteen.png": encoded(Image.fromarray(np.full((8, 8), 40_000, dtype=np.uint16)), "PNG"),
    "float.tif": encoded(Image.fromarray(np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)), "TIFF"),
    "lzw.tiff": encoded(PHOTO, "TIFF", compression="tiff_lzw"),
    "animated.gif": encoded(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]),
    "animated.webp": encoded(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:]),
    "lossless.webp": encoded(PHOTO, "WEBP", lossless=True),
    "plain.bmp": encoded(PHOTO, "BMP"),
    "one pixel.png": encoded(Image.new("RGB", (1, 1)), "PNG"),
    "thin.png": encoded(Image.new("RGB", (4000, 1)), "PNG"),
    "a png called.jpg": encoded(PHOTO, "PNG"),
    "odd mark.jpg": encoded(PHOTO, "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\xff\xff\0\0"),
    "damaged mark.jpg": encoded(PHOTO, "JPEG", exif=b"Exif\0\0" + NOISE[:50]),
    "more behind it.jpg": JPEG + NOISE,
    "name\nof two lines.jpg": JPEG,
    "-rf.jpg": JPEG,
    "日本 🐦.jpg": JPEG,
    "[red]markup.jpg": JPEG,
}
UNREADABLE = {
    "empty.jpg": b"",
    "noise.jpg": NOISE,
    "text.png": b"hello",
    "page.gif": b"<html><script>alert(1)</script>",
    "half.jpg": JPEG[: len(JPEG) // 2],
    "half.png": encoded(PHOTO, "PNG")[:400],
    "only a head.jpg": JPEG[:200],
    "huge.png": png_header(2**31 - 1, 2**31 - 1),
    "large.png": png_header(60_000, 60_000),
    "claims more than it holds.png": png_header(4000, 4000),
    "no pixels.png": png_header(0, 10),
    "zip.tiff": b"PK\x03\x04" + NOISE,
    "pickle.bmp": b"\x80\x04\x95" + NOISE,
}


def hole(path: Path, start: bytes = b"") -> None:
    path.write_bytes(start)
    os.truncate(path, 20 << 30)


NO_FILES: dict[str, Callable[[Path], None]] = {
    "pipe.jpg": os.mkfifo,
    "device.jpg": lambda path: path.symlink_to("/dev/zero"),
    "hole.jpg": hole,
    "photo with a hole.jpg": lambda path: hole(path, JPEG[:200]),
    "dangling.jpg": lambda path: path.symlink_to(path.with_name("nowhere")),
    "loop.jpg": lambda path: path.symlink_to(path),
}


@pytest.mark.filterwarnings("ignore")  # Pillow says aloud what it thinks of damaged marks
def test_every_animal_of_the_zoo(tmp_path: Path) -> None:
    for name, content in (READABLE | UNREADABLE).items():
        (tmp_path / name).write_bytes(content)
    for name, make in NO_FILES.items():
        make(tmp_path / name)
    (tmp_path / "folder.jpg").mkdir()
    for name in READABLE:
        assert load_image(tmp_path / name).image.mode == "RGB", name
    for name in (*UNREADABLE, *NO_FILES, "folder.jpg"):
        with pytest.raises(DataError):
            load_image(tmp_path / name)


@pytest.mark.parametrize("deep", [False, True])
def test_a_data_set_goes_on_without_them(tmp_path: Path, deep: bool) -> None:
    root = write_classes(tmp_path, {"a": 5, "b": 5})
    for name, content in UNREADABLE.items():
        (root / "a" / name).write_bytes(content)
    for name, make in NO_FILES.items():
        make(root / "b" / name)
    data = open_data(root, deep=deep)
    left_out = {file.path.name for file in data.unreadable}
    cut = {"half.jpg", "half.png", "only a head.jpg", "claims more than it holds.png"}
    assert len(data.train) + len(data.test) == (10 if deep else 10 + len(cut - left_out))
    assert set(NO_FILES) <= left_out
    assert deep == (cut <= left_out), "only decoding finds what breaks off in the middle"


@pytest.mark.parametrize("settings", [TINY, TINY_DISTILL], ids=["paper", "distill"])
def test_training_without_one_readable_photo_is_one_clear_error(tmp_path: Path, settings: dict[str, Any]) -> None:
    root = write_squares(tmp_path / "photos", train=2, test=1)
    for path in (root / "train").rglob("*.png"):
        path.write_bytes(path.read_bytes()[:1000])  # a head, and nothing more
    with pytest.raises(ProtoTreeError):
        fit(root, tmp_path / "run", settings=settings)
