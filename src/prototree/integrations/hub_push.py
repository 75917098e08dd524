"""A run on the model hub: its tree, pictures, figures and a card, without anything about the machine it was made on."""

import logging
import tempfile
from dataclasses import replace
from pathlib import Path

from prototree.core import checkpoint, hub
from prototree.core.checkpoint import PROJECTED
from prototree.core.shared_files import is_shared
from prototree.errors import CheckpointError, ConfigError, MissingExtraError, ProtoTreeError
from prototree.explain.tree import explain_tree
from prototree.files import write_file
from prototree.integrations.model_card import model_card
from prototree.pipeline.share import write_shared
from prototree.report.images import png
from prototree.report.printing import image
from prototree.report.rules import rules_text
from prototree.report.tree_print import pages, tree_svg
from prototree.run import Run

log = logging.getLogger(__name__)

LICENCE = "unknown"


def push(
    run: Run | str | Path,
    name: str,
    *,
    licence: str = LICENCE,
    private: bool = False,
    message: str = "A prototype tree",
) -> str:
    """Sends a run to the hub as `user/name`, new or replaced; returns the address. Log in first with `hf auth login`.

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
            before = [one for one in api.list_repo_files(name) if is_shared(one)]
            api.upload_folder(repo_id=name, folder_path=folder, commit_message=message, delete_patterns=before)
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
    tree = write_shared(run, PROJECTED, folder, find_pages=False)
    shown = _draw(folder, name)
    card = model_card(name, tree, run.metrics, licence=licence, picture=shown)
    write_file(folder / "README.md", card.encode("utf-8", errors="replace"))


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
