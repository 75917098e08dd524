"""A model hub in memory, in place of the hub's client: the five calls that sending and fetching a model take."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest


@dataclass
class Hub:
    """What it holds and what it was asked."""

    cache: Path
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)  # by model, then by name
    private: dict[str, bool] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    is_down: bool = False

    def _model(self, name: str) -> dict[str, bytes]:
        self.asked.append(name)
        if self.is_down or name not in self.files:
            raise ConnectionError(f"no model {name}")
        return self.files[name]

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> str:
        self.files.setdefault(name, {})
        self.private[name] = private
        self._model(name)
        return f"https://hub.example/{name}"

    def list_repo_files(self, name: str) -> list[str]:
        return list(self._model(name))

    def upload_folder(self, repo_id: str, folder_path: Path, commit_message: str, delete_patterns: list[str]) -> None:
        files, folder = self._model(repo_id), Path(folder_path)
        for pattern in delete_patterns:
            files.pop(pattern)
        files |= {
            path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }

    def model_info(self, name: str, *, files_metadata: bool) -> SimpleNamespace:
        sizes = {file: len(content) for file, content in self._model(name).items()}
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file, size=size) for file, size in sizes.items()])

    def snapshot_download(
        self,
        name: str,
        *,
        allow_patterns: Sequence[str] = (),
        endpoint: str | None = None,
        local_files_only: bool = False,
    ) -> str:
        folder = self.cache / name
        if local_files_only and not folder.exists():
            raise FileNotFoundError(name)
        for file in () if local_files_only else allow_patterns:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(self._model(name)[file])
        return str(folder)


def use_fake_hub(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Hub:
    """Let the hub's client be this one."""
    hub = Hub(folder)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **_: hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub
