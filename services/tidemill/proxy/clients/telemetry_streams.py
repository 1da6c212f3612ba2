"""The telemetry streams of this proxy: commands go out on them, and answers come back by a nonce.

A client may have several streams, to several of its endpoints or one that it has left and that we
have yet to notice. The newest is the one to speak on; an answer counts on any of the same client.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, final

from tidemill.common.errors import ClientCannot, ClientMute, ClientTimeout, Overloaded
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.transport.aio.call import DisconnectError

if TYPE_CHECKING:
    from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

ASKED_MAX: Final = 64  # commands under way to clients: operators, and their scripts
ASKED_OF_A_CLIENT_MAX: Final = 2  # of those: one that never answers is not to take them all
NONCE_BYTES: Final = 16  # random: whoever has not seen a command cannot answer it
# A proxy that drains tells all clients within that: each may come again at once, somewhere else.
SPREAD_S: Final = 1.0
SPREAD_EACH_S: Final = 0.002  # few are told sooner: 500 take the whole of it
# For clients to take what they were told before the connections are closed.
SPREAD_PATIENCE_S: Final = 0.5


class Outlet(Protocol):
    """Where what a client is told goes."""

    @property
    def connection(self) -> Hashable:
        """What the streams of one connection have in common, and those of others do not."""

    def drain_connection(self) -> None:
        """Ask the client to leave its connection."""

    def hold(self, size_bytes: int) -> bool:
        """Take room for what is going to be sent; False: there is none."""

    def release(self, size_bytes: int) -> None:
        """Give back room that was taken."""

    async def send(self, message: bytes) -> None:
        """Hand over one message. Raises DisconnectError."""


class ClientAnswer(NamedTuple):
    """What a client has answered."""

    code: v2.Code.ValueType
    message: str
    stack: str


@final
class TelemetryStreams:
    """Who can be spoken to, and what is being asked."""

    def __init__(self) -> None:
        self._streams: dict[str, list[Outlet]] = {}  # by client id, the newest last
        self._asked: dict[str, tuple[str, asyncio.Future[ClientAnswer]]] = {}  # by nonce

    @contextlib.contextmanager
    def open(self, client_id: str, outlet: Outlet) -> Iterator[None]:
        """Know the stream of a client until the block ends."""
        self._streams.setdefault(client_id, []).append(outlet)
        try:
            yield
        finally:
            left = self._streams[client_id]
            left.remove(outlet)
            if not left:
                del self._streams[client_id]

    def __contains__(self, client_id: str) -> bool:
        return client_id in self._streams

    # ------------------------------------------------------------ asking

    async def ask(
        self, client_id: str, command: service.TelemetryCommand, *, timeout_ms: int
    ) -> ClientAnswer:
        """Send a command that has a nonce, and return the answer.

        Raises ClientMute, ClientTimeout, Overloaded.
        """
        streams = self._streams.get(client_id)
        if not streams:
            raise ClientMute.of(client_id)
        if sum(client_id == asked for asked, _ in self._asked.values()) >= ASKED_OF_A_CLIENT_MAX:
            already = f"{ASKED_OF_A_CLIENT_MAX} commands wait for the answer of client {client_id}"
            raise Overloaded(f"{already} already")
        if len(self._asked) >= ASKED_MAX:
            raise Overloaded(f"{ASKED_MAX} commands wait for the answers of clients already")
        nonce = secrets.token_hex(NONCE_BYTES)
        field = command.WhichOneof("command")
        assert field is not None, "a command says what to do"
        getattr(command, field).nonce = nonce
        answer: asyncio.Future[ClientAnswer] = asyncio.get_running_loop().create_future()
        self._asked[nonce] = client_id, answer
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await _send(streams[-1], command.SerializeToString())
                return await answer
        except TimeoutError:
            raise ClientTimeout(
                f"client {client_id} did not answer within {timeout_ms} ms; clients in Java and Go"
                f" do, those in Python never"
            ) from None
        except DisconnectError:
            raise ClientTimeout(f"client {client_id} went away while it was asked") from None
        finally:
            del self._asked[nonce]

    def is_asked(self, client_id: str) -> bool:
        """Whether an answer of a client is waited for."""
        return any(client_id == asked for asked, _ in self._asked.values())

    def answered(self, client_id: str, nonce: str, answer: ClientAnswer) -> None:
        """Take the answer of a client; one that nobody waits for is nothing."""
        asked, waiting = self._asked.get(nonce, ("", None))
        if waiting is not None and asked == client_id and not waiting.done():
            waiting.set_result(answer)

    async def tell(self, outlet: Outlet, encoded: bytes, *, timeout_s: float) -> None:
        """Send a command that wants no answer; who does not read, or has gone, is left out."""
        with contextlib.suppress(TimeoutError, DisconnectError, Overloaded):
            async with asyncio.timeout(timeout_s):
                await _send(outlet, encoded)

    def answered_too_much(self, client_id: str, size_bytes: int) -> None:
        """Let those go on who wait for a client: what it sent was thrown away.

        What was asked is not known, since that was thrown away as well: all of them are told.
        """
        for asked, waiting in self._asked.values():
            if asked == client_id and not waiting.done():
                sentence = f"the answer of client {client_id} has {size_bytes} bytes, too many"
                waiting.set_exception(ClientCannot(sentence))

    # ------------------------------------------------------------ leaving

    async def ask_to_reconnect(self) -> None:
        """Tell all clients to connect anew, spread over a while; returns when that is over.

        Their transports are told in the same moment, a connection each: many clients do as those
        are told, and would else come all at once.
        """
        connections: dict[Hashable, list[Outlet]] = {}
        for streams in self._streams.values():
            for outlet in streams:
                connections.setdefault(outlet.connection, []).append(outlet)
        spread_s = min(SPREAD_S, SPREAD_EACH_S * len(connections))
        # Who does not read is told by the end of the connection.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(spread_s + SPREAD_PATIENCE_S), asyncio.TaskGroup() as tasks:
                for outlets in connections.values():
                    tasks.create_task(_tell_all(outlets, random.uniform(0, spread_s)))


async def _tell_all(outlets: Sequence[Outlet], delay_s: float) -> None:
    """Tell those of one connection, and then its transport, which ends them."""
    await asyncio.sleep(delay_s)
    try:
        async with asyncio.TaskGroup() as tasks:
            for outlet in outlets:
                tasks.create_task(_tell(outlet))
    finally:
        outlets[0].drain_connection()


async def _tell(outlet: Outlet) -> None:
    nonce = secrets.token_hex(NONCE_BYTES)
    told = service.ReconnectEndpointsCommand(nonce=nonce)
    command = service.TelemetryCommand(reconnect_endpoints_command=told)
    with contextlib.suppress(DisconnectError, Overloaded):
        await _send(outlet, command.SerializeToString())


async def _send(outlet: Outlet, encoded: bytes) -> None:
    if not outlet.hold(len(encoded)):
        raise Overloaded("the client's connection has no room for the command")
    try:
        await outlet.send(encoded)
    finally:
        outlet.release(len(encoded))
