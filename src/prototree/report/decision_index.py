"""Many decisions on one page: thumbnail, answer, the truth where it is known, and how sure; doubtful ones first."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from prototree.evaluation.tables import percent
from prototree.explain.records import UNKNOWN, VoteExplanation
from prototree.report.decision_html import SUREST, Decided
from prototree.report.images import data_url, reduced
from prototree.report.templating import asset, render
from prototree.report.text import count, likeliest

_THUMB_SIDE = 96


@dataclass(frozen=True)
class IndexEntry:
    """One photo in the list. Its picture is encoded, so that thousands of photos need not be held in memory."""

    image: str
    href: str  # of its own page
    thumb: str
    answer: str
    truth: str | None
    confidence: float | None  # None: no answer is given

    @property
    def is_known(self) -> bool:
        return self.confidence is not None

    @property
    def is_right(self) -> bool:
        return self.truth == self.answer

    @property
    def doubt(self) -> tuple[bool, float, str]:
        """Smallest for what deserves the first look: no answer given, then little confidence."""
        return self.is_known, self.confidence or 0.0, self.image

    @property
    def share(self) -> str:
        return "" if self.confidence is None else percent(min(self.confidence, SUREST))


def index_entry(explanation: Decided, href: str) -> IndexEntry:
    """A decision as a line of the list; of several trees, the mean vote and its share."""
    answer: int
    confidence: float | None
    if isinstance(explanation, VoteExplanation):
        first, probs = explanation.decisions[0], explanation.class_probs
        answer, confidence = likeliest(probs), max(probs)
    else:
        first = explanation
        answer, confidence = first.answer, first.confidence
    names = first.class_names
    return IndexEntry(
        image=first.image,
        href=href,
        thumb=data_url("thumb", reduced(first.photo, _THUMB_SIDE)),
        answer=names[answer],
        truth=None if first.label is None else names[first.label],
        confidence=confidence,
    )


def index_page(entries: Sequence[IndexEntry]) -> str:
    """One HTML file beside the folders of the decisions; sorted by doubt."""
    ordered = sorted(entries, key=lambda entry: entry.doubt)
    return render(
        "decision_index.html",
        title=count(len(entries), "photo"),
        summary=_summary(entries),
        styles=[Markup(asset("base.css")), Markup(asset("decision.css"))],
        entries=[(entry, f"{100 * (entry.confidence or 0.0):.1f}") for entry in ordered],
        has_truth=any(entry.truth is not None for entry in entries),
        unknown=UNKNOWN,
    )


def _summary(entries: Sequence[IndexEntry]) -> str:
    known = [entry for entry in entries if entry.is_known]
    said = [f"{len(known)} of {len(entries)} answered"]
    judged = [entry for entry in known if entry.truth is not None]
    if judged:
        said.append(f"{sum(entry.is_right for entry in judged)} of {len(judged)} answers right")
    return ", ".join(said)
