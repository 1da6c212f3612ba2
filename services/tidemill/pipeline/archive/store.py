"""Where an archive lies: a folder of this machine, or an object store that pyarrow reaches.

    DIR/messages/namespace=/topic=orders/dt=2026-11-22/hour=23/RUN-....parquet
    DIR/manifest/00000000000000000012.json

An entry is committed by taking its number: on a file system by a link, which fails where the number
is taken, after the data files and the entry itself are synced.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pyarrow.fs as pa_fs

from tidemill.pipeline.archive.manifest import Archive, Entry, fold
from tidemill.pipeline.errors import AnotherWriter, ArchiveError

MANIFEST: Final = "manifest"
MESSAGES: Final = "messages"
_NUMBER_DIGITS: Final = 20


class ArchiveStore:
    """The files of one archive."""

    def __init__(self, path: str) -> None:
        self.path = path
        # Spark's name for the store, and Arrow's.
        self._files, self._root = _file_system(path)
        self._is_local = isinstance(self._files, pa_fs.LocalFileSystem)

    # ------------------------------------------------------------ the manifest

    def archive(self) -> Archive:
        """Read the manifest and fold it. An archive that is not there yet is empty."""
        return fold(self.entries())

    def entries(self) -> Iterator[Entry]:
        """Yield the entries in order."""
        selector = pa_fs.FileSelector(f"{self._root}/{MANIFEST}", allow_not_found=True)
        names = sorted(
            info.path for info in self._files.get_file_info(selector)
            if info.base_name.endswith(".json")
        )  # fmt: skip
        for name in names:
            with self._files.open_input_stream(name) as file:
                yield Entry.from_json(file.read().decode())

    def commit(self, entry: Entry) -> None:
        """Make an entry count. Raises AnotherWriter where its number is taken."""
        path = f"{self._root}/{MANIFEST}/{entry.number:0{_NUMBER_DIGITS}d}.json"
        self._files.create_dir(f"{self._root}/{MANIFEST}", recursive=True)
        text = entry.as_json().encode()
        if self._is_local:
            _commit_local(Path(path), text)
            return
        if self._files.get_file_info(path).type != pa_fs.FileType.NotFound:
            raise AnotherWriter(_taken(path))
        with self._files.open_output_stream(path) as file:
            file.write(text)

    # ------------------------------------------------------------ data files

    def partition(self, *, namespace: str, topic: str, day: str, hour: str) -> str:
        """Return the folder of an hour of a topic, below the archive."""
        return (
            f"{MESSAGES}/namespace={quote(namespace, safe='')}/topic={quote(topic, safe='')}"
            f"/dt={day}/hour={hour}"
        )

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[Any]:
        """Open a new data file for the block; synced at its end."""
        full = f"{self._root}/{path}"
        if self._is_local:
            Path(full).parent.mkdir(parents=True, exist_ok=True)
        with self._files.open_output_stream(full) as file:
            yield file
        if self._is_local:
            _sync(full)

    def open(self, path: str) -> Any:
        """Open a data file for random access."""
        return self._files.open_input_file(f"{self._root}/{path}")

    def size(self, path: str) -> int:
        """Return the bytes of a data file."""
        return int(self._files.get_file_info(f"{self._root}/{path}").size)

    def data_files(self) -> Iterator[tuple[str, int]]:
        """Yield every data file that is there, named by the manifest or not, and when it was made.

        (path below the archive, milliseconds since 1970)
        """
        selector = pa_fs.FileSelector(
            f"{self._root}/{MESSAGES}", allow_not_found=True, recursive=True
        )
        for info in self._files.get_file_info(selector):
            if info.type == pa_fs.FileType.File:
                yield info.path[len(self._root) + 1 :], int(info.mtime_ns or 0) // 1_000_000

    def delete(self, path: str) -> None:
        """Delete a data file; one that is gone already is no failure."""
        with contextlib.suppress(FileNotFoundError):
            self._files.delete_file(f"{self._root}/{path}")


def _file_system(path: str) -> tuple[Any, str]:
    if "://" not in path:
        return pa_fs.LocalFileSystem(), str(Path(path).absolute())
    # Spark's connector is s3a, Arrow's scheme s3.
    uri = path.replace("s3a://", "s3://", 1)
    try:
        files, root = pa_fs.FileSystem.from_uri(uri)
    except (OSError, ValueError) as error:
        raise ArchiveError(f"{path} cannot be reached: {error}") from error
    return files, root.rstrip("/")


def _commit_local(path: Path, text: bytes) -> None:
    """Link a synced file to its name, which exactly one process can."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    draft.write_bytes(text)
    _sync(str(draft))
    try:
        os.link(draft, path)
    except FileExistsError as error:
        raise AnotherWriter(_taken(str(path))) from error
    finally:
        draft.unlink()
    _sync(str(path.parent))


def _taken(path: str) -> str:
    return f"{path} is there already: another archiver works on this archive; run one at a time"


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
