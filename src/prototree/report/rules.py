"""The tree as classification rules, for people as text and for programs as JSON."""

from typing import Any

from prototree.evaluation.tables import percent
from prototree.explain.records import Match, TreeExplanation
from prototree.report.text import Reading, Rule, count, plain


def rules_text(explanation: TreeExplanation) -> str:
    """Every rule on one line, by class: `has this, lacks that → Scarlet Tanager`, or `more like this than that → …`."""
    reading, names = Reading(explanation), [plain(name) for name in explanation.class_names]
    size = f"{count(len(explanation.prototypes), 'prototype')}, {count(len(names), 'class', 'classes')}"
    lines = [plain(explanation.title), size, "", "RULES (numbers are prototypes, listed below)", ""]
    ranked = sorted(reading.rules, key=lambda rule: (names[rule.label], -rule.share))
    for rule in (rule for rule in ranked if not reading.is_unsure(rule.leaf)):
        lines.append(_sentence(reading, rule, f"{names[rule.label]} ({percent(rule.share)})"))
    if unsure := [rule for rule in ranked if reading.is_unsure(rule.leaf)]:
        lines += ["", "LEAVES THAT SAY LITTLE", ""]
        lines += [_sentence(reading, rule, "no clear class") for rule in unsure]
    lines += ["", "PROTOTYPES", ""]
    for prototype in explanation.prototypes:
        name = f" “{plain(prototype.note)}”" if prototype.note else ""
        side = f", {prototype.side} of node {prototype.node}" if reading.is_choice else ""
        lines.append(f"prototype {prototype.prototype}{name}{side}: {_found_in(prototype.source, names)}")
    return "\n".join(lines) + "\n"


def rules_json(explanation: TreeExplanation) -> dict[str, Any]:
    """The same for programs: every leaf with its conditions from the root down, and where prototypes come from."""
    reading = Reading(explanation)
    return {
        "title": explanation.title,
        "question": explanation.question,
        "classes": list(explanation.class_names),
        "prototypes": [
            {
                "prototype": prototype.prototype,
                "node": prototype.node,
                "side": prototype.side,
                "reach": round(prototype.reach, 6),
                "note": prototype.note,
                "image": prototype.source.image,
                "label": prototype.source.label,
                "box": _box(prototype.source),
            }
            for prototype in explanation.prototypes
        ],
        "rules": [
            {
                "leaf": rule.leaf,
                "class": explanation.class_names[rule.label],
                "label": rule.label,
                "probability": round(rule.share, 6),
                "near_uniform": reading.is_unsure(rule.leaf),
                "conditions": [_condition(reading, *turn) for turn in rule.turns],
            }
            for rule in reading.rules
        ],
    }


def _sentence(reading: Reading, rule: Rule, outcome: str) -> str:
    return f"{reading.turn_words(reading.conditions(rule)) or 'always'} → {outcome}"


def _condition(reading: Reading, node: int, right: bool) -> dict[str, Any]:
    if not reading.is_choice:
        return {"node": node, "present": right}
    rather, than = reading.rather(node, right)
    return {"node": node, "goes_right": right, "rather": rather.prototype, "than": than.prototype}


def _found_in(match: Match, names: list[str]) -> str:
    whose = f" ({names[match.label]})" if match.label is not None else ""
    box = _box(match)
    where = f", pixels {box[0]:.0f}–{box[2]:.0f} across and {box[1]:.0f}–{box[3]:.0f} down" if box else ""
    return f"{plain(match.image)}{whose}{where}"


def _box(match: Match) -> list[float]:
    if not match.where:
        return []
    box = match.where[0].box
    return [round(edge, 2) for edge in box.edges]
