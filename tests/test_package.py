"""The package as a whole: what it exports, which way imports go, and torchvision beside another torch."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import prototree

SOURCE = Path(prototree.__file__).parent

# From the ground up, a floor each: a room may import only from its own floor and from those below.
FLOORS = [
    {"_version", "errors", "files", "progress", "settings", "threads"},
    {"backbones"},
    {"core"},
    {"data"},
    {"training"},
    {"evaluation"},
    {"config"},
    {"run"},
    {"explain"},
    {"pipeline"},
    {"report"},
    {"integrations"},
    {"editing"},
    {"app"},
    {"cli", "__main__"},
]


def rooms_imported_by(path: Path) -> set[str]:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "prototree":
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prototree."):
            imported.add((node.module or "").split(".")[1])
        elif isinstance(node, ast.Import):
            imported |= {a.name.split(".")[1] for a in node.names if a.name.startswith("prototree.")}
    return imported


def test_imports_go_only_down() -> None:
    floor_of = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
    seen = set()
    for path in sorted(p for p in SOURCE.rglob("*.py") if p != SOURCE / "__init__.py"):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        seen.add(room)
        above = [other for other in rooms_imported_by(path) if floor_of[other] > floor_of[room]]
        assert not above, f"{path.relative_to(SOURCE)} imports from a room above it"
    assert seen == set(floor_of), "a room is missing from the list, or the list names one that is gone"


def test_folders_say_what_they_are_for() -> None:
    for folder in sorted(path for path in SOURCE.rglob("*") if path.is_dir() and list(path.glob("*.py"))):
        docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert docstring is not None, folder
        assert len(docstring) > 80, folder
    assert len(list(SOURCE.glob("*.py"))) <= 10


PUBLIC = """
Answer Backbone Config DecisionExplanation EditSession Ensemble FeatureExtractor ImageData Metrics Path Prediction
Preprocessing ProtoTree ProtoTreeClassifier ProtoTreeError PrototypeSource Run Topology TreeExplanation TreeOutput
TreePrediction __version__ ask clean cross_validate evaluate evaluate_ensemble evaluate_ood evaluate_parts
explain_image explain_tree export_onnx finetune fit fit_seeds import_reference load open_data open_session pack
predict predict_each preset project prune push reproduce rerun save show write_decision write_report
"""


def test_every_public_name_is_there_and_documented() -> None:
    assert sorted(prototree.__all__) == prototree.__all__ == sorted(PUBLIC.split())
    assert set(prototree.__all__) == set(prototree._HOMES) | {"__version__"}
    for name in prototree.__all__:
        assert getattr(prototree, name).__doc__, name


def run(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    script = "import sys\n" + "".join(f"sys.path.insert(0, {str(p)!r})\n" for p in path) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=3600)


@pytest.mark.parametrize("fits", [True, False])
def test_torchvision_operators_are_declared_only_where_its_import_fails(tmp_path: Path, fits: bool) -> None:
    (tmp_path / "torchvision").mkdir()
    needs_operator = """
        import torch
        try:
            torch.ops.torchvision.nms
        except AttributeError:
            raise RuntimeError("operator torchvision::nms does not exist") from None
    """
    body = "" if fits else textwrap.dedent(needs_operator)
    (tmp_path / "torchvision" / "__init__.py").write_text(body)
    result = run(
        """
        import prototree.backbones.torchvision_guard as guard, torch, torchvision
        print(guard._declared, hasattr(torch.ops.torchvision, "nms"))
        """,
        tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ("[] False" if fits else "['nms', 'qnms'] True")


def test_another_failure_of_torchvision_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('broken in another way')")
    result = run("import prototree.backbones.torchvision_guard", tmp_path)
    assert "broken in another way" in result.stderr


def test_importing_the_package_does_not_import_torch() -> None:
    assert run("import prototree, sys; print('torch' in sys.modules)").stdout.strip() == "False"


def test_transforms_and_models_import_here() -> None:
    result = run(
        "import prototree.backbones.torchvision_guard, timm; from torchvision.transforms import v2; print(v2.Resize(8))"
    )
    assert result.returncode == 0, result.stderr


def test_public_names_stay_what_they_are_when_rooms_are_imported() -> None:
    # A room of the same name as a function would take its place in the package.
    result = run(
        """
        import prototree, prototree.pipeline.fit
        print(all(callable(getattr(prototree, name)) for name in prototree._HOMES))
        """
    )
    assert result.stdout.strip() == "True", result.stderr


@pytest.mark.parametrize("first", ["", "import prototree.explain.records, prototree.report.text"])
def test_packages_with_the_name_of_a_verb_can_be_called(first: str) -> None:
    """And stay packages, whichever was asked for first."""
    result = run(
        f"""
        import prototree
        {first}
        for call in (prototree.explain, prototree.report):
            try:
                call("nowhere", "nothing")
            except prototree.ProtoTreeError as error:
                print("nowhere" in str(error))
        import prototree.explain.records
        from prototree import explain, report
        print(explain.records.UNKNOWN, callable(report.write_report))
        """
    )
    assert result.stdout.split("\n") == ["True", "True", "I don't know True", ""], result.stderr
