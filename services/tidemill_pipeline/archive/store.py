"""Where an archive lies: a folder of this machine, or an object store that pyarrow reaches.

    DIR/messages/namespace=/topic=orders/dt=2026-11-22/hour=23/RUN-....parquet
    DIR/manifest/00000000000000000129.json
    DIR/manifest/00000000000000000128.snapshot.json    what the entries before it have come to

An entry is committed by taking its number: on a file system by a link, which fails where the number
is taken, after the data files and the entry itself are synced.

Invariant: of the entries before a snapshot the last one stays. Whoever was stopped so long that the
number it is about to take was deleted finds that the one before it is gone, too.
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
# Entries behind a snapshot until there is another one, if they are half as large as it is: so all
# snapshots together take a few times what the entries do, and a reader twice the last one.
SNAPSHOT_ENTRIES: Final = 64


Mark: TypeAlias = tuple[int, int]  # of a file: its bytes, and when it was written


class ArchiveStore:
    """The files of one archive."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._files, self._root = _file_system(path)
        self._is_local = isinstance(self._files, pa_fs.LocalFileSystem)
        self._archive: Archive | None = None
        self._last: Mark | None = None  # of the last entry that was read
        # Of the snapshot that was read, and of what was read behind it.
        self._snapshot_bytes = 0
        self._behind_count = 0
        self._behind_bytes = 0

    # ------------------------------------------------------------ the manifest

    @property
    def has_entries(self) -> bool:
        """Say whether anything was ever archived."""
        return self.archive().next_number > 0

    def archive(self) -> Archive:
        """Return what the manifest says now, of which only what is new is read.

        An archive that is not there yet is empty. What is returned is shared and goes on with the
        next call: whoever tries something out on it checks and does not apply. Raises ArchiveError.
        """
        try:
            return self._read_on()
        except OSError as error:
            raise ArchiveError(f"{self.path} cannot be read: {error}") from error

    def _read_on(self) -> Archive:
        archive, self._archive = self._archive, None
        if archive is None or self._mark_of_last(archive) != self._last:
            archive = self._read_whole()
        while True:
            try:
                self._take(archive, self._entry_path(archive.next_number))
            except FileNotFoundError:
                break
        # One that is empty is not kept: it may be an archive that is away for a moment, and its
        # first entries may have gone into a snapshot.
        self._archive = archive if archive.next_number else None
        return archive

    def existing(self) -> Archive:
        """Return the same to a reader. Raises ArchiveError where there is no archive.

        To one that is away for a moment all queues would seem to be gone, and new when it is back.
        """
        archive = self.archive()
        if not archive.next_number:
            raise ArchiveError(no_archive(self.path))
        return archive

    def _mark_of_last(self, archive: Archive) -> Mark | None:
        """Return by what the last entry that was read is known, as it is there now.

        Another one, or none: what is here is another archive, or so far on that entries were
        deleted which were never read.
        """
        return self._mark(self._entry_path(archive.next_number - 1))

    def _mark(self, path: str) -> Mark | None:
        info = self._files.get_file_info(path)
        if info.type == pa_fs.FileType.NotFound:
            return None
        return int(info.size), int(info.mtime_ns or 0)

    def _read_whole(self) -> Archive:
        """Read the last snapshot, and the entries that are there behind it."""
        archive = Archive()
        self._last = None
        self._snapshot_bytes = self._behind_count = self._behind_bytes = 0
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
        # By a listing, so that one that is missing in the middle is found out.
        for number in sorted(number for number in numbers if number >= first):
            self._take(archive, self._entry_path(number))
        return archive

    def _take(self, archive: Archive, path: str) -> None:
        text = self._read(path)
        with _file_named(path):
            archive.apply(ManifestEntry.from_json(text))
        self._last = self._mark(path)
        self._behind_count += 1
        self._behind_bytes += len(text)

    def _manifest(self) -> Iterator[tuple[str, int]]:
        """Yield entries and snapshots by name, and when each was made."""
        for name, made_at_ms in self._named(MANIFEST):
            if name.endswith(_ENTRY) and name[:_NUMBER_DIGITS].isdigit():
                yield name, made_at_ms

    def _named(self, folder: str) -> Iterator[tuple[str, int]]:
        selector = pa_fs.FileSelector(f"{self._root}/{folder}", allow_not_found=True)
        for info in self._files.get_file_info(selector):
            yield info.base_name, int(info.mtime_ns or 0) // 1_000_000

    def commit(self, entry: ManifestEntry) -> None:
        """Make an entry count. Raises AnotherWriter where its number is taken, and ArchiveError."""
        path = self._entry_path(entry.number)
        self._check_files(entry)
        with write_errors(path):
            self._files.create_dir(f"{self._root}/{MANIFEST}", recursive=True)
            self._put(path, entry.as_json().encode())
        if entry.number and not self._has(self._entry_path(entry.number - 1)):
            # This process stood still until its number was long taken, and deleted: see above.
            self._files.delete_file(path)
            raise AnotherWriter(_taken(path))
        self._write_snapshot_if_due()

    def _check_files(self, entry: ManifestEntry) -> None:
        """Raise ArchiveError where a file is not there, or not whole."""
        paths = [f"{self._root}/{file.path}" for file in entry.files]
        for file, info in zip(entry.files, self._files.get_file_info(paths), strict=True):
            if info.type != pa_fs.FileType.File or info.size != file.bytes:
                raise ArchiveError(
                    f"{self.path}/{file.path} is not there as it was written, and nothing of it"
                    " counts; start this again"
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
        """Write a snapshot where enough was committed since the last one."""
        archive = self.archive()
        if self._behind_count < SNAPSHOT_ENTRIES or self._behind_bytes < self._snapshot_bytes / 2:
            return
        text = snapshot.as_json(archive).encode()
        # Whoever else writes it now writes the same.
        try:
            with contextlib.suppress(AnotherWriter):
                self._put(self._path(archive.next_number, _SNAPSHOT), text)
        except (ArchiveError, OSError) as error:
            # All that it would say the entries say, of which the last one counts already.
            log.warning("no snapshot of the manifest is written: %s", error)
            return
        self._snapshot_bytes, self._behind_count, self._behind_bytes = len(text), 0, 0

    def delete_old_entries(self, *, before_ms: int) -> int:
        """Delete what a snapshot of before an instant has made needless; return how many files."""
        made = dict(self._manifest())
        old = [
            int(name[:_NUMBER_DIGITS])
            for name, made_at_ms in made.items()
            if name.endswith(_SNAPSHOT) and made_at_ms <= before_ms
        ]
        last = max(old, default=0)
        gone = [
            name
            for name in sorted(made)
            if int(name[:_NUMBER_DIGITS]) < last - (not name.endswith(_SNAPSHOT))
        ]
        # Of processes that were killed between link and unlink.
        drafts = [
            name
            for name, made_at_ms in self._named(MANIFEST)
            if name.startswith(".") and made_at_ms <= before_ms
        ]
        # The first ones first: what is left has no gap.
        for name in [*gone, *drafts]:
            self._files.delete_file(f"{self._root}/{MANIFEST}/{name}")
        return len(gone) + len(drafts)

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
        """Open a new data file for the block; synced at its end. Raises OSError."""
        full = f"{self._root}/{path}"
        if self._is_local:
            Path(full).parent.mkdir(parents=True, exist_ok=True)
        with self._files.open_output_stream(full) as file:
            yield file
        if self._is_local:
            # Its name, too, up to where folders may have been made for it.
            for each in (Path(full), *Path(full).parents):
                _sync(str(each))
                if str(each) == self._root:
                    break

    def open(self, path: str) -> Any:
        """Open a data file for random access."""
        return self._files.open_input_file(f"{self._root}/{path}")

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

    def names(self) -> Iterator[str]:
        """Yield what lies right below; nothing where there is no such folder."""
        selector = pa_fs.FileSelector(self._root, allow_not_found=True)
        for info in self._files.get_file_info(selector):
            yield info.base_name

    def move(self, path: str, to: str) -> None:
        """Give a file another name, of which there may be one. Raises FileNotFoundError."""
        self._files.move(f"{self._root}/{path}", f"{self._root}/{to}")
        if self._is_local:
            _sync(self._root)

    def delete(self, path: str) -> None:
        """Delete a data file; one that is gone already is no failure."""
        with contextlib.suppress(FileNotFoundError):
            self._files.delete_file(f"{self._root}/{path}")


def no_archive(path: str) -> str:
    """Return what is said where an archive was meant, and none is."""
    return (
        f"there is no archive at {path}: nothing was archived there yet, or what it lies on is away"
    )


@contextlib.contextmanager
def write_errors(path: str) -> Iterator[None]:
    """Raise ArchiveError for the block that says which file a full or read-only folder refused."""
    try:
        yield
    except OSError as error:
        raise ArchiveError(f"{path} cannot be written: {error}") from error


@contextlib.contextmanager
def _file_named(path: str) -> Iterator[None]:
    """Have an ArchiveError of the block say which file it is about."""
    try:
        yield
    except ArchiveError as error:
        raise ArchiveError(f"{path}: {error}") from error


_stores: dict[tuple[int, str], ArchiveStore] = {}


def shared_store(path: str) -> ArchiveStore:
    """Return this process's store of an archive, for those who look at it again and again."""
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
        raise ArchiveError(f"{path} cannot be reached: {error}") from error
    return files, root.rstrip("/")


def _link(path: Path, text: bytes) -> None:
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
