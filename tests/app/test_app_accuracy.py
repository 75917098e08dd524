"""The app and the report count the same path on the same images, or say which images they count."""

from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")

from prototree.app.service import Service
from prototree.editing.edits import Remove
from prototree.editing.session import open_session
from prototree.explain.tree import explain_tree
from prototree.pipeline.fit import rerun
from tiny_editing import tiny_run


def test_the_app_counts_as_the_report_does(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    rerun(run.folder, "evaluate")
    session = open_session(run)
    service, report = Service(session), explain_tree(run, nearest=0)
    app, data = service.tree()
    assert app.accuracy == report.accuracy
    assert [one.right_words for one in app.classes] == [one.right_words for one in report.classes]
    assert sum(one.n_test for one in app.classes) == 12
    right = sum(round((one.accuracy or 0) * one.n_test) for one in app.classes)
    assert right / 12 == pytest.approx(report.accuracy["greedy"]), "classes count the path that is shown"
    assert data["judged_on"] == "test photos"
    session.apply(Remove(0, "left"))
    app, data = service.tree()
    assert "every second test photo" in data["judged_on"]
    assert sum(one.n_test for one in app.classes) == 6
    session.undo()
    assert service.tree()[0].accuracy == report.accuracy
