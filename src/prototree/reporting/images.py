"""Small pictures for pages and figures: reduced, cut out, with a heat map over them, and encoded."""

import base64
import io
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, UInt8
from numpy import ndarray
from PIL import Image

from prototree.backbones.geometry import Box
from prototree.data.images import webp
from prototree.explanation.records import CONTEXT_SCALE, Heatmap, Match, PatchContext, Picture
from prototree.explanation.spotlight import spotlight

PictureUrl = Callable[[str, Picture], str]
"""From a picture's name, unique on its page, and the picture to where the page finds it."""

PHOTO_SIDE = 288  # the longest side, in pixels, of what a page carries
CROP_SIDE = 96
CONTEXT_SIDE = CLASS_SIDE = 176  # of a patch with its surroundings, and of an example of a class
SMALL_PHOTO_SIDE = 128  # of photos that stand beside others
HEAT_SIDE = 28  # of a heat map that a page stretches itself
QUALITY = 80
SHADE = 0.42  # how dark it is where a spotlight does not fall

# From cold to hot: red, green, blue, and how much of the photo it covers. Each step is lighter than the one before,
# so the order is seen without telling colours apart.
HEAT_COLOURS = ((30, 10, 90, 0.0), (98, 20, 130, 0.25), (190, 50, 110, 0.5), (245, 125, 40, 0.62), (252, 235, 150, 0.7))


def reduced(picture: Picture, longest: int) -> Picture:
    """Downscale so that no side is above `longest` pixels; an empty picture becomes a grey pixel."""
    if not picture.size:
        return np.full((1, 1, 3), 128, dtype=np.uint8)
    height, width, _ = picture.shape
    scale = longest / max(height, width)
    if scale >= 1:
        return picture
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.LANCZOS))


def context_box(match: Match) -> Box:
    """Return the box around the patch, `CONTEXT_SCALE` times as wide, in pixels of the original photo."""
    if not match.locations:
        return Box.whole(match.size)
    return match.locations[0].box.context_square(CONTEXT_SCALE, match.size)


def crop_around(match: Match) -> Picture:
    """Return the patch with its surroundings: cut out of the photo itself, or else out of its small picture."""
    if match.context is not None:
        return match.context
    if not match.locations or not match.photo.size:
        return match.crop
    return PatchContext.of(match.photo, match.size, match.locations[0].box).picture


def patch_frame(match: Match) -> tuple[float, float, float, float]:
    """Return where the patch lies in `crop_around`: left, top, right and bottom as fractions of width and height."""
    if not match.locations or (match.context is None and not match.photo.size):
        return 0.0, 0.0, 1.0, 1.0
    return match.locations[0].box.clip(match.size).relative_to(context_box(match))


def spotlight_of(match: Match) -> Heatmap | None:
    """Compute what to light up in `crop_around`; None where nothing says where the patch is."""
    if not match.locations or (match.context is None and not match.photo.size):
        return None
    return spotlight(match.locations, match.locations[0].box, match.size)


def spotlight_url(light: Heatmap) -> str:
    """Embed the shade around what is lit, to be stretched over its picture."""
    shade = np.zeros((*light.shape, 4))
    shade[..., 3] = 255 * SHADE * (1 - light)
    return data_url("light", shade.round().astype(np.uint8))


def spotlit(picture: Picture, light: Heatmap | None) -> Picture:
    """Darken a picture but for what is lit."""
    if light is None:
        return picture
    weight = _stretched(light, (picture.shape[1], picture.shape[0]))[..., None]
    shaded: ndarray = (picture * (1 - SHADE * (1 - weight))).round().astype(np.uint8)
    return shaded


def data_url(name: str, picture: UInt8[ndarray, "rows columns channels"]) -> str:
    """Embed a picture in its page as WebP; `name` is for those that keep pictures elsewhere."""
    return f"data:image/webp;base64,{base64.b64encode(webp(picture, quality=QUALITY)).decode()}"


def jpeg_url(picture: Picture) -> str:
    """Embed a picture as JPEG, which every program that reads SVG can show."""
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(picture)).save(file, "JPEG", quality=QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def heat_overlay(photo: Picture, heat: Heatmap) -> Picture:
    """Blend a heat map over a photo."""
    colours = _heat_colours(heat, (photo.shape[1], photo.shape[0]))
    cover = colours[..., 3:]
    mixed: ndarray = (photo * (1 - cover) + colours[..., :3] * cover).round().astype(np.uint8)
    return mixed


def heat_url(heat: Heatmap) -> str:
    """Embed a heat map alone, to be stretched over a photo: a small picture with transparency."""
    return data_url("heat", (_heat_colours(heat, (48, 48)) * (1, 1, 1, 255)).round().astype(np.uint8))


def heat_values(heat: Heatmap) -> dict[str, int | str]:
    """Encode a heat map as a few bytes, row by row, for a page that colours and stretches it itself."""
    rows, columns = (min(side, HEAT_SIDE) for side in heat.shape)
    small = (_stretched(heat, (columns, rows)) * 255).round().astype(np.uint8)
    return {"rows": rows, "columns": columns, "values": base64.b64encode(small.tobytes()).decode()}


def _stretched(heat: Heatmap, size: tuple[int, int]) -> Float[ndarray, "rows columns"]:
    """Resize a heat map smoothly to this width and height, from 0 to 1."""
    smooth = Image.fromarray(np.nan_to_num(heat).astype(np.float32)).resize(size, Image.Resampling.BICUBIC)
    clipped: ndarray = np.clip(np.asarray(smooth), 0.0, 1.0)
    return clipped


def _heat_colours(heat: Heatmap, size: tuple[int, int]) -> Float[ndarray, "rows columns 4"]:
    """Colour a heat map: red, green, blue (to 255), and how much of the photo it covers."""
    hot, steps = _stretched(heat, size), np.linspace(0.0, 1.0, len(HEAT_COLOURS))
    return np.stack([np.interp(hot, steps, channel) for channel in zip(*HEAT_COLOURS, strict=True)], axis=-1)
