"""A connection that comes in the turn in which it is given up: nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket

import pytest
import uvloop

from tidemill.transport.aio.channel import ClientProtocol, connected
from tidemill.transport.http2.limits import Limits

TURNS_MAX = 12  # more than a connection on the loopback takes


@pytest.mark.parametrize("turns", range(TURNS_MAX))
def test_nothing_is_left_of_a_connection_that_is_given_up(turns: int) -> None:
    """uvloop closes it without a word where it had come: then it looked on for ever."""

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
        assert not left, "its timer holds it"
