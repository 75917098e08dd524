"""The app's HTML pages, filled on the server; scripts only add to them."""

from functools import cache
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from prototree.app import schemas
from prototree.app.service import Result, Service
from prototree.evaluation.tables import percent
from prototree.explanation.records import TreeExplanation
from prototree.reporting import script_json, templates
from prototree.reporting.tree_page import tree_body


def explore(service: Service, explanation: TreeExplanation, data: dict[str, Any]) -> str:
    """Fill the page of the tree, which is the report's."""
    body, content = Markup(tree_body(explanation)), Markup(script_json(data))
    return _render("explore.html", service, "explore", body=body, data=content)


def try_image(service: Service, result: Result | None) -> str:
    """Fill the page that takes an image, below the decision about the last one, which is the report's page."""
    decision, body = (result.decision, Markup(result.body)) if result is not None else (None, "")
    return _render("try.html", service, "try", decision=decision, body=body, samples=service.samples()[:24])


def review(service: Service) -> str:
    """Fill the page of wrong predictions, by the node that is responsible."""
    errors, by_node = service.errors(), dict[int | None, list[schemas.PredictionErrorResponse]]()
    for error in errors.images:
        by_node.setdefault(error.node, []).append(error)
    nodes = {node.node: node for node in service.nodes()}
    groups = sorted(by_node.items(), key=lambda item: (item[0] is None, -len(item[1]), item[0] or 0))
    return _render("review.html", service, "review", errors=errors, groups=groups, nodes=nodes)


def edit(service: Service) -> str:
    """Fill the page of all nodes, to choose one."""
    return _render("edit.html", service, "edit", nodes=service.nodes())


def edit_node(service: Service, node: int) -> str:
    """Fill the page of one node, and what can be done to it."""
    return _render("edit_node.html", service, "edit", node=service.node(node))


def api(service: Service, description: dict[str, Any], address: str) -> str:
    """Fill the page about the API; `address` is where it is, as the browser sees it."""
    calls = [
        (method.upper(), path, call)
        for path, methods in description["paths"].items()
        for method, call in methods.items()
    ]
    return _render("api.html", service, "api", calls=calls, address=address.rstrip("/"))


def error(status: int, detail: str) -> str:
    """Fill the page about an error."""
    return _environment().get_template("error.html").render(status=status, detail=detail)


def _render(template: str, service: Service, here: str, **values: Any) -> str:
    common = {"run": service.run(), "can_edit": service.can_edit, "here": here}
    return _environment().get_template(template).render(common, **values)


@cache
def _environment() -> Environment:
    environment = templates("prototree.app")
    environment.filters["percent"] = percent
    environment.filters["few"] = _few
    return environment


def _few(names: list[str], shown: int = 3) -> str:
    isolated = (f"\u2068{name}\u2069" for name in names[:shown])  # each has a text direction of its own
    more = len(names) - shown
    return ", ".join(isolated) + (f" and {more} more" if more > 0 else "")
