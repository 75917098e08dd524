"""The files of a report; and drawing needs no torch: whoever has explanations as data can make pages of them."""

import html
import json
import re
import subprocess
import sys
from pathlib import Path

from prototree.core.topology import Topology
from prototree.reporting.export import report, show, write_decision
from prototree.reporting.tree_page import tree_page
from sample_explanations import AWKWARD_NAMES, decision, tree, vote

DRAWING = """
from prototree.reporting.export import report, show, write_decision
from sample_explanations import decision, random_topology, tree, vote

explained = tree(random_topology(3))
report(explained, sys.argv[1])
write_decision(decision(explained), sys.argv[1], "max_path")
write_decision(vote(explained, 2), sys.argv[1], "greedy")
show(explained)._repr_html_()
"""


def test_drawing_imports_no_torch(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[1])
    script = f"import sys; sys.path.insert(0, {tests!r})\n{DRAWING}\nassert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=3600)
    assert result.returncode == 0, result.stderr


def test_report_files(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "report"
    written = report(tree(Topology.full(2), names=AWKWARD_NAMES), folder)
    assert sorted(path.name for path in written) == ["index.html", "rules.json", "rules.txt", "tree.pdf", "tree.svg"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in written)
    assert json.loads((folder / "rules.json").read_text())["rules"]


def test_decision_files(tmp_path: Path) -> None:
    explained = tree(Topology.full(2))
    single = write_decision(decision(explained), tmp_path / "single")
    assert [path.name for path in single] == ["decision.html", "decision.json", "decision.png"]
    several = write_decision(vote(explained, 2), tmp_path / "several", "max_path")
    assert [path.name for path in several][2:] == ["decision-1.png", "decision-2.png"]


def test_a_notebook_shows_the_page_in_a_frame_of_its_own() -> None:
    explained = tree(Topology.full(1), names=AWKWARD_NAMES)
    assert show(explained).page == tree_page(explained)
    for page in (show(explained), show(decision(explained))):
        (source,) = re.findall(r'^<iframe srcdoc="([^"]*)"', page._repr_html_())
        assert html.unescape(source) == page.page
