"""A place in which the commands and programs of the documents run within seconds: tiny photos and a tiny run.

The names are those that the documents use: `photos/`, `runs/photos`, `holiday/`, `bird.jpg`.
"""

import atexit
import io
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from prototree.cli import app
from prototree.editing.session import edit
from tiny_training import TINY, TINY_DISTILL

ROOT = Path(__file__).parents[1]
COLOURS = {"bluebird": (50, 60, 200), "cardinal": (200, 40, 40), "greenfinch": (40, 180, 60)}
QUICK = {**TINY_DISTILL, "head_epochs": 3, "epochs": 3, "pretrain_epochs": 1, "views": 2, "calibration_fraction": 0}
_KEPT: dict[tuple[str, ...], Path] = {}
_KEPT_IN = Path(tempfile.mkdtemp(prefix="prototree-documents-"))
atexit.register(shutil.rmtree, _KEPT_IN, ignore_errors=True)


def write_photos(root: Path) -> None:
    """What the documents call photos, in all the forms that they name."""
    random = np.random.default_rng(0)

    def photo(path: Path, colour: tuple[int, int, int] | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(90, 160, (40, 40, 3), dtype=np.uint8)
        if colour is not None:
            top, left = random.integers(0, 24, 2)
            pixels[top : top + 16, left : left + 16] = colour
        Image.fromarray(pixels).save(path)

    for name, colour in COLOURS.items():
        for split, count in (("train", 8), ("test", 3)):
            for number in range(count):
                photo(root / "photos" / split / name / f"{number}.png", colour)
        photo(root / "holiday" / f"{name}.png", colour)
    photo(root / "holiday" / "nothing.png", None)
    photo(root / "bird.jpg", COLOURS["bluebird"])
    photo(root / "ood" / "noise.png", None)
    rows = [
        f"{path.relative_to(root)},{path.parent.name},{path.parent.parent.name}"
        for path in sorted((root / "photos").rglob("*.png"))
    ]
    (root / "photos.csv").write_text("\n".join(["path,label,split", *rows, ""]))
    (root / "labelled.csv").write_text("path,label\n" + "".join(f"holiday/{one}.png,{one}\n" for one in COLOURS))


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Language and code of the fenced blocks of a document, without those below a comment that says why not."""
    for match in re.finditer(r"(?P<before>.*?)^```(?P<language>\w+)\n(?P<code>.*?)^```$", text, re.S | re.M):
        if not match["before"].rstrip().rpartition("\n")[2].startswith("<!-- not run:"):
            yield match["language"], match["code"]


def command_lines(code: str) -> Iterator[str]:
    """The commands of a block, without their comments."""
    for line in code.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True, posix=False):
            yield " ".join(words)


def run_command(line: str) -> None:
    """Does what a line of a document says, with settings that take seconds; an error if it does not work."""
    *feeding, last = line.split(" | ")
    words = shlex.split(last)
    if words[0] == "make":  # the commands of ours in its recipe; `make setup` made the environment that we are in
        recipe = subprocess.run(
            ["make", "-n", words[1], "-o", ".venv/.ready"], cwd=ROOT, capture_output=True, text=True
        )
        ours = [shlex.split(step)[1:] for step in _checked(recipe).splitlines() if "/prototree " in step]
        assert ours or words[1] == "setup", line
        for own in ours:
            _run_prototree(["photos/" if word == "birds" else word for word in own], "")
    elif words[0] == "python":
        words[1] = str(ROOT / words[1])
        _checked(subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, timeout=3600))
    else:
        assert words.pop(0) == "prototree", line
        given = _checked(subprocess.run(shlex.split(feeding[0]), capture_output=True, text=True)) if feeding else ""
        _run_prototree(words, given)


def _checked(done: "subprocess.CompletedProcess[str]") -> str:
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _run_prototree(words: list[str], given: str) -> None:
    if words[0] in ("train", "reproduce") and "--resume" not in words:
        _run_once([*words, *_quick_settings(words)], Path(words[words.index("--out") + 1]))
        return
    if words[0] == "train":
        words = [*words, *_quick_settings(words)]
    elif words[:2] == ["data", "birds"]:
        words = [*words, "--species", "3", "--train", "8", "--test", "4"]
    elif words[0] == "finetune" and not Path(words[1]).exists():  # what the page has people save in the browser
        edit(words[1].removesuffix("-edited-1")).save()
    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(given.encode()))
    try:
        code = app(words, standalone_mode=False)
    finally:
        sys.stdin = before
    assert not code, (words, code)


def _run_once(words: list[str], out: Path) -> None:
    """Many pages begin with the same training: the second time its outcome is copied."""
    shutil.rmtree(out, ignore_errors=True)
    kept = _KEPT.setdefault(tuple(words), _KEPT_IN / str(len(_KEPT)))
    if not kept.exists():
        assert not app(words, standalone_mode=False), words
        shutil.copytree(out, kept)
    else:
        shutil.copytree(kept, out)


def _quick_settings(words: list[str]) -> list[str]:
    """Settings that are appended; those that the document itself gives win."""
    is_paper = words[0] == "reproduce" or "paper-cub" in words
    chosen = dict(TINY, prune_threshold=0.34, epochs=2) if is_paper else dict(QUICK)
    chosen.pop("recipe", None)
    if words[0] == "reproduce":
        chosen.pop("height")
        chosen["prune_threshold"] = 0  # after so few epochs no leaf is sure
    options = {f"--{key.replace('_', '-')}": str(value).lower() for key, value in chosen.items()}
    return [word for option, value in options.items() if option not in words for word in (option, value)]


def quick_python(code: str) -> str:
    """A program of the documents whose trainings take seconds."""
    code = re.sub(r"settings=\{", "settings=QUICK | {", code)
    call = r"(\bfit\((?!paths|train|pixels|other)(?:[^()]|\([^()]*\))*?)\)"

    def with_settings(match: re.Match[str]) -> str:
        return match[0] if "settings=" in match[1] else f"{match[1]}, settings=QUICK)"

    code = re.sub(rf"{call}(?= *(?:#.*)?$)", with_settings, code, flags=re.M)
    return code.replace("ProtoTreeClassifier(", "ProtoTreeClassifier(**QUICK, ")


def trained(folder: Path) -> None:
    """`folder` as documents expect it, with a trained run; the present folder must be that one."""
    write_photos(folder)
    run_command("prototree train photos/ --out runs/photos")
