"""Small pictures for pages and print: reduced, with a heat map laid over them, and encoded."""

import base64
import io

import numpy as np
from jaxtyping import Float, UInt8
from numpy import ndarray
from PIL import Image

from prototree.backbones.geometry import Box
from prototree.data.images import webp
from prototree.explain.records import AROUND, Heat, Match, Picture, Surroundings

PHOTO_SIDE = 288  # the longest side, in pixels, of what a page carries
CROP_SIDE = 96
AROUND_SIDE = 176  # of a patch with its surroundings
CLASS_SIDE = 176  # of an example of a class
SMALL_PHOTO_SIDE = 128  # of photos that stand beside others
HEAT_SIDE = 28  # of a heat map that a page stretches itself
QUALITY = 80

# From cold to hot: red, green, blue, and how much of the photo it covers. Each step is lighter than the one before,
# so the order is seen without telling colours apart.
HEAT_COLOURS: tuple[tuple[int, int, int, float], ...] = (
    (30, 10, 90, 0.0),
    (98, 20, 130, 0.25),
    (190, 50, 110, 0.5),
    (245, 125, 40, 0.62),
    (252, 235, 150, 0.7),
)


def reduced(picture: Picture, longest: int) -> Picture:
    """The picture with no side above `longest` pixels; an empty one becomes a grey pixel."""
    if not picture.size:
        return np.full((1, 1, 3), 128, dtype=np.uint8)
    height, width, _ = picture.shape
    scale = longest / max(height, width)
    if scale >= 1:
        return picture
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.LANCZOS))


def around_of(match: Match) -> Picture:
    """The patch with its surroundings: cut out of the photo itself, or else out of its small picture."""
    if match.around is not None or not match.where or not match.photo.size:
        return match.around if match.around is not None else match.crop
    return Surroundings.of(match.photo, match.size, match.where[0].box).picture


def surroundings_of(match: Match) -> Box:
    """The surroundings of the patch, in pixels of the photo itself."""
    return match.where[0].box.surroundings(AROUND, match.size) if match.where else Box.whole(match.size)


def frame_in(match: Match) -> tuple[float, float, float, float]:
    """Where the patch lies in what is `around_of` it: left, top, right and bottom as shares of its width and height."""
    if not match.where or (match.around is None and not match.photo.size):
        return 0.0, 0.0, 1.0, 1.0
    return match.where[0].box.clip(match.size).shares_of(surroundings_of(match))


def faded(picture: Picture) -> Picture:
    """The picture as if seen through paper, for what is not there."""
    return (0.45 * picture + 0.55 * 255).astype(np.uint8)


def jpeg(picture: Picture) -> bytes:
    """As a JPEG file, which every program that reads SVG can show."""
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(picture)).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def data_url(name: str, picture: Picture) -> str:
    """A picture that a page carries within itself; `name` is for those that keep pictures elsewhere."""
    return _webp_url(picture)


def stretched(heat: Heat, size: tuple[int, int]) -> Float[ndarray, "rows columns"]:
    """The heat map at this width and height, smoothly, from 0 to 1."""
    smooth = Image.fromarray(np.nan_to_num(heat).astype(np.float32)).resize(size, Image.Resampling.BICUBIC)
    clipped: ndarray = np.clip(np.asarray(smooth), 0.0, 1.0)
    return clipped


def heat_colours(heat: Heat, size: tuple[int, int]) -> Float[ndarray, "rows columns 4"]:
    """The heat map at this width and height as red, green, blue (to 255), and how much of the photo it covers."""
    hot, steps = stretched(heat, size), np.linspace(0.0, 1.0, len(HEAT_COLOURS))
    return np.stack([np.interp(hot, steps, channel) for channel in zip(*HEAT_COLOURS, strict=True)], axis=-1)


def heated(photo: Picture, heat: Heat) -> Picture:
    """The photo with the heat map over it."""
    height, width, _ = photo.shape
    colours = heat_colours(heat, (width, height))
    cover = colours[..., 3:]
    mixed: ndarray = (photo * (1 - cover) + colours[..., :3] * cover).round().astype(np.uint8)
    return mixed


def heat_url(heat: Heat) -> str:
    """The heat map alone, to be stretched over a photo: a small picture with transparency."""
    colours = heat_colours(heat, (48, 48)) * (1, 1, 1, 255)
    return _webp_url(colours.round().astype(np.uint8))


def heat_values(heat: Heat) -> dict[str, int | str]:
    """The heat map as a few bytes, row by row, for a page that colours and stretches it itself."""
    rows, columns = (min(side, HEAT_SIDE) for side in heat.shape)
    small = (stretched(heat, (columns, rows)) * 255).round().astype(np.uint8)
    return {"rows": rows, "columns": columns, "values": base64.b64encode(small.tobytes()).decode()}


def png(image: Image.Image) -> bytes:
    """As a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def _webp_url(picture: UInt8[ndarray, "rows columns channels"]) -> str:
    return f"data:image/webp;base64,{base64.b64encode(webp(picture, quality=QUALITY)).decode()}"
