"""Links between proxies and brokers: messages arrive late and in order, or are lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Protocol

from tidemill.transport.grpc.status import RpcCode, RpcError

DELAY_S_MAX = 0.004  # of a normal message
SLOW_PART = 0.05  # the share of slow messages
SLOW_S_MAX = 0.4  # of a slow message


class Server(Protocol):
    """A process that serves calls at an address."""

    async def serve(self, path: str, call: ServerEnd) -> None:
        """Serve one call of a method until it ends."""


class Network:
    """The servers by address, and all links."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.servers: dict[str, Server] = {}
        self.links: list[NetworkLink] = []
        self.half_open: list[NetworkLink] = []  # closed at the proxy, still open at the broker
        self.serving: set[asyncio.Task[None]] = set()  # calls in progress

    @contextlib.asynccontextmanager
    async def connect(
        self, address: str, _limits: object, *, message_bytes_max: int, timeout_s: float
    ) -> AsyncIterator[NetworkLink]:
        """Connect a proxy, with the signature of `tidemill.transport.aio.channel.connected`."""
        del message_bytes_max, timeout_s
        await asyncio.sleep(self.delay_s())
        server = self.servers.get(address)
        if server is None:
            raise RpcError(RpcCode.UNAVAILABLE, f"no server listens at {address}")
        link = NetworkLink(self, server)
        self.links.append(link)
        try:
            yield link
        finally:
            link.close()

    def delay_s(self) -> float:
        if self.random.random() < SLOW_PART:
            return self.random.uniform(0, SLOW_S_MAX)
        return self.random.uniform(0, DELAY_S_MAX)

    async def end(self) -> None:
        """End all calls."""
        for task in self.serving:
            task.cancel()
        await asyncio.gather(*self.serving, return_exceptions=True)

    def hang_server(self, address: str, end_s: float) -> None:
        """Let the machine of a process hang: its links stay open and mute for `end_s`."""
        server = self.servers.pop(address, None)
        for link in [link for link in self.links if link.server is server]:
            link.hang(end_s)

    def close_server(self, address: str) -> None:
        """Close all links of a process that has ended."""
        server = self.servers.pop(address, None)
        for link in [link for link in self.links + self.half_open if link.server is server]:
            link.close()
            link.close_at_broker()


class NetworkLink:
    """The proxy's end of a connection with one call."""

    part_heard_at_s = 0.0  # messages arrive whole

    def __init__(self, network: Network, server: Server) -> None:
        self.server = server
        self._network = network
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[None] = self._loop.create_future()
        self._on_message: Callable[[bytes], None] | None = None
        self._end = ServerEnd(self)
        self._serving: asyncio.Task[None] | None = None
        self._arrives_at_s = {"up": 0.0, "down": 0.0}
        self._heard_at_s = self._loop.time()  # of the broker, by the proxy
        self.is_closed = False
        self._hangs = False
        self._late_until_s = 0.0

    # ------------------------------------------------------------ the proxy's side

    def open(self, path: str, on_message: Callable[[bytes], None]) -> NetworkLink:
        self._on_message = on_message
        self._serving = self._loop.create_task(self._serve(path))
        self._network.serving.add(self._serving)
        self._serving.add_done_callback(self._network.serving.discard)
        return self

    @property
    def heard_at_s(self) -> float:
        """The time of the broker's last message; an open link answers pings, so it is now."""
        return self._heard_at_s if self.is_closed or self._hangs else self._loop.time()

    def write(self, message: bytes) -> None:
        self._carry("up", self._end.arrived, message)

    def write_last(self, message: bytes) -> None:
        self.write(message)

    def cancel(self) -> None:
        self.close()

    def fail(self, error: RpcError) -> None:
        if not self._outcome.done():
            self._outcome.set_exception(error)
        self.close()

    async def wait_ended(self) -> None:
        await asyncio.shield(self._outcome)

    # ------------------------------------------------------------ both sides

    def reply(self, message: bytes) -> None:
        """Carry a reply of the broker to the proxy."""
        self._carry("down", self._deliver, message)

    def close(self) -> None:
        """Close the link; messages in flight are lost."""
        if not self.is_closed:
            self._lose()
            self._end.closed()

    def close_at_broker(self) -> None:
        """Close a link at the broker that its proxy has lost before."""
        if self in self._network.half_open:
            self._network.half_open.remove(self)
            self._end.closed()

    def lose_at_proxy(self, late_s: float, end_s: float) -> None:
        """Close the link at the proxy now and at the broker after `end_s`.

        Messages in flight to the broker still arrive, at the earliest `late_s` from now.
        """
        if self.is_closed:
            return
        self._lose()
        self._network.half_open.append(self)
        now_s = self._loop.time()
        self._late_until_s = now_s + late_s
        self._loop.call_at(
            max(self._arrives_at_s["up"], self._late_until_s) + end_s, self.close_at_broker
        )

    def hang(self, end_s: float) -> None:
        """Carry nothing more, and end after `end_s`."""
        self._hangs, self._heard_at_s = True, self._loop.time()
        self._loop.call_later(end_s, self.close)

    def _lose(self) -> None:
        self.is_closed = True
        self._network.links.remove(self)
        if not self._outcome.done():
            self._outcome.set_exception(RpcError(RpcCode.UNAVAILABLE, "the link was lost"))
            self._outcome.exception()

    def _carry(self, way: str, to: Callable[[bytes], None], message: bytes) -> None:
        if self.is_closed or self._hangs:
            return
        # Messages of one direction arrive in the order in which they were sent.
        at_s = max(self._arrives_at_s[way], self._loop.time() + self._network.delay_s())
        self._arrives_at_s[way] = at_s + 1e-6
        self._loop.call_at(at_s, self._arrive, to, message)

    def _arrive(self, to: Callable[[bytes], None], message: bytes) -> None:
        if self._hangs:
            return
        if not self.is_closed:
            to(message)
        elif self in self._network.half_open and to == self._end.arrived:
            now_s = self._loop.time()
            if now_s >= self._late_until_s:
                to(message)
            else:
                # Each message arrives a little after the message before.
                self._late_until_s += 1e-6
                self._loop.call_at(self._late_until_s, to, message)

    def _deliver(self, message: bytes) -> None:
        self._heard_at_s = self._loop.time()
        assert self._on_message is not None, "a message arrives before the call is open"
        self._on_message(message)

    async def _serve(self, path: str) -> None:
        with contextlib.suppress(RpcError):
            await self.server.serve(path, self._end)
        self.close()


class ServerEnd:
    """The broker's end of the call, with the methods of `RpcCall`."""

    unsent_bytes = 0

    def __init__(self, link: NetworkLink) -> None:
        self._link = link
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue()

    def arrived(self, message: bytes) -> None:
        self._requests.put_nowait(message)

    def closed(self) -> None:
        self._requests.put_nowait(None)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        request = await self._requests.get()
        if request is None:
            raise StopAsyncIteration
        return request

    def write(self, message: bytes) -> None:
        self._link.reply(message)

    async def send(self, message: bytes) -> None:
        self._link.reply(message)

    async def wait_drained(self) -> None:
        await asyncio.sleep(0)
