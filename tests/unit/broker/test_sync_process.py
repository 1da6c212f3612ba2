"""The sync process: its promises and its failures."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tidemill.broker.sync_process import FILES_PER_PACKET_MAX, SyncFailed, SyncProcess


def run_with_helper(scenario: Callable[[SyncProcess], Awaitable[None]]) -> SyncProcess:
    """Fork a helper before there is an event loop, as the broker does."""
    helper = SyncProcess.fork("test")

    async def main() -> None:
        async with helper.attached():
            await scenario(helper)

    asyncio.run(main())
    return helper


def test_files_beyond_the_limit_of_a_packet_are_synced(tmp_path: Path) -> None:
    async def scenario(helper: SyncProcess) -> None:
        files = [
            (tmp_path / str(n)).open("wb", buffering=0) for n in range(FILES_PER_PACKET_MAX + 1)
        ]
        for file in files:
            file.write(b"x")
        await helper.sync(files)
        for file in files:
            file.close()

    run_with_helper(scenario)


def test_a_failed_sync_is_raised_now_and_by_later_calls() -> None:
    async def scenario(helper: SyncProcess) -> None:
        read_end, write_end = os.pipe()  # A pipe cannot be synced: EINVAL.
        with os.fdopen(read_end), os.fdopen(write_end, "wb") as pipe:
            for _ in range(2):
                with pytest.raises(SyncFailed, match="test: fdatasync failed"):
                    await helper.sync([pipe])
        with pytest.raises(SyncFailed):
            await helper.watch()

    run_with_helper(scenario)


def test_the_end_of_the_helper_is_noticed_without_a_sync() -> None:
    async def scenario(helper: SyncProcess) -> None:
        os.kill(helper.pid, signal.SIGKILL)
        with pytest.raises(SyncFailed, match="has ended"):
            await helper.watch()

    run_with_helper(scenario)


def test_the_helper_ignores_signals_and_ends_with_the_broker(tmp_path: Path) -> None:
    helper = SyncProcess.fork("test")

    async def scenario() -> None:
        async with helper.attached():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(helper.pid, number)
            with (tmp_path / "file").open("wb") as file:  # Local.
                await helper.sync([file])

    asyncio.run(scenario())
    with contextlib.suppress(ChildProcessError):  # Reaped already.
        os.waitpid(helper.pid, 0)
