"""Trees from others: as one `.prototree` file, a plain zip of what a run needs to be looked at, or from the model hub.

Whoever opens one may not know who made it. So nothing is taken from it but files of names that we know, each once, of
sizes that its own size allows; no link, no path that leads elsewhere, nothing encrypted. What it holds is read by the
same readers as a run's folder: JSON, safetensors and pictures.
"""

import atexit
import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from prototree.errors import CheckpointError
from prototree.io import MAX_TEXT_BYTES, cache_folder, open_regular, prepared_beside, replacing

log = logging.getLogger(__name__)

SUFFIX = ".prototree"
MANIFEST = "packed.json"  # says that a folder came out of such a file, and so is not to be changed
MAX_FILES = 20_000
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_MAX_HUB_BYTES = 4 * 2**30
_SHARED = re.compile(
    r"packed\.json|config\.toml|metrics\.json|notes\.json|README\.md|rules\.txt|tree\.svg|tree\.png"
    r"|(trained|pruned|projected)/(tree\.json|weights\.safetensors)"
    r"|assets/(assets\.json|[a-z0-9-]{1,40}\.webp)"
)
_MAX_BYTES = 12 << 30  # of the file itself: the largest weights that are read, and room for pictures
_MAX_RATIO = 20  # bytes for each byte of the file: JSON shrinks well, weights and pictures not at all
_TEXT = (".json", ".toml", ".md", ".txt", ".svg")
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)  # the same for all: the same run gives the same bytes
_CHUNK = 1 << 20


def is_shared(name: str) -> bool:
    """Whether a file of this name, within a run, is sent to others and taken from them. None of these holds code."""
    return _SHARED.fullmatch(name) is not None


