"""Pack a run into one file with the tree, its pictures and metrics; clean what a finished run no longer needs."""

import shutil
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prototree._version import __version__
from prototree.archive import MANIFEST, SUFFIX, is_shared, write_archive
from prototree.core import checkpoint
from prototree.core.model import ProtoTree
from prototree.errors import CheckpointError, ConfigError
from prototree.explanation.assets import ASSET_LIST, AssetStore, PrototypePictures
from prototree.explanation.tree import explain_tree
from prototree.features.cache import FOLDER as FEATURES
from prototree.features.cache import files_used, shared_folder
from prototree.io import prepared_beside, read_json, write_file, write_json
from prototree.pipeline.model_card import model_card
from prototree.run import ASSETS, CONFIG, METRICS, NOTES, Run, notes_by_patch
from prototree.training.loop import CHECKPOINTS

# What a finished run no longer needs: states that an interrupted training goes on from, and maps computed again.
_REMOVABLE = (CHECKPOINTS, FEATURES)
_METRICS_KEPT = (
    "version",
    "data",
    "classes",
    "stages",
    "baseline_accuracy",
    "pruning",
    "projection",
    "prototype_quality",
)


def pack(
    run: str | Path | Run, out: str | Path, *, pages: bool = True, tick: Callable[[int, int], None] | None = None
) -> Path:
    """Pack a run into one `.prototree` file that `load`, `predict`, `explain`, `report` and `serve` open like a folder.

    Args:
        run: A run, or its path.
        out: File to write; its name ends in `.prototree`.
        pages: Also store each prototype's neighbours and tests, computed from the training images if need be.
        tick: Progress callback: how many of how many steps are done.

    Returns:
        The file.

    Raises:
        CheckpointError: The run has no tree, or no pictures of its prototypes and no images to make them of.

    Examples:
        >>> pack("runs/photos", "bird-tree.prototree", pages=False).name
        'bird-tree.prototree'
    """
    run, out = Run.open(run), Path(out)
    if out.suffix != SUFFIX:
        raise ConfigError(f"expected a file that ends in {SUFFIX}, got {out}; such as {out.with_suffix(SUFFIX).name}")
    stage = checkpoint.last_stage(run.folder)
    if stage is None:
        raise CheckpointError(f"expected a run with a trained tree in {run.folder}, found none; train one first")
    with prepared_beside(out) as folder:
        tree = write_shared(run, stage, folder, find_pages=pages, tick=tick)
        write_file(
            folder / "README.md", model_card(out.stem, tree, run.metrics, notes=run.notes).encode(errors="replace")
        )
        files = (path for path in folder.rglob("*") if path.is_file())
        write_archive(out, {path.relative_to(folder).as_posix(): path for path in files})
    return out


def write_shared(
    run: Run, stage: str, folder: Path, *, find_pages: bool, tick: Callable[[int, int], None] | None = None
) -> ProtoTree:
    """Write what others get of a run to a folder that opens as a run; return its tree after that stage.

    Nothing in it names a folder of this machine. What its pages show is found out first if asked for.
    """
    tree = run.tree(stage)
    write_json(folder / MANIFEST, {"kind": "packed prototree", "version": 1, "made_by": f"prototree {__version__}"})
    write_file(folder / CONFIG, _without_paths(run).encode(errors="surrogatepass"))
    write_json(folder / METRICS, {key: value for key, value in run.metrics.items() if key in _METRICS_KEPT})
    if run.notes:
        write_json(folder / NOTES, notes_by_patch(run.notes, tree))
    _write_assets(run, tree, folder / ASSETS, find_pages, tick)
    tree = _without_folders(tree, [folder / ASSETS / ASSET_LIST])
    checkpoint.save(tree, folder / stage)
    return tree


