"""How training photos lie about the line that decides at a node, drawn small: what gives a distance a meaning.

>>> spread_svg(step.spread, "pairwise", at=step.at)
"""

import math
from collections.abc import Callable, Sequence

from markupsafe import Markup

from prototree.evaluation.tables import percent
from prototree.explain.records import NodeKind, Side, Spread

WIDTH, HEIGHT = 360.0, 146.0
_LEFT, _RIGHT = 6.0, WIDTH - 6.0
_TOP, _AXIS, _BOTTOM = 20.0, 64.0, 108.0
_LEAST = 0.4  # on either side of the line that is always shown
_FEW = 0.005  # so many of the photos at either end are drawn in the outermost bar: one alone would squeeze the rest
_STEPS = (0.1, 0.2, 0.5, 1.0)  # between two numbers at the axis
_MOST_NUMBERS = 7


def spread_svg(spread: Spread, question: NodeKind, at: float | None = None) -> Markup:
    """As an element for a page; `base.css` has its colours. `at` marks one photo, as `Step.at` has it.

    Photos of the classes on the right stand above the axis, those of the left below; each side's area is the same,
    however many photos it has. Only fixed words and numbers come into it.
    """
    low, high = _shown_range(spread, at)

    def across(value: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (min(max(value, low), high) - low) / (high - low)

    tallest = max((max(shares) for shares in (_shares(spread.right), _shares(spread.left)) if shares), default=1.0)
    sides: tuple[Side, ...] = ("right", "left")
    parts = [_bars(spread, across, tallest, side) for side in sides]
    parts.append(f'<path class="axis" d="M{_LEFT:g} {_AXIS:g}H{_RIGHT:g}"/>')
    parts += _numbers(low, high, across)
    line = across(spread.line)
    parts.append(f'<path class="line" d="M{line:.1f} {_TOP - 4:g}V{_BOTTOM:g}"/>')
    parts += _words(question, line)
    if at is not None:
        parts.append(_mark(across(at)))
    said = f"{spread_words(spread, question)} {_where(spread, question, at)}".strip()
    return Markup(
        f'<svg class="spread" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{Markup.escape(said)}">'
        f"{''.join(parts)}</svg>"
    )


def spread_words(spread: Spread, question: NodeKind) -> str:
    """How many photos of each side are on their side of the line, as a sentence; nothing where none were counted."""
    below = round((spread.line - spread.low) / spread.width)  # ranges under the line
    right_is_below = question == "presence"
    said = []
    for counts, is_below, name in (
        (spread.right, right_is_below, "present" if right_is_below else "right"),
        (spread.left, not right_is_below, "absent" if right_is_below else "left"),
    ):
        if sum(counts):
            own = sum(counts[:below]) if is_below else sum(counts[below:])
            said.append(f"{percent(own / sum(counts))} of the {sum(counts)} training photos of the “{name}” classes")
    return f"On their side of the line: {' and '.join(said)}." if said else ""


def _where(spread: Spread, question: NodeKind, at: float | None) -> str:
    if at is None:
        return ""
    if question == "presence":
        return f"This photo: {at:.2f} times the reach."
    return f"This photo: {abs(at):.2f} towards the {'right' if at > 0 else 'left'}, where 1 is the patch itself."


def _shares(counts: Sequence[int]) -> tuple[float, ...]:
    total = sum(counts)
    return tuple(count / total for count in counts) if total else ()


def _shown_range(spread: Spread, at: float | None) -> tuple[float, float]:
    """All ranges that hold more than a few photos, the mark and a little on either side of the line."""
    both = [sum(pair) for pair in zip(spread.right, spread.left, strict=True)]
    few, total = _FEW * sum(both), sum(both)
    used = [i for i, n in enumerate(both) if n and sum(both[: i + 1]) > few and total - sum(both[:i]) > few]
    edges = [spread.line - _LEAST, spread.line + _LEAST]
    edges += [spread.low + i * spread.width for i in used] + [spread.low + (i + 1) * spread.width for i in used]
    if at is not None:
        edges.append(at)
    return max(min(edges), spread.low), min(max(edges), spread.high)


def _bars(spread: Spread, across: Callable[[float], float], tallest: float, side: Side) -> str:
    counts = spread.right if side == "right" else spread.left
    room, up = (_AXIS - _TOP, -1) if side == "right" else (_BOTTOM - _AXIS, 1)
    drawn = ""
    for i, share in enumerate(_shares(counts)):
        start, end = across(spread.low + i * spread.width), across(spread.low + (i + 1) * spread.width)
        if share and end <= start:  # beyond what is shown: at its edge
            width = across(spread.low + spread.width) - across(spread.low) or 2.0
            start, end = (start, start + width) if start <= _LEFT else (end - width, end)
        if share:
            height = max(1.5, room * share / tallest)
            drawn += f"M{start + 0.4:.1f} {_AXIS:g}v{up * height:.1f}h{end - start - 0.8:.1f}V{_AXIS:g}z"
    return f'<path class="{side}" d="{drawn}"/>'


def _numbers(low: float, high: float, across: Callable[[float], float]) -> list[str]:
    """Some round numbers along the axis."""
    step = next((step for step in _STEPS if (high - low) / step < _MOST_NUMBERS), _STEPS[-1])
    places = [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    return [
        f'<text class="number" x="{min(max(across(at), 12), WIDTH - 12):.1f}" y="{_BOTTOM + 14:g}" '
        f'text-anchor="middle">{f"{at:g}".replace("-", "−")}</text>'
        for at in (round(place, 6) + 0.0 for place in places)
    ]


def _words(question: NodeKind, line: float) -> list[str]:
    before, after = ("present", "absent") if question == "presence" else ("more like the left", "more like the right")
    ground, start = HEIGHT - 6, max(line - 8, 7 * len(before) + 14)  # about the width of the words
    start = min(start, WIDTH - 7 * len(after) - 14)
    return [
        f'<text x="{start:.1f}" y="{ground:g}" text-anchor="end">← {before}</text>',
        f'<text x="{start + 16:.1f}" y="{ground:g}">{after} →</text>',
    ]


def _mark(x: float) -> str:
    anchor = "start" if x < 60 else "end" if x > WIDTH - 60 else "middle"
    return (
        f'<g class="mark"><path d="M{x:.1f} {_TOP - 2:g}V{_BOTTOM:g}"/>'
        f'<path class="tip" d="M{x - 5:.1f} {_TOP - 8:g}h10l-5 8z"/>'
        f'<text x="{x:.1f}" y="10" text-anchor="{anchor}">this photo</text></g>'
    )
