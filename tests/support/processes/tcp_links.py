"""TCP connections that a test can disturb: a relay in front of an address, in its own thread.

cut          blocks one or both directions; connections stay open, as behind a firewall that drops
             packets; blocked bytes arrive after `heal`
cut_off      the same for one process; other processes still reach the address
strand       blocks the existing connections of all processes; new ones pass, as after a lost node
slow         delays all bytes and limits the bytes per second
reset        ends all connections, as if the machine between them had restarted
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

CHUNK_BYTES = 16 << 10
CHUNKS_MAX = 256  # in flight per connection and direction: 4 MiB
START_S = 10.0
FORTH, BACK = 0, 1  # directions: from the dialling process, and to it


class Link:
    """One relay."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.target = ""  # host:port; empty: unknown, so connections end at once
        self.address = ""
        self._loop = loop
        self._open = asyncio.Event(), asyncio.Event()
        self._cut_off: set[int] = set()  # process ids
        self._of_ports: dict[int, asyncio.Event] = {}  # by source port: set while bytes pass
        self._delay_s = 0.0
        self._bytes_per_s = 0.0  # 0: no limit
        self.passed_bytes = [0, 0]  # by direction
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        for gate in self._open:
            gate.set()

    # ------------------------------------------------------------ from any thread

    def cut(self, *directions: int) -> None:
        """Block these directions. Default: both."""
        for direction in directions or (FORTH, BACK):
            self._loop.call_soon_threadsafe(self._open[direction].clear)

    def cut_off(self, pid: int) -> None:
        """Block the existing and new connections of a process in both directions."""

        def close() -> None:
            self._cut_off.add(pid)
            for port, gate in self._of_ports.items():
                if has_dialled(pid, port):
                    gate.clear()

        self._loop.call_soon_threadsafe(close)

    def strand(self) -> None:
        """Block all existing connections in both directions, and keep them open."""

        def close() -> None:
            for gate in self._of_ports.values():
                gate.clear()

        self._loop.call_soon_threadsafe(close)

    def slow(self, *, delay_s: float, bytes_per_s: float) -> None:
        """Delay all bytes and limit their rate."""
        self._delay_s, self._bytes_per_s = delay_s, bytes_per_s

    def heal(self) -> None:
        """Remove all blocks, delays and limits."""
        self.slow(delay_s=0.0, bytes_per_s=0.0)

        def open_all() -> None:
            self._cut_off.clear()
            for gate in (*self._open, *self._of_ports.values()):
                gate.set()

        self._loop.call_soon_threadsafe(open_all)

    def reset(self) -> None:
        """End all connections."""

        def abort() -> None:
            for writer in self._writers:
                writer.transport.abort()

        self._loop.call_soon_threadsafe(abort)

    # ------------------------------------------------------------ in its thread

    async def serve(self) -> asyncio.Server:
        """Listen."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=CHUNK_BYTES)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _serve(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(back)
        forth, pumps = None, list[asyncio.Task[None]]()
        source: int = back.get_extra_info("peername")[1]
        gate = self._of_ports[source] = asyncio.Event()
        if not any(has_dialled(pid, source) for pid in self._cut_off):
            gate.set()
        try:
            host, _, port = self.target.rpartition(":")
            far, forth = await asyncio.open_connection(host, int(port), limit=CHUNK_BYTES)
            self._writers.add(forth)
            pumps = [
                asyncio.ensure_future(self._pump(near, forth, FORTH, gate)),
                asyncio.ensure_future(self._pump(far, back, BACK, gate)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except (OSError, ValueError, asyncio.CancelledError):
            pass  # The target does not accept connections, or the relay ends.
        finally:
            if self._of_ports.get(source) is gate:
                del self._of_ports[source]
            for pump in pumps:
                pump.cancel()
            for writer in (back, forth):
                if writer is not None:
                    writer.transport.abort()
                    self._writers.discard(writer)
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        direction: int,
        gate: asyncio.Event,
    ) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(CHUNKS_MAX)
        writing = asyncio.ensure_future(self._write(queue, writer, direction, gate))
        try:
            while data := await reader.read(CHUNK_BYTES):
                await queue.put((self._loop.time() + self._delay_s, data))
            await queue.put((0.0, b""))
            await writing
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _write(
        self,
        queue: asyncio.Queue[tuple[float, bytes]],
        writer: asyncio.StreamWriter,
        direction: int,
        gate: asyncio.Event,
    ) -> None:
        while True:
            at_s, data = await queue.get()
            await asyncio.sleep(max(at_s - self._loop.time(), 0.0))
            if self._bytes_per_s:
                await asyncio.sleep(len(data) / self._bytes_per_s)
            await self._open[direction].wait()
            await gate.wait()
            if not data:
                return
            self.passed_bytes[direction] += len(data)
            writer.write(data)
            await writer.drain()

    async def close(self) -> None:
        """End all connections and their tasks."""
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def has_dialled(pid: int, port: int) -> bool:
    """Return whether a process has a socket at this loopback port."""
    sockets = {f"socket:[{inode}]" for inode in _inodes_at(port)}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if str(descriptor.readlink()) in sockets:
                    return True
    return False


def _inodes_at(port: int) -> Iterator[str]:
    """Yield the inodes of TCP sockets with this local port."""
    for line in Path("/proc/net/tcp").read_text("ascii").splitlines()[1:]:
        fields = line.split()
        if int(fields[1].rpartition(":")[2], 16) == port:
            yield fields[9]


class Links:
    """Relays in their own thread, which run while a test waits."""

    def __init__(self, run: Callable[[Coroutine[Any, Any, Any]], Any], loop: Any) -> None:
        self._run = run
        self._loop = loop
        self._links: list[tuple[Link, asyncio.Server]] = []

    def make(self, target: str = "") -> Link:
        """Start a relay."""
        link = Link(self._loop)
        link.target = target
        self._links.append((link, self._run(link.serve())))
        return link

    def close(self) -> None:
        """End all relays."""
        for link, server in self._links:
            self._loop.call_soon_threadsafe(server.close)
            self._run(link.close())


@contextlib.contextmanager
def tcp_links() -> Iterator[Links]:
    """Run relays during the block."""
    began: Future[asyncio.AbstractEventLoop] = Future()

    def work() -> None:
        loop = asyncio.new_event_loop()
        loop.call_soon(began.set_result, loop)
        loop.run_forever()
        loop.close()

    thread = threading.Thread(target=work, name="links", daemon=True)
    thread.start()
    loop = began.result(START_S)

    def run(coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(START_S)

    links = Links(run, loop)
    try:
        yield links
    finally:
        links.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(START_S)
