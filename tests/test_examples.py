import subprocess
import sys
from pathlib import Path

from tiny_training import TINY, write_squares

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *words: str) -> str:
    done = subprocess.run([sys.executable, str(EXAMPLES / name), *words], capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_examples_are_short() -> None:
    assert all(len(path.read_text().splitlines()) <= 60 for path in EXAMPLES.glob("*.py"))


def test_a_random_tree_decides() -> None:
    assert run("random_tree.py").count("similarity") == 6


def test_training_and_asking(tmp_path: Path) -> None:
    settings = TINY | {"threshold": 0.34}
    words = [f"{key}={value}" for key, value in settings.items()]
    output = run("train_and_ask.py", str(write_squares(tmp_path / "photos")), str(tmp_path / "run"), *words)
    assert output.splitlines()[-1] in ("→ red", "→ green", "→ blue")
