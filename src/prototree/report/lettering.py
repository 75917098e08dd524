"""Fonts for the letters of any script, out of those that this machine has; and the name of one where it has none."""

import logging
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

log = logging.getLogger(__name__)

BASE = "DejaVu Sans"  # comes with matplotlib and has most of the world's alphabets
_FIRST = ("Noto", "WenQuanYi", "Lohit", "Droid", "Source Han")  # drawn for reading; asked before others
_NEVER = ("Last Resort", "STIX", "cm", "DejaVu")  # boxes with a code, mathematics, or what the base has anyway
_EAST_ASIAN = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO", "FULLWIDTH", "IDEOGRAPHIC")


def families_for(texts: Iterable[str]) -> list[str]:
    """Fonts that together have every letter, the base first. Says which letters none of them has."""
    letters = {letter for text in texts for letter in text if ord(letter) > 0x7E and letter.isprintable()}
    return list(_families(frozenset(letters)))


@lru_cache(maxsize=8)
def _families(letters: frozenset[str]) -> tuple[str, ...]:
    from matplotlib import font_manager

    missing = letters - _letters_of(font_manager.findfont(BASE), letters)
    families = [BASE]
    if missing:
        fonts = [font for font in font_manager.fontManager.ttflist if not font.name.startswith(_NEVER)]
        fonts.sort(key=lambda font: (not font.name.startswith(_FIRST), font.name, font.fname))
        for font in fonts:
            if missing and (had := _letters_of(font.fname, missing)):
                families.append(font.name)
                missing -= had
    if missing:
        log.warning("%s", missing_words(missing))
    return tuple(dict.fromkeys(families))


def missing_words(letters: Iterable[str]) -> str:
    """Which letters no font has, and which fonts would."""
    ordered = sorted(letters)
    shown = " ".join(ordered[:8]) + (" …" if len(ordered) > 8 else "")
    wanted = " and ".join(sorted({_font_with(letter) for letter in ordered})[:4])
    return f"no font on this machine has {shown}, which are boxes in print; install {wanted} and write the report again"


def _font_with(letter: str) -> str:
    """A free font that has the letter, by the first word of the letter's name."""
    script = unicodedata.name(letter, "").split(" ")[0]
    if script.startswith(_EAST_ASIAN):
        return "Noto Sans CJK"
    if unicodedata.category(letter).startswith("S") or not script:
        return "Noto Emoji"
    return "Noto Sans" if script in ("LATIN", "GREEK", "CYRILLIC") else f"Noto Sans {script.title()}"


def _letters_of(path: str, letters: Iterable[str]) -> frozenset[str]:
    from matplotlib.font_manager import get_font

    try:
        known = get_font(path).get_charmap()
    except (OSError, RuntimeError) as error:
        log.debug("the font %s cannot be read: %s", path, error)
        return frozenset()
    return frozenset(letter for letter in letters if ord(letter) in known)
