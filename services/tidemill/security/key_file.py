"""The key file of a process: read it again when it changes, and add a key."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

import structlog

from tidemill.common.file_changes import FileChanges
from tidemill.common.lifecycle import StartError
from tidemill.common.private_files import read_private
from tidemill.security.secret_keys import FILE_BYTES_MAX, SecretKeys, new_key_line, parse_keys

CHECK_PERIOD_MS: Final = 5_000
MISSED_PERIOD_MS: Final = 200  # while a secret needs a key that the file lacked

log = structlog.get_logger()


def open_key_file(
    file: str, monotonic_ms: Callable[[], int], on_change: Callable[[], None] = lambda: None
) -> Callable[[], SecretKeys | None]:
    """Return the function that returns the current keys; None if `file` is "".

    `on_change` is called after the file has changed. Raises StartError.
    """
    if not file:
        return lambda: None

    def note_change(error: str) -> None:
        if error:
            log.error("key file not reloaded, previous keys stay valid", file=file, reason=error)
        else:
            log.info("key file reloaded", file=file)
            on_change()

    try:
        return KeyFile(file, monotonic_ms, note_change).keys
    except (OSError, ValueError) as error:
        raise StartError(f"security_key_file {file!r} cannot be used: {error}") from error


@final
class KeyFile:
    """The keys of the file. A malformed change is reported, and the former keys stay."""

    def __init__(
        self,
        file: str,
        monotonic_ms: Callable[[], int],
        on_change: Callable[[str], None] = lambda _error: None,
    ) -> None:
        """Read the file. Raises OSError, ValueError.

        `on_change` gets the reason why a changed file was not read, or "".
        """
        self._file = file
        self._monotonic_ms = monotonic_ms
        self._on_change = on_change
        self._changes = FileChanges([file])
        self._checked_at_ms = monotonic_ms()
        self._keys = read_keys(file)

    def keys(self) -> SecretKeys:
        """Return the keys, as of at most CHECK_PERIOD_MS ago."""
        now_ms = self._monotonic_ms()
        period_ms = MISSED_PERIOD_MS if self._keys.has_missed else CHECK_PERIOD_MS
        if now_ms - self._checked_at_ms >= period_ms:
            self._checked_at_ms = now_ms
            if self._changes.detect():
                self._read_again()
        return self._keys

    def _read_again(self) -> None:
        try:
            self._keys = read_keys(self._file)
        except (OSError, ValueError) as error:
            self._on_change(str(error))
        else:
            self._on_change("")


def add_first_key(file: str, key_id: str, *, after: str) -> str:
    """Add a first line with a new key to the file, in one step; return the id of the first key.

    A first key other than `after` is that of another process, and stays the first. The file keeps
    its owner and permissions. Raises OSError; raises ValueError if the file is
    malformed, too open or full.
    """
    path = Path(file).resolve()  # A link stays a link.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        text = read_private(str(path), bytes_max=FILE_BYTES_MAX)
        first = parse_keys(text).first
        if first != after:
            return first
        text = new_key_line(key_id) + text
        parse_keys(text)
        _replace(path, text)
        os.fsync(folder)  # The key must not be lost after secrets are encrypted under it.
    finally:
        os.close(folder)
    return key_id


def _replace(path: Path, text: str) -> None:
    """Replace the content. The caller has the lock, so a draft is of a killed process."""
    status = path.stat()
    draft = path.with_name(f"{path.name}.draft")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.fchown(descriptor, status.st_uid, status.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
        with open(descriptor, "w", encoding="ascii", closefd=False) as opened:
            opened.write(text)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    draft.replace(path)


def read_keys(file: str) -> SecretKeys:
    """Read a key file. Raises OSError; raises ValueError if it is malformed or too open."""
    return parse_keys(read_private(file, bytes_max=FILE_BYTES_MAX))
