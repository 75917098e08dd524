"""Fonts for the letters of any script, out of those that this machine has; and the name of one where it has none."""

import logging
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

log = logging.getLogger(__name__)

BASE = "DejaVu Sans"  # comes with matplotlib and has most of the world's alphabets
_FIRST = ("Noto Sans", "Noto", "WenQuanYi", "Lohit", "Droid", "Source Han")  # drawn for reading; asked before others
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
        missing -= _found(font_manager.fontManager.ttflist, missing, families)
    if missing:
        missing -= _found(_lately_installed(), missing, families)
    if missing:
        log.warning("%s", missing_words(missing))
    return tuple(dict.fromkeys(families))


def _found(fonts: Iterable[Any], wanted: frozenset[str], families: list[str]) -> frozenset[str]:
    """The letters that these fonts have; the families that are needed for them come to those that are there."""
    has = [(font, _letters_of(font.fname, wanted)) for font in fonts if not font.name.startswith(_NEVER)]
    # Of those drawn for reading the one with most of the letters: a script is not put together from two.
    has.sort(key=lambda one: (_rank(one[0].name), -len(one[1]), one[0].name, one[0].fname))
    found: frozenset[str] = frozenset()
    for font, letters in has:
        if letters - found:
            families.append(font.name)
            found |= letters
    return found


def _rank(name: str) -> int:
    return next((i for i, start in enumerate(_FIRST) if name.startswith(start)), len(_FIRST))


def _lately_installed() -> list[Any]:
    """Fonts that came after matplotlib made the list that it keeps; known to it from now on."""
    from matplotlib import font_manager

    known = font_manager.fontManager.ttflist
    names, before = {font.fname for font in known}, len(known)
    for path in sorted(set(font_manager.findSystemFonts()) - names):
        try:
            font_manager.fontManager.addfont(path)
        except (OSError, RuntimeError) as error:
            log.debug("the font %s cannot be read: %s", path, error)
    return known[before:]


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
