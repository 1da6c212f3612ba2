"""The broker's data directory: its lock, and the removal of a store."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import structlog

from tidemill.broker.engine.layout.durable_mark import NO_BOOT_ID
from tidemill.common.lifecycle import StartError
from tidemill.common.private_files import make_private_folder

log = structlog.get_logger()

LOCK_NAME = "lock"
# Names of a store's files and folders. The data directory may have other stores beside them.
STORE_NAMES = frozenset({"log", "queues", "index", "snapshots", "timer", "checkpoint"})
EMPTYING = Path("replica", "emptying")  # exists while a replica's store is being removed
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LOCK_RETRY_MS = 50  # a try is one system call, and the waiting process has nothing else to do


@contextlib.contextmanager
def locked_data_dir(
    path: Path, *, wait_ms: int = 0, pause: Callable[[float], None] = time.sleep
) -> Iterator[Path]:
    """Own `path`, created if missing, until the block ends. Raises StartError.

    If another broker owns it, block for up to `wait_ms`. The kernel releases the lock when the
    owner ends in any way. The lock file stays and contains the process id of the last owner.
    """
    with _opened_lock(path) as lock:
        if not _take_lock(lock, wait_ms // LOCK_RETRY_MS, pause):
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            raise StartError(
                f"the data directory {path} is in use by another broker (process {owner}); "
                "stop it first, or choose another --data-dir"
            )
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield path


def _take_lock(lock: IO[str], retries: int, pause: Callable[[float], None]) -> bool:
    for retry in range(retries + 1):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if retry == 0 and retries:
                log.info("waiting for the data directory", wait_ms=retries * LOCK_RETRY_MS)
            if retry < retries:
                pause(LOCK_RETRY_MS / 1000)
        else:
            return True
    return False


def _opened_lock(path: Path) -> IO[str]:
    try:
        make_private_folder(path)
        return (path / LOCK_NAME).open("a+")
    except OSError as error:
        raise StartError(
            f"the data directory {path} cannot be used: {error.strerror or error}; "
            "choose another --data-dir, or change the permissions"
        ) from error


def boot_id() -> bytes:
    """Return the id of the current boot of the machine, which all its containers share."""
    with contextlib.suppress(OSError, ValueError):
        return uuid.UUID(BOOT_ID.read_text("ascii").strip()).bytes
    return NO_BOOT_ID


def empty_store(path: Path) -> None:
    """Delete the store in `path`, except the files that its replica must keep.

    After a crash, call it again if `is_half_emptied` returns True.
    """
    (path / EMPTYING).touch()
    _sync_folder(path / EMPTYING.parent)
    for entry in path.iterdir():
        if entry.name.partition(".")[0] not in STORE_NAMES:
            continue
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    _sync_folder(path)
    (path / EMPTYING).unlink()
    _sync_folder(path / EMPTYING.parent)


def is_half_emptied(path: Path) -> bool:
    """Whether an earlier process ended while it emptied the store."""
    return (path / EMPTYING).exists()


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
