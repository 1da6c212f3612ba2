"""A TCP relay with a limited rate: the slow line of an honest reader.

The relay and its sockets buffer few bytes, so a fast writer has to wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

CHUNK_BYTES = 16 << 10  # per read
SOCKET_BYTES = 64 << 10  # size of each socket's buffers: 13 ms at 5 MB/s
BURST_S = 0.02  # after a pause, the bytes of this time pass at once


class RateLimit:
    """The rate limit of all connections of a relay."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0  # time at which the limit is free again

    async def take(self, count: int) -> None:
        """Wait until `count` bytes may pass."""
        now_s = asyncio.get_running_loop().time()
        self._free_at_s = max(self._free_at_s, now_s - BURST_S) + count / self._bytes_per_s
        await asyncio.sleep(self._free_at_s - now_s)


@contextlib.asynccontextmanager
async def relaying(address: str, *, bytes_per_s: int) -> AsyncIterator[str]:
    """Run a relay to `address` during the block; yield its address. It slows only responses."""
    host, _, port = address.rpartition(":")
    limit = RateLimit(bytes_per_s)
    tasks: set[asyncio.Task[None]] = set()
    writers: set[asyncio.StreamWriter] = set()

    async def serve(near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        connection = socket.socket()
        connection.setblocking(False)
        # Set before the connect, which announces the window.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        far, forth = await asyncio.open_connection(sock=connection, limit=CHUNK_BYTES)
        back.transport.set_write_buffer_limits(high=CHUNK_BYTES)
        writers.update((back, forth))
        try:
            # The end of either direction ends both.
            done, pending = await asyncio.wait(
                {
                    asyncio.ensure_future(_copy(near, forth, None)),
                    asyncio.ensure_future(_copy(far, back, limit)),
                },
                return_when=asyncio.FIRST_COMPLETED,
            )
            for one in pending:
                one.cancel()
            await asyncio.gather(*done, *pending, return_exceptions=True)
        finally:
            back.close()
            forth.close()
            writers.difference_update((back, forth))

    listener = socket.create_server(("127.0.0.1", 0))
    # Connections inherit the size before they announce their window.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    server = await asyncio.start_server(serve, sock=listener, limit=CHUNK_BYTES)
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: RateLimit | None
) -> None:
    while data := await reader.read(CHUNK_BYTES):
        if limit is not None:
            await limit.take(len(data))
        writer.write(data)
        await writer.drain()
