"""Trees on the Hugging Face hub: push a run as `user/name`, pull it again.

A pushed run has its tree, pictures, metrics and a model card, and nothing about the machine it was made on. Of a model
on the hub only files that a run consists of are pulled, none of which holds code, and only as many bytes as a tree may
have; they stay in the hub client's own cache.
"""

import logging
import tempfile
from dataclasses import replace
from pathlib import Path

from prototree.archive import HUB_NAME, hub_endpoint, hub_reason, is_shared
from prototree.core import checkpoint
from prototree.core.checkpoint import PROJECTED
from prototree.errors import CheckpointError, ConfigError, ProtoTreeError
from prototree.explanation.tree import explain_tree
from prototree.io import write_file
from prototree.pipeline.model_card import model_card
from prototree.pipeline.share import write_shared
from prototree.reporting.figures import tree_figure
from prototree.reporting.text import rules_text
from prototree.run import Run

log = logging.getLogger(__name__)

LICENSE = "unknown"


def push(
    run: Run | str | Path,
    name: str,
    *,
    license: str = LICENSE,  # noqa: A002
    private: bool = False,
    message: str = "A prototype tree",
) -> str:
    """Push a run to the Hugging Face hub, with its pictures, metrics and a model card.

    Log in first with `hf auth login`.

    Args:
        run: A run with a projected tree, or its path.
        name: Where to put it, such as me/bird-tree; what is there is replaced.
        license: The hub's name of the licence, such as mit.
        private: Make a new repository visible to you only.
        message: Commit message.

    Returns:
        The address of the model.

    Raises:
        CheckpointError: The run has no projected tree.
        ProtoTreeError: The hub refused it or could not be reached.

    Examples:
        >>> push("runs/photos", "me/bird-tree", license="mit")  # doctest: +SKIP
        'https://huggingface.co/me/bird-tree'
    """
    if not HUB_NAME.fullmatch(name):
        raise ConfigError(f"expected a name such as me/bird-tree, got {name!r}")
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as folder:
        stage(Run.open(run), Path(folder), name, license)
        api = HfApi(endpoint=hub_endpoint(), library_name="prototree")
        try:
            address = str(api.create_repo(name, private=private, exist_ok=True))
            replaced = [file for file in api.list_repo_files(name) if is_shared(file)]
            api.upload_folder(repo_id=name, folder_path=folder, commit_message=message, delete_patterns=replaced)
        except Exception as error:  # the client raises many kinds
            raise ProtoTreeError(
                f"{name} could not be sent to the hub ({hub_reason(error)}); log in with `hf auth login` and try again"
            ) from error
    return address


def stage(run: Run, folder: Path, name: str, license: str = LICENSE) -> None:  # noqa: A002
    """Write to a folder what the hub gets: a run that `load` and the commands that look at runs can open."""
    if checkpoint.last_stage(run.folder) != PROJECTED:
        raise CheckpointError(f"expected a projected tree in {run.folder}; run first: prototree project {run.folder}")
    tree = write_shared(run, PROJECTED, folder, find_pages=False)
    explanation = replace(explain_tree(Run(folder)), title=name)
    write_file(folder / "rules.txt", rules_text(explanation).encode("utf-8", errors="replace"))
    figure = tree_figure(explanation)
    write_file(folder / "tree.svg", figure.svg.encode("utf-8", errors="replace"))
    write_file(folder / "tree.png", figure.png())
    card = model_card(name, tree, run.metrics, license=license, picture="tree.png", notes=run.notes)
    write_file(folder / "README.md", card.encode("utf-8", errors="replace"))
