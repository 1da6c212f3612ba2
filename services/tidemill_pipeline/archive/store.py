"""Files of an archive: in a folder of this machine or in an object store that pyarrow reaches.

    DIR/messages/namespace=/topic=orders/dt=2026-11-22/hour=23/RUN-....parquet
    DIR/manifest/00000000000000000129.json
    DIR/manifest/00000000000000000128.snapshot.json    the fold of the entries before it

A process commits an entry by taking its number. On a file system, it first syncs the data files and
the entry. Then it links the entry to its name, which fails if the number is taken.

Invariant: the last entry before a snapshot is never deleted. A process that was stopped for so long
that its next number was taken and deleted finds the previous entry missing, too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import quote

import pyarrow.fs as pa_fs

from tidemill_pipeline.archive import snapshot
from tidemill_pipeline.archive.manifest import Archive, ManifestEntry
from tidemill_pipeline.errors import AnotherWriter, ArchiveError

log: Final = logging.getLogger("tidemill_pipeline")

MANIFEST: Final = "manifest"
MESSAGES: Final = "messages"
_NUMBER_DIGITS: Final = 20
_ENTRY: Final = ".json"
_SNAPSHOT: Final = ".snapshot.json"
# Entries after a snapshot before the next one, if they have at least half of its bytes. All
# snapshots then take a few times the bytes of the entries. A reader reads at most twice the last.
SNAPSHOT_ENTRIES: Final = 64


Mark: TypeAlias = tuple[int, int]  # bytes and modification time of a file


class ArchiveStore:
    """The files of one archive."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._files, self._root = _file_system(path)
        self._is_local = isinstance(self._files, pa_fs.LocalFileSystem)
        self._archive: Archive | None = None
        self._last: Mark | None = None  # of the last entry that was read
        self._snapshot_bytes = 0  # of the last snapshot that was read
        self._newer_count = 0  # entries read after that snapshot
        self._newer_bytes = 0

    # ------------------------------------------------------------ the manifest

    @property
    def has_entries(self) -> bool:
        """Return whether the manifest has an entry."""
        return self.archive().next_number > 0

    def archive(self) -> Archive:
        """Return the current fold of the manifest. Only new entries are read.

        A missing archive is empty. Callers share the result, and the next call changes it. To test
        an entry, call `check` and not `apply`. Raises ArchiveError.
        """
        try:
            return self._read_new()
        except OSError as error:
            raise ArchiveError(f"{self.path} cannot be read: {error}") from error

    def _read_new(self) -> Archive:
        archive, self._archive = self._archive, None
        if archive is None or self._mark_of_last(archive) != self._last:
            archive = self._read_whole()
        while True:
            try:
                self._apply(archive, self._entry_path(archive.next_number))
            except FileNotFoundError:
                break
        # Do not keep an empty fold. The volume may be unmounted for a moment, and a snapshot may
        # already have replaced the first entries.
        self._archive = archive if archive.next_number else None
        return archive

    def existing(self) -> Archive:
        """Return the current fold for a reader. Raises ArchiveError if there is no archive.

        If an unmounted archive looked empty, a stream would take its queues as lost and later as
        new.
        """
        archive = self.archive()
        if not archive.next_number:
            raise ArchiveError(no_archive(self.path))
        return archive

    def _mark_of_last(self, archive: Archive) -> Mark | None:
        """Return the current mark of the last entry that was read.

        If the mark differs or is missing, this is another archive, or entries were deleted before
        this process read them.
        """
        return self._mark(self._entry_path(archive.next_number - 1))

    def _mark(self, path: str) -> Mark | None:
        info = self._files.get_file_info(path)
        if info.type == pa_fs.FileType.NotFound:
            return None
        return int(info.size), int(info.mtime_ns or 0)

    def _read_whole(self) -> Archive:
        """Read the last snapshot and the entries after it."""
        archive = Archive()
        self._last = None
        self._snapshot_bytes = self._newer_count = self._newer_bytes = 0
        numbers: list[int] = []
        snapshots = [0]
        for name, _ in self._manifest():
            number = int(name[:_NUMBER_DIGITS])
            (snapshots if name.endswith(_SNAPSHOT) else numbers).append(number)
        first = max(snapshots)
        if first:
            path = self._path(first, _SNAPSHOT)
            text = self._read(path)
            with _file_named(path):
                archive, self._snapshot_bytes = snapshot.from_json(text), len(text)
            self._last = self._mark(self._entry_path(first - 1))
        # The listing reveals a missing entry in the middle.
        for number in sorted(number for number in numbers if number >= first):
            self._apply(archive, self._entry_path(number))
        return archive

    def _apply(self, archive: Archive, path: str) -> None:
        text = self._read(path)
        with _file_named(path):
            archive.apply(ManifestEntry.from_json(text))
        self._last = self._mark(path)
        self._newer_count += 1
        self._newer_bytes += len(text)

    def _manifest(self) -> Iterator[tuple[str, int]]:
        """Yield name and creation time of each entry and snapshot."""
        for name, made_at_ms in self._files_of(MANIFEST):
            if name.endswith(_ENTRY) and name[:_NUMBER_DIGITS].isdigit():
                yield name, made_at_ms

    def _files_of(self, folder: str) -> Iterator[tuple[str, int]]:
        selector = pa_fs.FileSelector(f"{self._root}/{folder}", allow_not_found=True)
        for info in self._files.get_file_info(selector):
            yield info.base_name, int(info.mtime_ns or 0) // 1_000_000

    def commit(self, entry: ManifestEntry) -> None:
        """Commit an entry. Raises AnotherWriter if its number is taken, and ArchiveError."""
        path = self._entry_path(entry.number)
        self._check_files(entry)
        with write_errors(path):
            self._files.create_dir(f"{self._root}/{MANIFEST}", recursive=True)
            self._put(path, entry.as_json().encode())
        if entry.number and not self._has(self._entry_path(entry.number - 1)):
            # This process was stopped until its number was taken and deleted: see above.
            self._files.delete_file(path)
            raise AnotherWriter(_taken(path))
        self._write_snapshot_if_due()

    def _check_files(self, entry: ManifestEntry) -> None:
        """Raise ArchiveError if a data file is missing or has another size."""
        paths = [f"{self._root}/{file.path}" for file in entry.files]
        for file, info in zip(entry.files, self._files.get_file_info(paths), strict=True):
            if info.type != pa_fs.FileType.File or info.size != file.bytes:
                raise ArchiveError(
                    f"{self.path}/{file.path} is missing or has another size than written; nothing"
                    " was committed; start this again"
                )

    def _put(self, path: str, text: bytes) -> None:
        if self._is_local:
            _link(Path(path), text)
            return
        if self._has(path):
            raise AnotherWriter(_taken(path))
        with self._files.open_output_stream(path) as file:
            file.write(text)

    def _write_snapshot_if_due(self) -> None:
        """Write a snapshot if enough entries follow the last one."""
        archive = self.archive()
        if self._newer_count < SNAPSHOT_ENTRIES or self._newer_bytes < self._snapshot_bytes / 2:
            return
        text = snapshot.as_json(archive).encode()
        # Another process would write the same content.
        try:
            with contextlib.suppress(AnotherWriter):
                self._put(self._path(archive.next_number, _SNAPSHOT), text)
        except (ArchiveError, OSError) as error:
            # The last entry is already committed, and the entries have the same content.
            log.warning("cannot write a snapshot of the manifest: %s", error)
            return
        self._snapshot_bytes, self._newer_count, self._newer_bytes = len(text), 0, 0

    def delete_old_entries(self, *, before_ms: int) -> int:
        """Delete the files that a snapshot from before `before_ms` replaces; return their count."""
        made = dict(self._manifest())
        old = [
            int(name[:_NUMBER_DIGITS])
            for name, made_at_ms in made.items()
            if name.endswith(_SNAPSHOT) and made_at_ms <= before_ms
        ]
        last = max(old, default=0)
        replaced = [
            name
            for name in sorted(made)
            if int(name[:_NUMBER_DIGITS]) < last - (not name.endswith(_SNAPSHOT))
        ]
        # Drafts remain of processes that were killed between link and unlink.
        drafts = [
            name
            for name, made_at_ms in self._files_of(MANIFEST)
            if name.startswith(".") and made_at_ms <= before_ms
        ]
        # In order, so that the remaining entries have no gap.
        for name in [*replaced, *drafts]:
            self._files.delete_file(f"{self._root}/{MANIFEST}/{name}")
        return len(replaced) + len(drafts)

    def _entry_path(self, number: int) -> str:
        return self._path(number, _ENTRY)

    def _path(self, number: int, kind: str) -> str:
        return f"{self._root}/{MANIFEST}/{number:0{_NUMBER_DIGITS}d}{kind}"

    def _read(self, path: str) -> str:
        with self._files.open_input_stream(path) as file:
            text: bytes = file.read()
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise ArchiveError(f"{path} is damaged: {error}") from error

    def _has(self, path: str) -> bool:
        return bool(self._files.get_file_info(path).type != pa_fs.FileType.NotFound)

    # ------------------------------------------------------------ data files

    def partition(self, *, namespace: str, topic: str, day: str, hour: str) -> str:
        """Return the folder of an hour of a topic, below the archive."""
        return (
            f"{MESSAGES}/namespace={quote(namespace, safe='')}/topic={quote(topic, safe='')}"
            f"/dt={day}/hour={hour}"
        )

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[Any]:
        """Open a new data file for the block, and sync it at the end. Raises OSError."""
        full = f"{self._root}/{path}"
        if self._is_local:
            Path(full).parent.mkdir(parents=True, exist_ok=True)
        with self._files.open_output_stream(full) as file:
            yield file
        if self._is_local:
            # Sync the names, too: parent folders may be new.
            for each in (Path(full), *Path(full).parents):
                _sync(str(each))
                if str(each) == self._root:
                    break

    def open(self, path: str) -> Any:
        """Open a data file for random access."""
        return self._files.open_input_file(f"{self._root}/{path}")

    def data_files(self) -> Iterator[tuple[str, int]]:
        """Yield path below the archive and creation time in ms of each data file on disk."""
        selector = pa_fs.FileSelector(
            f"{self._root}/{MESSAGES}", allow_not_found=True, recursive=True
        )
        for info in self._files.get_file_info(selector):
            if info.type == pa_fs.FileType.File:
                yield info.path[len(self._root) + 1 :], int(info.mtime_ns or 0) // 1_000_000

    def names(self) -> Iterator[str]:
        """Yield the names in the archive's folder; none if the folder is missing."""
        selector = pa_fs.FileSelector(self._root, allow_not_found=True)
        for info in self._files.get_file_info(selector):
            yield info.base_name

    def move(self, path: str, to: str) -> None:
        """Rename a file and replace a file of that name. Raises FileNotFoundError."""
        self._files.move(f"{self._root}/{path}", f"{self._root}/{to}")
        if self._is_local:
            _sync(self._root)

    def delete(self, path: str) -> None:
        """Delete a data file. A missing file is not an error."""
        with contextlib.suppress(FileNotFoundError):
            self._files.delete_file(f"{self._root}/{path}")


