"""The broker's folder: one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from tidemill.common.lifecycle import StartRefused

LOCK_NAME = "lock"


@contextlib.contextmanager
def locked_data_dir(path: Path) -> Iterator[Path]:
    """Own `path`, made when missing, until the block ends; raise StartRefused if another does.

    The kernel gives the lock back when the process ends, however it ends. The file stays, and names
    the last owner.
    """
    path.mkdir(parents=True, exist_ok=True)
    with (path / LOCK_NAME).open("a+") as lock:
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
