"""Figures of patches for people: a table, and the sentences that stand beside a tree and each prototype.

All take the content of metrics.json under `parts`, or of one of its `prototypes`.
"""

from collections.abc import Mapping
from typing import Any

from prototree.evaluation.tables import Table, percent

_METHODS = {"peak": "the box shown", "cell": "the nearest cell", "attribution": "attribution's box"}


def part_words(parts: Mapping[str, Any]) -> str:
    """A whole tree in one line that needs no explanation; nothing where nothing was measured."""
    said = []
    purity = parts.get("purity", {}).get("peak", {}).get("test")
    if purity:
        said.append(f"in {_tenths(purity['mean'])} of 10 photos the patch lies on the same part")
    hiding = parts.get("hiding", {}).get("peak")
    if hiding:
        said.append(
            f"hiding it sends {_tenths(hiding['flip_rate'])} of 10 photos the other way "
            f"({_tenths(hiding['random_flip_rate'])} of 10 if a random patch is hidden)"
        )
    return f"{'; '.join(said).capitalize()}." if said else ""


def prototype_words(own: Mapping[str, Any]) -> list[str]:
    """What was found of one prototype, a sentence each."""
    said = []
    purity = own.get("purity", {}).get("peak", {}).get("test")
    if purity:
        part, shown = purity["part"], purity["n_photos"]
        hits = round(purity["share"] * shown)
        said.append(f"In {hits} of the {shown} most similar test photos that show the {part}, this patch lies on it.")
    same = own.get("consistency", {}).get("peak", {}).get("test")
    if same:
        said.append(f"Of all test photos that go this way, {percent(same['share'])} have the {same['part']} in it.")
    hiding = own.get("hiding", {}).get("peak")
    if hiding:
        away, chance = (round(hiding[name] * hiding["n_photos"], 1) for name in ("flip_rate", "random_flip_rate"))
        said.append(
            f"Hiding it sends {away:g} of {hiding['n_photos']} test photos the other way, "
            f"hiding random patches of the same size {chance:g}."
        )
    return said


def part_table(parts: Mapping[str, Any]) -> Table:
    """All figures of a tree, one per row, on training and on test photos."""
    rows: list[tuple[str, ...]] = []
    for place, splits in parts["purity"].items():
        name = _METHODS[place]
        rows.append((f"part purity, {name}", *(_spread(splits.get(split)) for split in ("train", "test"))))
    baselines = parts["baselines"]
    for key, name in (("random_patch", "a random patch on the object"), ("object_middle", "the object's middle")):
        if baselines:
            rows.append(
                (f"part purity of {name}", *(_number(baselines.get(s, {}).get(key)) for s in ("train", "test")))
            )
    for key, name in (("consistency", "consistency"), ("consistency_wide", "consistency, wide box")):
        for place, splits in parts[key].items():
            rows.append((f"{name}, {_METHODS[place]}", *(_number(splits.get(split)) for split in ("train", "test"))))
    if parts["stability"] is not None:
        rows.append(("stability", "–", _number(parts["stability"])))
    for method, found in parts["hiding"].items():
        name, chance = _METHODS[method], percent(found["random_flip_rate"], 1)
        rows.append((f"hiding {name}: turned away (random boxes)", "–", f"{percent(found['flip_rate'], 1)} ({chance})"))
        if found.get("lost") is not None:
            lost, chance = (percent(found[key], 1) for key in ("lost", "random_loss_rate"))
            rows.append(
                (f"hiding {name}: turned away, or nothing within reach (random boxes)", "–", f"{lost} ({chance})")
            )
        moved = " → ".join(_number(found[key]) for key in ("distance", "distance_hidden"))
        random = _number(found["random_distance_hidden"])
        rows.append((f"hiding {name}: distance in reaches (random boxes)", "–", f"{moved} ({random})"))
    for method, found in parts["on_difference"].items():
        touching = f"{percent(found['touching'])} of {found['n_prototypes']} (by chance {percent(found['by_chance'])})"
        rows.append((f"on a part in which its two sides differ, {_METHODS[method]}", touching, "–"))
    return Table("do patches mean what they show", ("figure", "training photos", "test photos"), tuple(rows))


def _spread(found: Mapping[str, float] | None) -> str:
    if found is None:
        return "–"
    return f"{found['mean']:.2f} ± {found['std']:.2f}, over 0.5: {percent(found['part_related'])}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _tenths(share: float) -> str:
    """`7`, or `fewer than 1`, of ten."""
    return "fewer than 1" if 0 < share < 0.05 else f"{round(10 * share)}"
