"""Histogram of the training photos around the boundary of a node, as a small SVG: what gives a distance a meaning.

>>> histogram_svg(step.histogram, "pairwise", at=step.at)
"""

import math

from markupsafe import Markup

from prototree.evaluation.tables import percent
from prototree.explanation.records import DecisionHistogram, NodeKind

WIDTH, HEIGHT = 360.0, 146.0
_LEFT, _RIGHT = 6.0, WIDTH - 6.0
_TOP, _AXIS, _BOTTOM = 20.0, 64.0, 108.0
_MARGIN = 0.4  # on either side of the boundary that is always shown
_FEW = 0.005  # of the photos, at either end, are drawn in the outermost bar: one alone would squeeze the rest
_STEPS = (0.1, 0.2, 0.5, 1.0)  # between two numbers at the axis
_MAX_NUMBERS = 7


def histogram_svg(histogram: DecisionHistogram, kind: NodeKind, at: float | None = None) -> Markup:
    """Draw the histogram for a page; `base.css` has its colours. `at` marks one photo, as `Step.at` has it.

    Photos of the classes on the right stand above the axis, those of the left below; each side's area is the same,
    however many photos it has. Only fixed words and numbers come into it.
    """
    low, high = _shown_range(histogram, at)

    def across(value: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (min(max(value, low), high) - low) / (high - low)

    def bars(fractions: list[float], scale: float) -> str:
        drawn, edges = "", [across(histogram.low + i * histogram.width) for i in range(len(fractions) + 1)]
        for start, end, fraction in zip(edges, edges[1:], fractions, strict=False):
            if end <= start:  # beyond what is shown: at its edge
                width = edges[1] - edges[0] or 2.0
                start, end = (start, start + width) if start <= _LEFT else (end - width, end)
            if fraction:
                height = math.copysign(max(1.5, abs(scale) * fraction), scale)
                drawn += f"M{start + 0.4:.1f} {_AXIS:g}v{height:.1f}h{end - start - 0.8:.1f}V{_AXIS:g}z"
        return drawn

    right, left = ([n / max(sum(counts), 1) for n in counts] for counts in (histogram.right, histogram.left))
    tallest, line = max(*right, *left) or 1.0, across(histogram.line)
    parts = [
        f'<path class="right" d="{bars(right, (_TOP - _AXIS) / tallest)}"/>',
        f'<path class="left" d="{bars(left, (_BOTTOM - _AXIS) / tallest)}"/>',
        f'<path class="axis" d="M{_LEFT:g} {_AXIS:g}H{_RIGHT:g}"/>',
    ]
    step = next((step for step in _STEPS if (high - low) / step < _MAX_NUMBERS), _STEPS[-1])
    for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1):
        tick = round(i * step, 6) + 0.0
        number, x = f"{tick:g}".replace("-", "−"), min(max(across(tick), 12), WIDTH - 12)
        parts.append(f'<text class="number" x="{x:.1f}" y="{_BOTTOM + 14:g}" text-anchor="middle">{number}</text>')
    before, after = ("present", "absent") if kind == "presence" else ("more like the left", "more like the right")
    start = min(max(line - 8, 7 * len(before) + 14), WIDTH - 7 * len(after) - 14)  # about the width of the words
    parts += [
        f'<path class="line" d="M{line:.1f} {_TOP - 4:g}V{_BOTTOM:g}"/>',
        f'<text x="{start:.1f}" y="{HEIGHT - 6:g}" text-anchor="end">← {before}</text>',
        f'<text x="{start + 16:.1f}" y="{HEIGHT - 6:g}">{after} →</text>',
    ]
    text = histogram_text(histogram, kind)
    if at is not None:
        x = across(at)
        anchor = "start" if x < 60 else "end" if x > WIDTH - 60 else "middle"
        parts.append(
            f'<g class="mark"><path d="M{x:.1f} {_TOP - 2:g}V{_BOTTOM:g}"/>'
            f'<path class="tip" d="M{x - 5:.1f} {_TOP - 8:g}h10l-5 8z"/>'
            f'<text x="{x:.1f}" y="10" text-anchor="{anchor}">your image</text></g>'
        )
        towards = f"{abs(at):.2f} towards the {'right' if at > 0 else 'left'}, where 1 is the patch itself"
        text += f" Your image: {f'{at:.2f} times the radius' if kind == 'presence' else towards}."
    return Markup(
        f'<svg class="histogram" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" '
        f'aria-label="{Markup.escape(text.strip())}">{"".join(parts)}</svg>'
    )


def histogram_text(histogram: DecisionHistogram, kind: NodeKind) -> str:
    """Say how many photos of each side are on their side of the boundary; nothing where none were counted."""
    below = round((histogram.line - histogram.low) / histogram.width)  # bins under the boundary
    presence = kind == "presence"
    texts = []
    for counts, is_below, name in (
        (histogram.right, presence, "present" if presence else "right"),
        (histogram.left, not presence, "absent" if presence else "left"),
    ):
        if total := sum(counts):
            correct = sum(counts[:below]) if is_below else sum(counts[below:])
            texts.append(f"{percent(correct / total)} of the {total} training images of the “{name}” classes")
    return f"On their side of the line: {' and '.join(texts)}." if texts else ""


def _shown_range(histogram: DecisionHistogram, at: float | None) -> tuple[float, float]:
    """Return the range of all bins that hold more than a few photos, the mark and a margin about the boundary."""
    both = [sum(pair) for pair in zip(histogram.right, histogram.left, strict=True)]
    few, total = _FEW * sum(both), sum(both)
    used = [i for i, n in enumerate(both) if n and sum(both[: i + 1]) > few and total - sum(both[:i]) > few]
    edges = [histogram.line - _MARGIN, histogram.line + _MARGIN, *([] if at is None else [at])]
    edges += [histogram.low + (i + end) * histogram.width for i in used for end in (0, 1)]
    return max(min(edges), histogram.low), min(max(edges), histogram.high)
