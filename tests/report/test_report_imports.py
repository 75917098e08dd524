"""Drawing needs no torch: whoever has explanations as data can make pages of them, at once and on any machine."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

DRAWING = """
from pathlib import Path
from prototree.report import show, write_decision, write_report
from sample_explanations import decision, random_topology, tree, vote

explained = tree(random_topology(3))
write_report(explained, Path(sys.argv[1]))
write_decision(decision(explained), Path(sys.argv[1]), "max_path")
write_decision(vote(explained, 2), Path(sys.argv[1]), "greedy")
show(explained)._repr_html_()
"""


@pytest.mark.parametrize("code", ["import prototree.report", DRAWING], ids=["import", "drawing"])
def test_drawing_imports_no_torch(code: str, tmp_path: Path) -> None:
    script = f"import sys; sys.path.insert(0, {str(TESTS)!r})\n{code}\nassert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=3600)
    assert result.returncode == 0, result.stderr
