"""Templates, style sheets and scripts: the same way to a page for the report and for the browser app."""

import json
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined

Asset = Literal["base.css", "tree.css", "mosaic.js", "tree.js", "decision.css"]


def asset(name: Asset) -> str:
    """A style sheet or script of the pages."""
    return files("prototree.report").joinpath("assets", name).read_text(encoding="utf-8")


def render(template: str, **values: Any) -> str:
    """One of the report's templates, filled."""
    return _own_templates().get_template(template).render(**values)


def templates(package: str) -> Environment:
    """The templates of a package. What is filled in is escaped, and what is missing is an error."""
    return Environment(
        loader=PackageLoader(package),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def script_json(data: Any) -> str:
    """JSON that may stand within a script element: nothing in it can end the element or a line."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


@cache
def _own_templates() -> Environment:
    return templates("prototree.report")
