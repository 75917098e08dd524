"""The tree as classification rules: text for people, JSON for programs."""

from typing import Any

from prototree.evaluation.tables import percent
from prototree.explanation.records import Match, PrototypeExplanation, TreeExplanation
from prototree.reporting.text import NO_CLASS, TreeText, count, node_number, plain, quoted_note


def rules_text(explanation: TreeExplanation) -> str:
    """Write every rule on one line, by class: `has 7; lacks 3 → Scarlet Tanager`; then where patches come from."""
    text, names = TreeText(explanation), [plain(name) for name in explanation.class_names]
    ranked = sorted(text.rules, key=lambda rule: (names[rule.predicted], -rule.share))
    clear = [rule for rule in ranked if not text.is_unsure(rule.leaf)]
    unsure = [rule for rule in ranked if text.is_unsure(rule.leaf)]
    size = f"{count(len(explanation.prototypes), 'prototype')}, {count(len(names), 'class', 'classes')}"
    lines = [plain(explanation.title), size, "", "RULES (numbers are questions, whose patches are listed below)", ""]
    lines += [f"{text.rule_text(rule)} → {names[rule.predicted]} ({percent(rule.share)})" for rule in clear]
    if unsure:
        lines += ["", "LEAVES WITHOUT A CLEAR CLASS", "", *(f"{text.rule_text(rule)} → {NO_CLASS}" for rule in unsure)]
    lines += ["", "PATCHES", ""]
    for node in range(len(explanation.left)):
        lines += [_patch_line(text.patch(prototype), prototype, names) for prototype in text.sides(node)]
    return "\n".join(lines) + "\n"


def rules_json(explanation: TreeExplanation) -> dict[str, Any]:
    """Return the rules for programs: every leaf with its conditions from the root down, and where patches come from."""
    text, names = TreeText(explanation), explanation.class_names
    return {
        "title": explanation.title,
        "node_kind": explanation.node_kind,
        "classes": list(names),
        "prototypes": [
            {
                "patch": text.patch(prototype),
                "node": node_number(prototype.node),
                "side": prototype.side,
                "prototype_row": prototype.prototype,
                "radius": round(prototype.radius, 6),
                "note": prototype.note,
                "image": prototype.source.image,
                "label": None if prototype.source.label is None else names[prototype.source.label],
                "box": _box(prototype.source),
            }
            for prototype in explanation.prototypes
        ],
        "rules": [
            {
                "leaf": rule.leaf,
                "class": names[rule.predicted],
                "probability": round(rule.share, 6),
                "near_uniform": text.is_unsure(rule.leaf),
                "conditions": [_condition(text, *step) for step in rule.steps],
            }
            for rule in text.rules
        ],
    }


def _condition(text: TreeText, node: int, goes_right: bool) -> dict[str, Any]:
    condition = {"node": node_number(node), "goes_right": goes_right}
    if not text.is_pairwise:
        return condition
    nearer, farther = text.nearer(node, goes_right)
    return {**condition, "nearer": text.patch(nearer), "farther": text.patch(farther)}


def _patch_line(patch: str, prototype: PrototypeExplanation, names: list[str]) -> str:
    source, box = prototype.source, _box(prototype.source)
    note = f" {quoted_note(prototype.note)}" if prototype.note else ""
    label = f" ({names[source.label]})" if source.label is not None else ""
    pixels = f", pixels {box[0]:.0f}–{box[2]:.0f} across and {box[1]:.0f}–{box[3]:.0f} down" if box else ""
    return f"{patch}{note}: {plain(source.image)}{label}{pixels}"


def _box(match: Match) -> list[float]:
    return [round(edge, 2) for edge in match.locations[0].box.edges] if match.locations else []
