"""The app's pages, filled on the server; scripts only add to them."""

from functools import cache
from typing import Any, Literal

from jinja2 import Environment
from markupsafe import Markup

from prototree.app import schemas
from prototree.app.results import Result
from prototree.app.service import Service
from prototree.app.viewer import Viewer
from prototree.evaluation.tables import percent
from prototree.explain.records import TreeExplanation
from prototree.report.templating import script_json, templates
from prototree.report.tree_html import tree_body

PictureKind = Literal["picture", "thumb"]


def explore(service: Service | Viewer, explanation: TreeExplanation, data: dict[str, Any]) -> str:
    """The tree."""
    return _render(
        "explore.html", service, "explore", body=Markup(tree_body(explanation)), data=Markup(script_json(data))
    )


def try_page(service: Service | Viewer, result: Result | None) -> str:
    """A place to drop an image, and what the tree says of it: the page that `explain` writes."""
    samples = service.samples()[:24]
    decision, body = (result.decision, Markup(result.body)) if result is not None else (None, "")
    return _render("try.html", service, "try", decision=decision, body=body, samples=samples)


def review(service: Service, mistakes: schemas.MistakesShape) -> str:
    """Wrong answers, by the prototype that is responsible."""
    by_node: dict[int | None, list[schemas.MistakeShape]] = {}
    for mistake in mistakes.images:
        by_node.setdefault(mistake.node, []).append(mistake)
    nodes = {node.node: node for node in service.nodes()}
    ordered = sorted(by_node.items(), key=lambda item: (item[0] is None, -len(item[1]), item[0] or 0))
    return _render("review.html", service, "review", mistakes=mistakes, groups=ordered, nodes=nodes)


def edit(service: Service, nodes: list[schemas.NodeShape]) -> str:
    """All prototypes, to choose one."""
    return _render("edit.html", service, "edit", nodes=nodes)


def edit_node(service: Service, node: schemas.NodeShape) -> str:
    """One prototype, and what can be done to it."""
    return _render("edit_node.html", service, "edit", node=node)


def api(service: Service | Viewer, description: dict[str, Any], address: str) -> str:
    """The API in words; `address` is where it is, as the browser sees it."""
    calls = [
        (method.upper(), path, call)
        for path, methods in description["paths"].items()
        for method, call in methods.items()
    ]
    return _render("api.html", service, "api", calls=calls, address=address.rstrip("/"))


def error(status: int, detail: str) -> str:
    """What went wrong."""
    return _environment().get_template("error.html").render(status=status, detail=detail)


def _render(template: str, service: Service | Viewer, here: str, **values: Any) -> str:
    given = {"run": service.run(), "edits": service.edits, "here": here}
    return _environment().get_template(template).render(given, **values)


@cache
def _environment() -> Environment:
    environment = templates("prototree.app")
    environment.filters["percent"] = percent
    environment.filters["few"] = _few
    return environment


def _few(names: list[str], shown: int = 3) -> str:
    more = len(names) - shown
    apart = (f"\u2068{name}\u2069" for name in names[:shown])  # each has a direction of its own
    return ", ".join(apart) + (f" and {more} more" if more > 0 else "")
