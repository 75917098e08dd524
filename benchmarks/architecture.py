"""Measure the package itself: modules, lines, public names, settings, files to open for each recipe, stores on disk.

    python benchmarks/architecture.py [SRC]      # SRC: another checkout's src folder, to compare with

The targets are those of the architecture page. Files of a recipe are those of the package `training` that its module
imports, directly or through others of `training`, without what is shared with the rest of the program (distribution
over processes, teachers).
"""

import ast
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHARED = {"distributed", "teacher", "__init__"}
GLOSSARY = (  # words of an earlier dialect that no identifier should have
    "sureness", "stranger", "strangers", "yardstick", "workshop", "mend", "relearn", "ballot", "twins", "beside",
    "trunk", "holding_out", "looked_at", "followed", "striking", "reach", "said", "apart", "border", "tidy", "mistakes",
    "looks",
)  # fmt: skip


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "src"
    files = {path: path.read_text() for path in sorted(source.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in files.items()}
    n_lines = sum(len(text.splitlines()) for text in files.values())
    print(f"modules: {len(files)} (at most 120)")
    print(f"lines of src: {n_lines} (at most 20,000)")
    for room, count, lines in rooms(source, files):
        print(f"    {room}: {count} files, {lines} lines")
    lengths = [
        (node.end_lineno or node.lineno) - node.lineno + 1 for tree in trees.values() for node in functions(tree)
    ]
    print(f"functions: {len(lengths)}, median {statistics.median(lengths):.0f} lines, longest {max(lengths)}")
    print(f"public names: {len(public_names(source))} (at most 32)")
    print(f"settings: {len(settings())} (at most 45)")
    for recipe in ("paper", "distill"):
        parts = recipe_files(source / "prototree" / "training", recipe)
        lines = sum(len(files[path].splitlines()) for path in parts)
        print(f"files to open for the recipe {recipe}: {len(parts)}, {lines} lines: {', '.join(p.name for p in parts)}")
    numbered = [path for path, text in files.items() if re.search(r"# 5: .*Eq\. 1", text)]
    print(f"files with the numbered lines of Algorithm 1: {[str(path.relative_to(source)) for path in numbered]}")
    print("stores on disk: " + "; ".join(STORES))
    words = sorted({word for tree in trees.values() for word in identifiers(tree) if word in GLOSSARY})
    print(f"identifiers in words that are not the field's: {len(words)} {words} (at most 5)")


STORES = (
    "run directory (config, checkpoints, trees, metrics)",
    "feature cache beside the runs",
    "assets of a run's pages",
    "user cache (unpacked trees, converted networks, file digests)",
)


def rooms(source: Path, files: dict[Path, str]) -> Iterator[tuple[str, int, int]]:
    counted: dict[str, list[int]] = {}
    for path, text in files.items():
        parts = path.relative_to(source).parts
        room = parts[0] if len(parts) == 2 or parts[0] != "prototree" else parts[1]
        counted.setdefault(room, []).append(len(text.splitlines()))
    yield from ((room, len(lines), sum(lines)) for room, lines in counted.items())


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute):
            yield node.attr


def public_names(source: Path) -> list[str]:
    stub = source / "prototree" / "__init__.pyi"
    tree = ast.parse((stub if stub.exists() else stub.with_suffix(".py")).read_text())
    listed = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return list(ast.literal_eval(listed[0]))


def settings() -> set[str]:
    from prototree.config import RECIPE_SETTINGS, Common

    return {"recipe", *Common.names(), *(name for recipe in RECIPE_SETTINGS.values() for name in recipe.names())}


def recipe_files(folder: Path, recipe: str) -> list[Path]:
    found, waiting = list[str](), [recipe]
    while waiting:
        name = waiting.pop(0)
        if name in found or name in SHARED or not (folder / f"{name}.py").exists():
            continue
        found.append(name)
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prototree.training"):
                module = (node.module or "").removeprefix("prototree.training").lstrip(".")
                waiting += [module] if module else [alias.name for alias in node.names]
    return [folder / f"{name}.py" for name in found]


if __name__ == "__main__":
    main()
