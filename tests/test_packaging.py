"""The package as others get it: built, installed with its core dependencies alone, and used far from the clone."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from prototree.pipeline.share import pack
from tiny_editing import tiny_run

ROOT = Path(__file__).parents[1]

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
    own = ROOT / "src" / "prototree"
    data = {path.relative_to(ROOT / "src").as_posix() for path in own.rglob("*") if path.is_file()}
    assert {name for name in data if "__pycache__" not in name} <= inside
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "src/prototree/__init__.py", "Makefile"} <= names
    assert not [name for name in names if name.startswith((".venv", "runs"))]


def core_distributions(wheel: Path) -> dict[str, importlib.metadata.Distribution]:
    """What the wheel needs without any extra, and what that needs in turn."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("METADATA"))
        lines = archive.read(name).decode().splitlines()
    wanted = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    found: dict[str, importlib.metadata.Distribution] = {}
    while wanted:
        needed = Requirement(wanted.pop())
        if (needed.marker is not None and not needed.marker.evaluate({"extra": ""})) or (
            canonicalize_name(needed.name) in found
        ):
            continue
        try:
            distribution = importlib.metadata.distribution(needed.name)
        except importlib.metadata.PackageNotFoundError:
            continue  # such as a GPU package that a CPU-only torch goes without
        found[canonicalize_name(needed.name)] = distribution
        wanted += distribution.requires or []
    return found


@pytest.fixture(scope="module")
def clean(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment with the wheel and its core dependencies, linked from here: no network."""
    (wheel,) = built.glob("*.whl")
    folder = tmp_path_factory.mktemp("clean") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=3600)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True, timeout=3600)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for distribution in core_distributions(wheel).values():
        for name in sorted({file.parts[0] for file in distribution.files or [] if ".." not in file.parts}):
            source = Path(str(distribution.locate_file(name))).resolve()
            if source.exists() and name != "__pycache__" and not (site / name).exists():
                (site / name).symlink_to(source)
    return folder / "bin"


def test_in_a_clean_environment_a_packed_model_predicts(
    clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(tmp_path / "made")
    file = pack(run, tmp_path / "squares.prototree")
    photos = Path(run.source) / "test"
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    (tmp_path / "elsewhere").mkdir()

    def program(name: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(clean / name), *words],
            cwd=tmp_path / "elsewhere",
            env=environment,
            capture_output=True,
            text=True,
            timeout=3600,
        )

    where = program("python", "-c", "import prototree; print(prototree.__file__)").stdout
    assert str(clean.parent) in where, "the wheel is used, not the clone"
    for extra in ("fastapi", "matplotlib", "tensorboard", "pytest"):
        assert program("python", "-c", f"import {extra}").returncode == 1, f"{extra} is no core dependency"
    done = program("prototree", "predict", str(file), str(photos), "--out", "p.csv")
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "elsewhere" / "p.csv").read_text().splitlines()) == 13
    report = program("prototree", "report", str(file), "--out", "report")
    assert report.returncode == 0, report.stderr
    assert (tmp_path / "elsewhere" / "report" / "index.html").exists()
    assert (tmp_path / "elsewhere" / "report" / "tree.pdf").exists()
    served = program("prototree", "serve", str(file))
    assert served.returncode == 1
    assert "pip install 'prototree[serve]'" in served.stderr
    assert "pip install '.[serve]'" in served.stderr, "what works before anything is published"
    trained = program("prototree", "train", run.source, "--out", "run")
    assert trained.returncode == 1
    assert "pip install 'prototree[weights]'" in trained.stderr
    assert "Traceback" not in trained.stderr
