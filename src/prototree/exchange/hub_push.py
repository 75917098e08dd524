"""A run on the model hub: its tree, pictures, figures and a card, without anything about the machine it was made on."""

import fnmatch
import logging
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from prototree.errors import CheckpointError, ConfigError, MissingExtraError, ProtoTreeError
from prototree.exchange.model_card import model_card
from prototree.explain.prototype_pictures import PrototypePictures, write_pictures
from prototree.explain.whole_tree import explain_tree
from prototree.files import write_file, write_json
from prototree.report.encoding import png
from prototree.report.printing import image
from prototree.report.rules import rules_text
from prototree.report.tree_print import pages, tree_svg
from prototree.run import CONFIG, METRICS, NOTES, PICTURES, Run
from prototree.tree import checkpoint, hub
from prototree.tree.checkpoint import PROJECTED
from prototree.tree.model import ProtoTree

log = logging.getLogger(__name__)

LICENCE = "unknown"
_PRIVATE = ("source", "seconds")  # figures that speak of the machine, not of the tree


def push(
    run: Run | str | Path,
    name: str,
    *,
    licence: str = LICENCE,
    private: bool = False,
    message: str = "A prototype tree",
) -> str:
    """Sends a run to the hub as `user/name`, made new or replaced; the address. Log in first with `hf auth login`.

    Examples:
        >>> push("runs/photos", "me/bird-tree", licence="mit")  # doctest: +SKIP
        'https://huggingface.co/me/bird-tree'
    """
    if not hub.NAME.fullmatch(name):
        raise ConfigError(f"expected a name such as me/bird-tree, got {name!r}")
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as folder:
        stage(Run.open(run), Path(folder), name, licence)
        api = HfApi(endpoint=hub.endpoint(), library_name="prototree")
        try:
            address = str(api.create_repo(name, private=private, exist_ok=True))
            api.upload_folder(repo_id=name, folder_path=folder, commit_message=message, delete_patterns=list(hub.FILES))
        except Exception as error:  # the client raises many kinds
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise ProtoTreeError(
                f"{name} could not be sent to the hub ({reason}); log in with `hf auth login` and try again"
            ) from error
    return address


def stage(run: Run, folder: Path, name: str, licence: str = LICENCE) -> None:
    """Writes to a folder what the hub gets: a run that `load` and the commands that look at runs can open."""
    if checkpoint.last_stage(run.folder) != PROJECTED:
        raise CheckpointError(f"expected a projected tree in {run.folder}; run first: prototree project {run.folder}")
    tree = run.tree(PROJECTED)
    checkpoint.save(tree, folder / PROJECTED)
    metrics = {key: value for key, value in run.metrics.items() if key not in _PRIVATE}
    write_json(folder / METRICS, metrics)
    write_file(folder / CONFIG, _without_paths(run).encode())
    if run.notes:
        write_json(folder / NOTES, run.notes)
    _take_pictures(run, tree, folder / PICTURES)
    shown = _draw(folder, name)
    card = model_card(name, tree, metrics, licence=licence, picture=shown)
    write_file(folder / "README.md", card.encode("utf-8", errors="replace"))


def _take_pictures(run: Run, tree: ProtoTree, folder: Path) -> None:
    """The pictures of the prototypes as the run has them, or made from its photos."""
    if PrototypePictures(tree, stored=run.folder / PICTURES).complete:
        folder.mkdir(exist_ok=True)
        for picture in sorted((run.folder / PICTURES).iterdir()):
            if any(fnmatch.fnmatchcase(f"{PICTURES}/{picture.name}", own) for own in hub.FILES):
                shutil.copyfile(picture, folder / picture.name)
    elif (data := run.data_if_here()) is not None:
        write_pictures(tree, data, folder)
    else:
        raise CheckpointError(
            f"{run.folder} has no pictures of its prototypes, and the photos it was made with are not here; "
            "send it from the machine that has them"
        )


def _without_paths(run: Run) -> str:
    """The configuration without the names of files on this machine."""
    config = run.config
    paths = {key: "none" for key in ("weights",) if str(getattr(config, key)) not in ("auto", "hub", "none")}
    paths |= {key: "" for key in ("teacher",) if getattr(config.recipe, key, "")}
    return config.changed(paths).to_toml()


def _draw(folder: Path, name: str) -> str:
    """The tree as pictures and rules, from what is stored in the folder; the file that a page should show."""
    explanation = replace(explain_tree(Run(folder)), title=name)
    write_file(folder / "rules.txt", rules_text(explanation).encode("utf-8", errors="replace"))
    write_file(folder / "tree.svg", tree_svg(explanation).encode("utf-8", errors="replace"))
    try:
        write_file(folder / "tree.png", png(image(pages(explanation)[0])))
    except MissingExtraError as error:
        log.warning("the card shows tree.svg instead of tree.png: %s", error)
        return "tree.svg"
    return "tree.png"
