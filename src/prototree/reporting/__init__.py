"""Explanations as self-contained pages, SVG, PDF, PNG, text and JSON. No tensor comes here.

The records of `explain` are drawn: `text` has every sentence, `layout` and `figures` the one drawing, `tree_page` and
`decision_page` the HTML, `export` writes files. Here are the templates and assets that pages are made of.
"""

import json
import math
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

Asset = Literal["base.css", "tree.css", "mosaic.js", "tree.js", "decision.css", "comparison.css"]


def asset(name: Asset) -> Markup:
    """Read a style sheet or script of the pages."""
    return Markup(files("prototree.reporting").joinpath("assets", name).read_text(encoding="utf-8"))


def render(template: str, **values: Any) -> str:
    """Fill one of the report's templates."""
    return templates("prototree.reporting").get_template(template).render(**values)


@cache
def templates(package: str) -> Environment:
    """Return the templates of a package. What is filled in is escaped, and what is missing is an error."""
    loader = PackageLoader(package)
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def script_json(data: Any) -> Markup:
    """Write JSON that may stand within a script element: nothing in it can end the element or a line."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def json_number(value: float, digits: int = 6) -> float | None:
    """Round a number for JSON, which knows no infinity and no NaN."""
    return round(value, digits) if math.isfinite(value) else None