def no_archive(path: str) -> str:
    """Return the error text for a missing archive."""
    return (
        f"there is no archive at {path}: nothing was archived there yet, or the volume is not"
        " mounted"
    )


@contextlib.contextmanager
def write_errors(path: str) -> Iterator[None]:
    """Turn an OSError of the block into an ArchiveError that names the file."""
    try:
        yield
    except OSError as error:
        raise ArchiveError(f"{path} cannot be written: {error}") from error


@contextlib.contextmanager
def _file_named(path: str) -> Iterator[None]:
    """Add the file to the text of an ArchiveError of the block."""
    try:
        yield
    except ArchiveError as error:
        raise ArchiveError(f"{path}: {error}") from error


_stores: dict[tuple[int, str], ArchiveStore] = {}


def shared_store(path: str) -> ArchiveStore:
    """Return this process's store of an archive. It reads each entry once."""
    key = (os.getpid(), path)
    if key not in _stores:
        _stores[key] = ArchiveStore(path)
    return _stores[key]


def _file_system(path: str) -> tuple[Any, str]:
    if "://" not in path:
        return pa_fs.LocalFileSystem(), str(Path(path).absolute())
    # Spark's connector is s3a, Arrow's scheme s3.
    uri = path.replace("s3a://", "s3://", 1)
    try:
        files, root = pa_fs.FileSystem.from_uri(uri)
    except (OSError, ValueError) as error:
        raise ArchiveError(f"{path} is unreachable: {error}") from error
    return files, root.rstrip("/")


def _link(path: Path, text: bytes) -> None:
    """Link a synced file to its name. The link fails if the name exists."""
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
    return f"{path} already exists: another archiver works on this archive; run one at a time"


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
