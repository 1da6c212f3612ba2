"""The broker's folder: one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tidemill.common.lifecycle import StartRefused

LOCK_NAME = "lock"


@contextlib.contextmanager
def locked_data_dir(path: Path) -> Iterator[Path]:
    """Own `path`, made when missing, until the block ends; raise StartRefused if another does.

    The kernel gives the lock back when the process ends, however it ends. The file stays, and names
    the last owner. Raises StartRefused too where the folder cannot be made or written.
    """
    with _opened_lock(path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            raise StartRefused(
                f"the data directory {path} is in use by another broker (process {owner}); "
                "stop it first, or choose another --data-dir"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield path


def _opened_lock(path: Path) -> IO[str]:
    try:
        path.mkdir(parents=True, exist_ok=True)
        return (path / LOCK_NAME).open("a+")
    except OSError as error:
        raise StartRefused(
            f"the data directory {path} cannot be used: {error.strerror or error}; "
            "choose another --data-dir, or change the permissions"
        ) from error
