"""Files beside the images of a data set that are not used: what they are, and what to do about those that are images.

No torch here.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from prototree.data.images import HEIC_REMEDY, HEIC_SUFFIXES, is_image

# Of images that are not read everywhere, or nowhere.
_IMAGE_SUFFIXES = (
    *(".avif", *HEIC_SUFFIXES, ".jp2", ".j2k", ".jpx", ".jxl", ".psd", ".psb", ".xcf", ".svg", ".ico", ".tga", ".pcx"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".exr", ".hdr", ".dcm"),
    *(".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".sr2", ".srw", ".raf", ".orf", ".rw2", ".pef"),  # of cameras
)
_SYSTEM_FILES = ("thumbs.db", "desktop.ini")


def is_visible(path: Path) -> bool:
    """Whether a person put the file there, rather than the operating system."""
    return not path.name.startswith(".") and path.name.casefold() not in _SYSTEM_FILES


def unread_images(paths: Iterable[Path]) -> list[Path]:
    """Those that are images in a format that is not read here."""
    return [path for path in paths if path.suffix.lower() in _IMAGE_SUFFIXES and not is_image(path)]


def describe_unread(paths: Iterable[Path]) -> str:
    """How many images of which formats are not read, and what to do; empty if there are none."""
    unread = unread_images(paths)
    if not unread:
        return ""
    are = "1 image is" if len(unread) == 1 else f"{len(unread):,} images are"
    remedies = [f"convert to JPEG (for example: magick mogrify -format jpg *{unread[0].suffix})"]
    if any(path.suffix.lower() in HEIC_SUFFIXES for path in unread):
        remedies.insert(0, HEIC_REMEDY)
    return f"{are} in a format that is not read ({count_suffixes(unread)}); {', or '.join(remedies)}"


def describe_others(paths: Iterable[Path]) -> str:
    """The rest: images that lie in no class folder, and files that are no images; empty if there are none."""
    others = [path for path in paths if path.suffix.lower() not in _IMAGE_SUFFIXES or is_image(path)]
    outside = sum(map(is_image, others))
    words = f"{outside:,} image{'s' if outside > 1 else ''} in no class folder" if outside else ""
    return ", ".join(filter(None, [words, count_suffixes(path for path in others if not is_image(path))]))


def count_suffixes(paths: Iterable[Path]) -> str:
    """How many files end how, the most frequent first."""
    found = Counter(path.suffix or "without a suffix" for path in paths)
    return ", ".join(f"{count:,} {suffix}" for suffix, count in found.most_common())
