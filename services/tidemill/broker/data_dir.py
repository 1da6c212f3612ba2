"""The broker's folder: one process at a time."""

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

log = structlog.get_logger()

LOCK_NAME = "lock"
# Of a store, in its folder: the folder may have other stores in it, which are not to be touched.
STORE_NAMES = frozenset({"log", "queues", "index", "snapshots", "timer", "checkpoint"})
EMPTYING = Path("replica", "emptying")  # there while a replica's store is taken away
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LOCK_RETRY_MS = 50  # a try is one call of the kernel, and who waits is nobody's broker meanwhile


@contextlib.contextmanager
def locked_data_dir(
    path: Path, *, wait_ms: int = 0, pause: Callable[[float], None] = time.sleep
) -> Iterator[Path]:
    """Own `path`, made when missing, until the block ends; raise StartError if another does.

    One that is to go anyway is waited for, for `wait_ms`, and nothing else is done meanwhile. The
    kernel gives the lock back when the process ends, however it ends. The file stays, and names
    the last owner. Raises StartError too where the folder cannot be made or written.
    """
    with _opened_lock(path) as lock:
        if not _is_taken(lock, wait_ms // LOCK_RETRY_MS, pause):
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


def _is_taken(lock: IO[str], retries: int, pause: Callable[[float], None]) -> bool:
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
        path.mkdir(parents=True, exist_ok=True)
        return (path / LOCK_NAME).open("a+")
    except OSError as error:
        raise StartError(
            f"the data directory {path} cannot be used: {error.strerror or error}; "
            "choose another --data-dir, or change the permissions"
        ) from error


def boot_id() -> bytes:
    """Return the name of this run of the machine, of the kernel and so of all containers."""
    with contextlib.suppress(OSError, ValueError):
        return uuid.UUID(BOOT_ID.read_text("ascii").strip()).bytes
    return NO_BOOT_ID


def emptied(path: Path) -> None:
    """Take away what a store has in `path`, but for what its replica must not forget.

    To be called again where it was cut short: `wants_to_be_emptied` says so.
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


def wants_to_be_emptied(path: Path) -> bool:
    """Whether an earlier process has begun to empty the store, and has not ended it."""
    return (path / EMPTYING).exists()


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
