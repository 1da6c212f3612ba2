"""A connection that is established after its caller stopped waiting leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket

import pytest
import uvloop

from tidemill.transport.aio.channel import ClientProtocol, connected
from tidemill.transport.http2.limits import Limits

TURNS_MAX = 12  # more than a loopback connection needs


@pytest.mark.parametrize("turns", range(TURNS_MAX))
def test_an_abandoned_connection_leaves_nothing_behind(turns: int) -> None:
    """uvloop closes an established transport silently, and the check timer ran for ever."""

    async def connect(address: str) -> None:
        async with connected(address, Limits(), message_bytes_max=1 << 10, timeout_s=5.0):
            await asyncio.Event().wait()

    async def scenario(address: str) -> None:
        connecting = asyncio.create_task(connect(address))
        for _ in range(turns):
            await asyncio.sleep(0)
        connecting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await connecting

    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(scenario(f"127.0.0.1:{listening.getsockname()[1]}"))
        gc.collect()
        left = [one for one in gc.get_objects() if isinstance(one, ClientProtocol)]
        assert not left, "its timer refers to it"
