"""Reports of unwritten output to a connection."""

from __future__ import annotations

import asyncio
from typing import cast

from tests.support.clients import http2_peer as peer
from tidemill.transport.aio.writer import BUFFER_BYTES, TIGHT_BUFFER_BYTES, Writer
from tidemill.transport.http2.connection import Connection, Role
from tidemill.transport.http2.limits import Limits

FRAME_BYTES = 16_000


class FullTransport:
    """A transport that writes only when the test allows it."""

    def __init__(self) -> None:
        self.buffered_bytes = 0
        self.limits: list[int] = []

    def write(self, data: bytes) -> None:
        self.buffered_bytes += len(data)

    def get_write_buffer_size(self) -> int:
        return self.buffered_bytes

    def set_write_buffer_limits(self, high: int) -> None:
        self.limits.append(high)

    def is_closing(self) -> bool:
        return False


def test_output_that_is_written_later_is_reported_at_the_next_check() -> None:
    amounts: list[int] = []
    transport = FullTransport()

    def record_progress(count: int) -> bool:
        amounts.append(count)
        return count < 2 * FRAME_BYTES

    async def scenario() -> None:
        http = Connection(Role.CLIENT, Limits(), now_s=0.0)
        writer = Writer(http, asyncio.get_running_loop(), record_progress)
        writer.attach(cast("asyncio.BaseTransport", transport))
        stream = http.open_stream(peer.block(peer.GRPC_REQUEST))
        assert stream is not None
        writer.flush()
        transport.buffered_bytes = 0
        assert amounts == [], "small amounts are not reported"
        http.send_data(stream, bytes(FRAME_BYTES))
        writer.flush()
        http.send_data(stream, bytes(FRAME_BYTES))
        writer.flush()
        assert amounts[-1] == transport.buffered_bytes > 2 * FRAME_BYTES
        assert transport.limits == [BUFFER_BYTES, TIGHT_BUFFER_BYTES]
        transport.buffered_bytes = FRAME_BYTES
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert amounts[-1] == FRAME_BYTES, "at the end of the turn"
        assert transport.limits[-1] == BUFFER_BYTES
        transport.buffered_bytes = 0
        writer.flush()
        assert amounts[-1] == 0, "and at each later check"
        count = len(amounts)
        writer.recount()
        assert len(amounts) == count, "there is nothing more to report"

    asyncio.run(scenario())
