"""Two runs side by side as one self-contained page without a script."""

from prototree.evaluation.tables import percent
from prototree.explanation.records import ChangedQuestion, Comparison, Picture, ShownPatch
from prototree.reporting import asset, images, render, text

_THUMB_SIDE = 96


def comparison_page(comparison: Comparison, report_url: str = "") -> str:
    """Write what changed from one run to another as one HTML file; `report_url` is where the later tree is shown."""
    before, after = comparison.correct
    changed = [change for change in comparison.classes if change.before != change.after]
    return render(
        "comparison.html",
        title=f"{comparison.after} against {comparison.before}",
        c=comparison,
        summary=[
            (name, f"{percent(correct / comparison.n_images, 1)}", f"{correct} of {comparison.n_images} correct")
            for name, correct in ((comparison.before, before), (comparison.after, after))
        ],
        classes=sorted(changed, key=lambda change: (change.after - change.before, change.name)),
        n_same_classes=len(comparison.classes) - len(changed),
        n_images=len(comparison.changed),
        n_changed=comparison.n_fixed + comparison.n_broken + comparison.n_otherwise,
        difference=f"{100 * (after - before) / comparison.n_images:+.1f}".replace("-", "−"),
        url=_url,
        report_url=report_url,
        patch_url=_patch_url,
        heading=_heading,
        count=text.count,
        styles=[asset("base.css"), asset("decision.css"), asset("comparison.css")],
    )


def _heading(question: ChangedQuestion) -> str:
    """Say of a question in which tree it has which number."""
    numbers = [side[0].patch.rstrip("LR") if side else "" for side in (question.before, question.after)]
    if not numbers[0]:
        return f"Question {numbers[1]} is new"
    if not numbers[1]:
        return f"Question {numbers[0]} is gone"
    return (
        f"Question {numbers[1]}"
        + (f" (it was {numbers[0]})" if numbers[0] != numbers[1] else "")
        + " has another patch"
    )


def _patch_url(patch: ShownPatch) -> str:
    """Embed a patch with its surroundings, in a spotlight."""
    return _url(patch.crop if patch.context is None else images.spotlit(patch.context.picture, patch.context.light))


def _url(picture: Picture) -> str:
    return images.data_url("thumb", images.reduced(picture, _THUMB_SIDE))
