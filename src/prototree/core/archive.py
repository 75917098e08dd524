"""A tree in one file that can be sent to somebody: a plain zip of what a run needs to be looked at and asked.

Whoever opens one may not know who made it. So nothing is taken from it but files of names that we know, each once, of
sizes that its own size allows; no link, no path that leads elsewhere, nothing encrypted. What it holds is read by the
same readers as a run's folder: JSON, safetensors and pictures. No torch here.
"""

import atexit
import hashlib
import os
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from prototree.core.shared_files import MAX_FILES, is_shared
from prototree.errors import CheckpointError
from prototree.files import MAX_TEXT_BYTES, cache_folder, open_regular, prepared_beside, replacing

SUFFIX = ".prototree"
MARK = "packed.json"
"""Says that a folder came out of such a file, and so is not to be changed."""

MAX_ENTRIES = MAX_FILES
_MAX_BYTES = 12 << 30  # of the file itself: the largest weights that are read, and room for pictures
_MAX_GROWTH = 20  # bytes for each byte of the file: JSON shrinks well, weights and pictures not at all
_TEXT = (".json", ".toml", ".md", ".txt", ".svg")
_MOMENT = (1980, 1, 1, 0, 0, 0)  # the same for all: the same run gives the same bytes
_CHUNK = 1 << 20


def write_archive(path: Path, content: Mapping[str, Path | bytes]) -> None:
    """One zip of some files, by their names in it; replaced as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, what in sorted(content.items()):
            assert is_shared(name), name
            entry = zipfile.ZipInfo(name, _MOMENT)
            entry.external_attr = (stat.S_IFREG | 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED if name.endswith(_TEXT) else zipfile.ZIP_STORED
            with archive.open(entry, "w", force_zip64=True) as inside:
                if isinstance(what, bytes):
                    inside.write(what)
                else:
                    with open(what, "rb") as source:
                        shutil.copyfileobj(source, inside, _CHUNK)
        if reason := next((said for entry in archive.infolist() if (said := _suspicious(entry, set()))), ""):
            raise CheckpointError(f"{path} would not open again: a file in it {reason}; what was there is unchanged")


def folder_of(path: Path) -> Path:
    """The folder of a run: the path itself, or what a file holds, taken out into the cache once."""
    return _unpacked(path) if path.is_file() else path


def _unpacked(path: Path) -> Path:
    try:
        digest = hashlib.sha256()
        with open_regular(path, _MAX_BYTES) as file:
            with _opened(file, path) as archive:  # what is no archive is not read to its end
                _checked(archive, path)
            file.seek(0)
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
            # The name is shown to people; one of dots alone would be another folder.
            folder = _cache(digest.hexdigest()[:32]) / (path.stem.lstrip(".") or "tree")
            if not (folder / MARK).exists():  # it is taken out last
                _take_out(file, path, folder)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened ({error.strerror or error}); expected a packed tree") from error
    return folder


def _cache(name: str) -> Path:
    """A folder for what is taken out; where the cache cannot be written to, one that goes when the program ends."""
    try:
        place = cache_folder() / "packed" / name
        place.mkdir(parents=True, exist_ok=True)
    except OSError:
        place = Path(tempfile.mkdtemp(prefix="prototree-"))
        atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place


def _take_out(file: IO[bytes], path: Path, folder: Path) -> None:
    with _opened(file, path) as archive:
        entries = _checked(archive, path)
        with prepared_beside(folder) as waiting:
            for entry in entries:
                target = waiting / entry.filename
                target.parent.mkdir(exist_ok=True)
                with archive.open(entry) as inside, open(target, "wb") as out:
                    assert isinstance(inside, zipfile.ZipExtFile)
                    _copy(inside, out, entry, path)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                os.rename(waiting, folder)
            except OSError:
                if not (folder / MARK).exists():  # unless another process was faster
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
    """The entries to take out; an archive with anything suspicious is refused as a whole."""
    entries = archive.infolist()
    if len(entries) > MAX_ENTRIES:
        raise CheckpointError(f"{path} holds {len(entries):,} files, the limit is {MAX_ENTRIES:,}; it is not opened")
    seen: set[str] = set()
    for entry in entries:
        if reason := _suspicious(entry, seen):
            raise CheckpointError(f"{path} is not opened: {entry.filename[:80]!r} {reason}; ask whoever made it")
        seen.add(entry.filename.casefold())
    known = [entry for entry in entries if is_shared(entry.filename)]
    if MARK not in (entry.filename for entry in known):
        raise CheckpointError(f"{path} is no tree that `prototree pack` made: it has no {MARK}")
    size, limit = sum(entry.file_size for entry in known), _MAX_GROWTH * path.stat().st_size + (1 << 20)
    if size > limit:
        raise CheckpointError(
            f"{path} would become {size:,} bytes, more than a file of its size can hold ({limit:,}); it is not opened"
        )
    return known


def _suspicious(entry: zipfile.ZipInfo, seen: set[str]) -> str:
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


def _copy(inside: zipfile.ZipExtFile, out: IO[bytes], entry: zipfile.ZipInfo, path: Path) -> None:
    """Never more than was promised, whatever the compressed bytes say."""
    left = entry.file_size
    while chunk := inside.read(_CHUNK):
        left -= len(chunk)
        if left < 0:
            raise CheckpointError(f"{path} is damaged: {entry.filename} is longer than it says; ask for it again")
        out.write(chunk)
