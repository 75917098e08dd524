"""The package as a whole: public names, the direction of imports, and import without side effects."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import prototree

SOURCE = Path(prototree.__file__).parent

# From the ground up: a package may import only from its own floor and from those below.
FLOORS = [
    {"_version", "archive", "errors", "io", "progress"},
    {"backbones"},
    {"config"},
    {"core", "data"},
    {"features"},
    {"run", "training", "evaluation", "inference", "explanation"},
    {"pipeline", "reporting", "editing", "integrations"},
    {"app", "cli", "__main__"},
]


def imported_packages(path: Path) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    modules = [node.module or "" for node in nodes if node.level == 0]
    inside = {module.split(".")[1] for module in modules if module.startswith("prototree.")}
    return inside | {alias.name for node in nodes if node.module == "prototree" for alias in node.names}


def test_imports_go_only_down() -> None:
    floor_of = {name: floor for floor, names in enumerate(FLOORS) for name in names}
    for path in sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"):
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        above = {name for name in imported_packages(path) if floor_of[name] > floor_of[package]}
        assert not above, f"{path.relative_to(SOURCE)} imports from a floor above it"


def test_every_public_name_is_there_and_documented() -> None:
    for name in prototree.__all__:
        assert getattr(prototree, name).__doc__ or name == "__version__", name


def run(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    script = "import sys\n" + "".join(f"sys.path.insert(0, {str(p)!r})\n" for p in path) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=3600)


def test_importing_the_package_changes_nothing_and_does_not_import_torch() -> None:
    result = run("""
        import gc, os
        before = dict(os.environ), gc.get_threshold(), gc.isenabled()
        import prototree
        print("torch" in sys.modules, before == (dict(os.environ), gc.get_threshold(), gc.isenabled()))
    """)
    assert result.stdout.split() == ["False", "True"], result.stderr


NEEDS_OPERATOR = """
import torch
try:
    torch.ops.torchvision.nms
except AttributeError:
    raise RuntimeError("operator torchvision::nms does not exist") from None
"""


@pytest.mark.parametrize(
    ("torchvision", "output"),
    [("", "[] False"), (NEEDS_OPERATOR, "['nms', 'qnms'] True"), ("raise RuntimeError('broken')", "broken")],
    ids=["fits", "misfits", "broken in another way"],
)
def test_torchvision_operators_are_declared_only_where_its_import_fails(
    tmp_path: Path, torchvision: str, output: str
) -> None:
    (tmp_path / "torchvision.py").write_text(torchvision)
    code = """
        import prototree.backbones.weights as guard, torch, torchvision
        print(guard._declared_operators, hasattr(torch.ops.torchvision, "nms"))
    """
    result = run(code, tmp_path)
    assert output in result.stdout + result.stderr
    assert (result.returncode == 0) == (output != "broken")