def write_archive(path: Path, content: Mapping[str, Path | bytes]) -> None:
    """Write a zip of some files, by their names in it; replaced as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, source in sorted(content.items()):
            assert is_shared(name), name
            entry = zipfile.ZipInfo(name, _ZIP_EPOCH)
            entry.external_attr = (stat.S_IFREG | 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED if name.endswith(_TEXT) else zipfile.ZIP_STORED
            with archive.open(entry, "w", force_zip64=True) as inside:
                if isinstance(source, bytes):
                    inside.write(source)
                else:
                    with open(source, "rb") as opened:
                        shutil.copyfileobj(opened, inside, _CHUNK)
        if reason := next(filter(None, (_suspicious(entry, set()) for entry in archive.infolist())), ""):
            raise CheckpointError(f"{path} would not open again: a file in it {reason}; what was there is unchanged")


def folder_of(path: Path) -> Path:
    """The folder of a run: the path itself, or what a packed file holds, extracted into the cache once."""
    if not path.is_file():
        return path
    try:
        with open_regular(path, _MAX_BYTES) as file:
            with _opened(file, path) as archive:  # what is no archive is not read to its end
                _checked(archive, path)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            # The name is shown to people; one of dots alone would be another folder.
            folder = _cache(digest[:32]) / (path.stem.lstrip(".") or "tree")
            if not (folder / MANIFEST).exists():  # it is extracted last
                _extract(file, path, folder)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened ({error.strerror or error}); expected a packed tree") from error
    return folder


def _cache(name: str) -> Path:
    """A folder to extract to; where the cache cannot be written to, one that goes when the program ends."""
    try:
        folder = cache_folder() / "packed" / name
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="prototree-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _extract(file: IO[bytes], path: Path, folder: Path) -> None:
    with _opened(file, path) as archive, prepared_beside(folder) as waiting:
        for entry in _checked(archive, path):
            target, left = waiting / entry.filename, entry.file_size
            target.parent.mkdir(exist_ok=True)
            with archive.open(entry) as inside, open(target, "wb") as out:
                while chunk := inside.read(_CHUNK):
                    left -= len(chunk)
                    if left < 0:  # never more than was promised, whatever the compressed bytes say
                        raise CheckpointError(f"{path} is damaged: {entry.filename} is longer than it says")
                    out.write(chunk)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            os.rename(waiting, folder)
        except OSError:
            if not (folder / MANIFEST).exists():  # unless another process was faster
                raise


@contextmanager
def _opened(file: IO[bytes], path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(file) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged, or no tree that `prototree pack` made ({error}); ask for it again"
        ) from error


def _checked(archive: zipfile.ZipFile, path: Path) -> list[zipfile.ZipInfo]:
    """The entries to extract; an archive with anything suspicious is refused as a whole."""
    entries = archive.infolist()
    if len(entries) > MAX_FILES:
        raise CheckpointError(f"{path} holds {len(entries):,} files, the limit is {MAX_FILES:,}; it is not opened")
    seen: set[str] = set()
    for entry in entries:
        if reason := _suspicious(entry, seen):
            raise CheckpointError(f"{path} is not opened: {entry.filename[:80]!r} {reason}; ask whoever made it")
        seen.add(entry.filename.casefold())
    known = [entry for entry in entries if is_shared(entry.filename)]
    if MANIFEST not in (entry.filename for entry in known):
        raise CheckpointError(f"{path} is no tree that `prototree pack` made: it has no {MANIFEST}")
    size, limit = sum(entry.file_size for entry in known), _MAX_RATIO * path.stat().st_size + (1 << 20)
    if size > limit:
        raise CheckpointError(
            f"{path} would become {size:,} bytes, more than a file of its size can hold ({limit:,}); it is not opened"
        )
    return known


def _suspicious(entry: zipfile.ZipInfo, seen: set[str]) -> str:
    """What is wrong with an entry; nothing: an empty text."""
    name, mode = entry.filename, entry.external_attr >> 16
    if name.startswith(("/", "\\")) or "\\" in name or ":" in name or ".." in name.split("/"):
        return "leads out of the folder"
    if mode and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_IFMT(mode) == 0):
        return "is a link or a device, not a file"
    if name.casefold() in seen:
        return "is there twice"
    if entry.flag_bits & 0x1:
        return "is encrypted"
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "is compressed in a way we do not read"
    if name.endswith(_TEXT) and entry.file_size > MAX_TEXT_BYTES:
        return f"claims more than {MAX_TEXT_BYTES >> 20} MiB of text"
    return ""


def pull(name: str | Path) -> Path:
    """Fetch a run from the hub, or the last one fetched where there is no network; return its folder."""
    from huggingface_hub import HfApi, snapshot_download

    name, api = Path(name).as_posix(), HfApi(endpoint=hub_endpoint(), library_name="prototree")
    try:
        info = api.model_info(name, files_metadata=True)
    except Exception as error:  # the client raises many kinds, all of which mean the same to the user
        try:
            cached = Path(snapshot_download(name, local_files_only=True))
            if not (cached / MANIFEST).exists():
                raise FileNotFoundError(MANIFEST)
        except Exception:
            raise CheckpointError(
                f"there is no folder {name} here, and no model {name} could be fetched from the hub "
                f"({hub_reason(error)}); check the name, and log in with `hf auth login` if it is private"
            ) from error
        log.warning("the hub cannot be reached (%s); using %s as it was fetched last", hub_reason(error), name)
        return cached
    files = {file.rfilename: file.size or 0 for file in info.siblings or [] if is_shared(file.rfilename)}
    for needed in ("projected/tree.json", MANIFEST):  # the mark says that it may name no folder of this machine
        if needed not in files:
            raise CheckpointError(f"{name} on the hub is no prototype tree: it has no {needed}; choose another")
    if (total := sum(files.values())) > _MAX_HUB_BYTES or len(files) > MAX_FILES:
        raise CheckpointError(f"{name} on the hub has {len(files)} files of {total >> 20} MiB; expected a single tree")
    try:
        return Path(snapshot_download(name, allow_patterns=list(files), endpoint=hub_endpoint()))
    except Exception as error:
        raise CheckpointError(f"{name} could not be fetched from the hub ({hub_reason(error)}); try again") from error


def hub_endpoint() -> str | None:
    """Where the hub is; None for the usual one. `HF_ENDPOINT` names another, as for the client itself."""
    return os.environ.get("HF_ENDPOINT") or None


def hub_reason(error: Exception) -> str:
    """The first two lines: the client's advice behind them is for its own callers."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:200] or type(error).__name__


def located(name: Path | str) -> Path:
    """Return the folder of a run that is a folder, a file that `pack` made, or `user/name` on the model hub."""
    return pull(name) if is_hub_name(name) else folder_of(Path(name))


def is_hub_name(name: Path | str) -> bool:
    """Whether this can only be the name of a model on the hub: `user/name`, where no folder `user` is here."""
    path = Path(name)
    return HUB_NAME.fullmatch(path.as_posix()) is not None and not path.exists() and not path.parent.exists()
