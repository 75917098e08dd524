"""Two runs side by side: every changed answer and every changed question, and nothing else."""

import html
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import prototree
from prototree.cli import app
from prototree.core import checkpoint
from prototree.core.checkpoint import PROJECTED
from prototree.core.nodes import NodeFunction
from prototree.errors import DataError
from prototree.explanation.comparison import compare_runs, lost_classes
from prototree.io import write_json
from prototree.reporting.comparison_page import comparison_page
from prototree.run import Run
from tiny_editing import tiny_run


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Run, Run]:
    """A run, and a copy of it: two leaves have changed places, a patch of question 2 is another, 2R has a name."""
    before = tiny_run(tmp_path, NodeFunction("pairwise", 6.0))
    tree = before.tree()
    tree.leaf_logits.data = tree.leaf_logits.data[[1, 0, 2, 3]]
    source = tree.sources[0]
    assert source is not None
    tree.sources = (tree.sources[0], source, *tree.sources[2:])
    after = Run(tmp_path / "after")
    (after.folder / PROJECTED).mkdir(parents=True)
    checkpoint.save(tree, after.folder / PROJECTED)
    (after.folder / "config.toml").write_bytes((before.folder / "config.toml").read_bytes())
    after.update_metrics(source=before.source, classes=list(tree.class_names))
    write_json(after.folder / "notes.json", {"2R": "<b>beak"})
    return before, after


def test_every_change_is_found(runs: tuple[Run, Run]) -> None:
    before, after = runs
    found, data = compare_runs(after, before), after.data()
    paths = [sample.path for sample in data.test]
    old, new = ([one.predicted_class for one in prototree.predict(run, paths)] for run in (before, after))
    changed = {data.name(s): (a, b) for s, a, b in zip(data.test, old, new, strict=True) if a != b}
    assert {image.image: (image.before, image.after) for image in found.changed} == changed
    assert found.n_fixed + found.n_broken + found.n_otherwise == len(changed)
    labels = [data.class_names[sample.label] for sample in data.test]
    correct = tuple(sum(a == b for a, b in zip(said, labels, strict=True)) for said in (old, new))
    assert found.correct == correct
    assert found.n_images == sum(change.n_images for change in found.classes) == len(paths)
    (question,) = found.questions
    assert found.n_same_questions == 2
    assert [patch.patch for patch in question.before] == [patch.patch for patch in question.after] == ["2L", "2R"]
    page = html.unescape(comparison_page(found))
    assert "Question 2 has another patch" in page
    assert '<bdi class="note"><b>beak</bdi>' in page
    assert f"{correct[1]} of {len(paths)} correct" in page


def test_a_class_without_a_leaf_is_named(runs: tuple[Run, Run]) -> None:
    before, after = (run.tree() for run in runs)
    before.leaf_logits.data = 9 * torch.eye(before.n_classes)[torch.arange(4) % before.n_classes]
    after.leaf_logits.data = before.leaf_logits.data * torch.tensor([[1.0], [0.0], [1.0], [0.0]])  # two say nothing
    kept = {0, 2 % before.n_classes}
    lost = tuple(name for k, name in enumerate(before.class_names[:4]) if k not in kept)
    assert lost_classes(before, after) == lost != ()
    assert lost_classes(after, before) == ()
    found = replace(compare_runs(*runs), lost_classes=("<Owl>",))
    assert "1 class has no leaf any more" in (page := comparison_page(found))
    assert "&lt;Owl&gt;" in page


def test_a_run_does_not_differ_from_itself(runs: tuple[Run, Run]) -> None:
    found = compare_runs(runs[0], runs[0])
    assert (found.changed, found.questions, found.n_same_questions) == ((), (), 3)
    assert "No class gained or lost" in comparison_page(found)


def test_runs_of_other_classes_are_refused(runs: tuple[Run, Run]) -> None:
    tree = runs[1].tree()
    tree.class_names = ("a", "b", "c")
    checkpoint.save(tree, runs[1].folder / PROJECTED)
    with pytest.raises(DataError, match="same classes"):
        compare_runs(runs[0], runs[1])


def test_the_report_is_written_against_another_run(runs: tuple[Run, Run]) -> None:
    before, after = runs
    done = CliRunner().invoke(app, ["report", str(after.folder), "--against", str(before.folder), "--nearest", "1"])
    assert done.exit_code == 0, done.output
    assert (after.folder / "report" / "comparison.html").exists()
    assert (after.folder / "report" / "index.html").exists()
