import contextlib
import io
import struct
import sys
import zlib
from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image

from data_files import four_colours, smooth_photo
from prototree.data.images import MAX_PIXELS, check_header, from_pillow, is_image, load_image, read_image, webp
from prototree.errors import DataError, NotAnImageError, TooLargeError

ORIENTATION = 0x0112


def as_bytes(image: Image.Image, form: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def difference(image: Image.Image, expected: Image.Image) -> float:
    assert (image.mode, image.size) == ("RGB", expected.size)
    return float(np.abs(np.asarray(image, float) - np.asarray(expected.convert("RGB"), float)).max())


def png_header(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims a size."""
    fields = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", fields) + chunk(b"IDAT", zlib.compress(b"0")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("form", "tolerance"), [("PNG", 0), ("BMP", 0), ("TIFF", 0), ("JPEG", 8), ("WEBP", 40)])
def test_formats_decode_to_the_same_picture(form: str, tolerance: float) -> None:
    photo = smooth_photo((64, 48))
    options = {} if tolerance == 0 else {"quality": 100}
    assert difference(read_image(as_bytes(photo, form, **options)), photo) <= tolerance


def test_modes_and_frames() -> None:
    for mode in ("L", "1", "P"):
        image = four_colours().convert(mode)
        assert difference(read_image(as_bytes(image, "PNG")), image) == 0
    red = Image.new("CMYK", (32, 32), (0, 255, 255, 0))
    for form in ("JPEG", "TIFF"):
        decoded = read_image(as_bytes(red, form))
        assert difference(decoded, Image.new("RGB", (32, 32), (255, 0, 0))) <= 4, "not inverted"
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue")]
    for form in ("MPO", "GIF"):
        content = as_bytes(frames[0], form, save_all=True, append_images=frames[1:])
        assert difference(read_image(content), frames[0]) <= 2, "the first is read"


def test_path_string_bytes_and_open_file_agree(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    smooth_photo().save(path)
    for source in (path, str(path), path.read_bytes(), io.BytesIO(path.read_bytes())):
        assert difference(read_image(source), smooth_photo()) == 0
    with open(path, "rb") as file:
        assert difference(read_image(file), smooth_photo()) == 0
        assert not file.closed


def test_transparent_pixels_lie_on_white() -> None:
    rgba = Image.new("RGBA", (4, 2), (0, 0, 255, 255))
    rgba.putpixel((0, 0), (255, 0, 0, 0))
    rgba.putpixel((1, 0), (0, 0, 0, 51))
    image = read_image(as_bytes(rgba, "PNG"))
    assert [image.getpixel((x, 0)) for x in range(3)] == [(255, 255, 255), (204, 204, 204), (0, 0, 255)]


@pytest.mark.parametrize("transparency", [1, bytes([255, 0, 255])])
def test_palette_with_transparency_lies_on_white(transparency: int | bytes) -> None:
    image = Image.new("P", (3, 1))
    image.putpalette([10, 20, 30, 200, 0, 0, 0, 0, 250])
    image.putdata([0, 1, 2])
    decoded = read_image(as_bytes(image, "PNG", transparency=transparency))
    assert list(decoded.tobytes()) == [10, 20, 30, 255, 255, 255, 0, 0, 250]


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_clipped(form: str) -> None:
    values = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    decoded = np.asarray(read_image(as_bytes(Image.fromarray(values), form)))
    assert decoded[0, :, 0].tolist() == [0, 1, 128, 255]
    assert (decoded[..., :1] == decoded).all()


@pytest.mark.parametrize(
    ("values", "expected"),
    [([0.0, 0.5, 1.0], [0, 128, 255]), ([0.0, 100.0, 255.0], [0, 100, 255]), ([-5.0, 1e6, 2e6], [0, 128, 255])],
)
def test_floating_point_greyscale_is_scaled(values: list[float], expected: list[int]) -> None:
    image = Image.fromarray(np.array([values], dtype=np.float32))
    assert np.asarray(read_image(as_bytes(image, "TIFF")))[0, :, 0].tolist() == expected


UPRIGHT = {
    1: lambda image: image,
    2: lambda image: image[:, ::-1],
    3: lambda image: image[::-1, ::-1],
    4: lambda image: image[::-1],
    5: lambda image: image.swapaxes(0, 1),
    6: lambda image: np.rot90(image, -1),
    7: lambda image: image[::-1, ::-1].swapaxes(0, 1),
    8: lambda image: np.rot90(image, 1),
}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_rotation_marks_are_obeyed(orientation: int, form: str) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    options = {"quality": 100, "subsampling": 0} if form == "JPEG" else {"lossless": True} if form == "WEBP" else {}
    content = as_bytes(four_colours(), form, exif=exif, **options)
    expected = Image.fromarray(np.ascontiguousarray(UPRIGHT[orientation](np.asarray(four_colours()))))
    image = read_image(content)
    assert difference(image, expected) <= 8
    assert check_header(content) == expected.size
    assert image.getexif().get(ORIENTATION, 1) == 1, "nobody should turn it a second time"


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_impossible_rotation_marks_are_ignored() -> None:
    for mark in (0, 9, 77):
        exif = Image.Exif()
        exif[ORIENTATION] = mark
        for notes in (exif.tobytes(), b"Exif\x00\x00II*\x00\xff\xff\xff\xff"):
            content = as_bytes(four_colours(), "JPEG", exif=notes)
            assert read_image(content).size == check_header(content) == (64, 32)


@pytest.mark.parametrize(
    ("at_least", "size"), [(None, (801, 401)), (500, (801, 401)), (200, (401, 201)), (60, (201, 101)), (50, (101, 51))]
)
def test_reduced_decoding_keeps_the_shorter_side(at_least: int | None, size: tuple[int, int]) -> None:
    content = as_bytes(smooth_photo((801, 401)), "JPEG", quality=95)
    photo = load_image(content, at_least=at_least)
    assert photo.size == (801, 401)
    assert min(photo.image.size) >= min(at_least or 0, 401)
    assert photo.image.size == size
    whole = smooth_photo((801, 401)).resize(photo.image.size, Image.Resampling.BOX)
    assert difference(photo.image, whole) <= 16


@pytest.mark.parametrize(
    ("content", "kind", "token"),
    [
        (b"", NotAnImageError, "empty"),
        (b"not a picture", NotAnImageError, "not an image"),
        (as_bytes(smooth_photo(), "EPS"), NotAnImageError, "not an image"),
        (as_bytes(smooth_photo(), "PNG")[:80], DataError, "cannot be"),
    ],
)
def test_files_that_are_no_images_are_named(tmp_path: Path, content: bytes, kind: type, token: str) -> None:
    (tmp_path / "notes.jpg").write_bytes(content)
    with pytest.raises(kind, match=rf"notes\.jpg .*{token}.*remove it"):
        read_image(tmp_path / "notes.jpg")
    with pytest.raises(kind, match=r"^the image .*choose another one$"):
        read_image(content)


@pytest.mark.parametrize("name", ["gone.jpg", ".", "a\0.jpg"])
def test_files_that_cannot_be_opened(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="cannot be opened"):
        read_image(tmp_path / name)


@pytest.mark.parametrize(
    ("width", "height", "claim"),
    [
        (8001, 8000, "8001 x 8000 = 64,008,000 pixels"),
        (12_000, 10_000, "120,000,000"),
        (60_000, 60_000, "3,600,000,000"),
    ],
)
def test_small_file_that_claims_a_huge_picture(tmp_path: Path, width: int, height: int, claim: str) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header(width, height))
    for look in (read_image, check_header):
        with pytest.raises(TooLargeError) as caught:
            look(path)
        for part in (str(path), claim, f"{MAX_PIXELS:,}"):
            assert part in str(caught.value)


def test_an_open_picture_has_the_same_limit_and_may_be_of_any_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    grey = Image.new("LA", (2, 1), (0, 255))
    grey.putpixel((1, 0), (0, 0))
    assert list(from_pillow(grey).image.tobytes()) == [0, 0, 0, 255, 255, 255]
    monkeypatch.setattr("prototree.data.images.MAX_PIXELS", 100)
    with pytest.raises(TooLargeError):
        from_pillow(Image.new("RGB", (11, 10)))


@pytest.mark.parametrize("channels", [3, 4])
def test_webp_keeps_every_pixel_if_it_must(channels: int) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (9, 14, channels), dtype=np.uint8)
    picture[..., 3:] = 200  # what cannot be seen at all need not be kept
    with Image.open(io.BytesIO(webp(picture, lossless=True))) as image:
        assert image.format == "WEBP"
        assert np.array_equal(np.asarray(image), picture)
    mirrored = picture[:, ::-1]  # not contiguous in memory
    assert webp(mirrored) == webp(mirrored.copy())


def avif(photo: Image.Image, **options: object) -> bytes:
    pytest.importorskip("PIL._avif", reason="this Pillow was built without AVIF")
    return as_bytes(photo, "AVIF", quality=95, **options)


def heic(photo: Image.Image, **info: object) -> bytes:
    pillow_heif = pytest.importorskip("pillow_heif", reason="pillow-heif, the extra heic, is not installed")
    file, image = io.BytesIO(), pillow_heif.from_pillow(photo)
    image.info.update(info)
    image.save(file, quality=95)
    return file.getvalue()


MODERN = {"avif": avif, "heic": heic}


@pytest.mark.parametrize("form", MODERN)
def test_avif_and_heic_are_read_whatever_they_are_called(tmp_path: Path, form: str) -> None:
    photo = smooth_photo((64, 48))
    content = MODERN[form](photo)
    assert is_image(Path(f"a.{form.upper()}"))
    assert not is_image(Path(f"a/._b.{form}"))
    path = tmp_path / "renamed.jpg"
    path.write_bytes(content)
    for source in (content, path):
        assert difference(read_image(source, at_least=8), photo) <= 25
    assert check_header(path) == (64, 48)


@pytest.mark.parametrize("form", MODERN)
def test_avif_and_heic_stand_upright_within_the_limit(form: str) -> None:
    photo, exif = four_colours((64, 32)), Image.Exif()
    exif[ORIENTATION] = 6
    content = MODERN[form](photo, exif=exif.tobytes())
    assert check_header(content) == (32, 64)
    corners = [image.resize((2, 2)) for image in (read_image(content), photo.transpose(Image.Transpose.ROTATE_270))]
    assert difference(*corners) <= 40
    start = content.index(b"ispe") + 8
    with pytest.raises(TooLargeError, match="72,000,000"):
        check_header(content[:start] + struct.pack(">II", 9_000, 8_000) + content[start + 8 :])


@pytest.mark.parametrize("form", MODERN)
def test_damaged_avif_and_heic_are_data_errors(form: str) -> None:
    content = MODERN[form](smooth_photo((64, 48)))
    random = Random(0)
    for length in (20, 100, len(content) // 2, len(content) - 20):
        with pytest.raises(DataError):
            read_image(content[:length])
    for _ in range(30):
        damaged = bytearray(content)
        for _ in range(5):
            damaged[random.randrange(12, len(damaged))] = random.randrange(256)
        with contextlib.suppress(DataError):
            read_image(bytes(damaged))


def test_heic_is_named_where_it_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(NotAnImageError, match="pillow-heif"):
        read_image(b"\0\0\0\x18ftypheic" + bytes(40))


def test_heic_changes_nothing_for_others_who_use_pillow() -> None:
    content = heic(smooth_photo())
    read_image(content)
    with pytest.raises(OSError, match="cannot identify"):
        Image.open(io.BytesIO(content))