def _without_folders(tree: ProtoTree, lists: Iterable[Path]) -> ProtoTree:
    """Strip folders of this machine from the image names in a tree and in lists about it."""
    named = [source and replace(source, image=_shared_name(source.image)) for source in tree.sources]
    tree.sources = tuple(named)
    for path in lists:
        if path.exists():
            write_json(path, _renamed(read_json(path)))
    return tree


def _shared_name(image: str) -> str:
    """Keep only file and folder of an image that lies elsewhere than its list."""
    inner = [part for part in image.split("/") if part != ".."]
    return "/".join(inner[-2:]) if image.startswith("../") else image


def _renamed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _renamed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_renamed(inner) for inner in value]
    return _shared_name(value) if isinstance(value, str) else value


def _write_assets(run: Run, tree: ProtoTree, folder: Path, find: bool, tick: Callable[[int, int], None] | None) -> None:
    """Copy the run's assets; make what is missing where its data is here, pages only if asked for."""
    stored, data = AssetStore(tree, run.folder / ASSETS), None
    _copy(stored.files(), folder)
    if not PrototypePictures(tree, stored=folder).complete:
        if (data := run.data_or_none()) is None:
            raise CheckpointError(
                f"{run.folder} has no pictures of its prototypes, and its training data is not here to make them; run "
                "`prototree report` where the data is, then try again"
            )
        AssetStore(tree, folder).save_pictures(data)
    if find and not stored.has_pages and (data := data or run.data_or_none()) is not None:
        AssetStore(tree, folder).save_pages(explain_tree(run, data=data, tick=tick))


def _copy(files: Iterable[Path], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for path in files:
        if is_shared(f"{folder.name}/{path.name}"):
            shutil.copyfile(path, folder / path.name)


def _without_paths(run: Run) -> str:
    """Drop the names of files on this machine from the configuration."""
    config = run.config
    paths = {key: "none" for key in ("weights",) if str(getattr(config, key)) not in ("auto", "hub", "none")}
    paths |= {key: "" for key in ("teacher",) if getattr(config.recipe, key, "")}
    return config.replace(paths).to_toml()


@dataclass(frozen=True)
class Removed:
    """What `clean` removed, and how many bytes of disk it gave back."""

    path: Path
    n_bytes: int


def clean(run: str | Path | Run) -> list[Removed]:
    """Remove from a finished run what only an interrupted training needs, or what can be computed again.

    The tree after every stage, metrics, pictures, notes and reports stay. Feature maps that other runs use stay too.

    Examples:
        >>> freed = clean("runs/photos")
        >>> all(item.n_bytes > 0 for item in freed)
        True
    """
    run = Run.open(run).check_writable()
    if not run.last_metrics:
        raise ConfigError(
            f"{run.folder} is not finished, and cleaning would remove what its training continues from; finish it "
            "with `prototree train … --resume`"
        )
    folder = run.folder.resolve()
    spare = [folder / name for name in _REMOVABLE] + [folder.with_name(f"{folder.name}-edits") / "maps"]
    return [removed for removed in map(_remove, [*spare, *_unshared_features(folder)]) if removed.n_bytes]


def _unshared_features(folder: Path) -> list[Path]:
    """List files of the shared feature cache that this run alone uses, with those beside them."""
    beside = (path for path in folder.parent.iterdir() if path.is_dir() and path != folder)
    others = {name for path in beside for name in files_used(path)}
    shared = shared_folder(folder)
    own = [shared / name for name in files_used(folder) if name not in others and Path(name).name == name]
    return [path.with_suffix(suffix) for path in own for suffix in (".json", path.suffix, ".partial", ".lock")]


def _remove(path: Path) -> Removed:
    """Remove a file or folder, and count the bytes freed: a file with another hard link stays on disk."""
    if path.is_symlink() or not path.exists():
        return Removed(path, 0)
    stats = [file.lstat() for file in (path.rglob("*") if path.is_dir() else [path])]
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return Removed(path, sum(item.st_size for item in stats if stat.S_ISREG(item.st_mode) and item.st_nlink == 1))
