"""The telemetry streams of this proxy. They carry commands to clients; a nonce finds the answer.

A client may have several streams: one per endpoint, or an old one whose end is not noticed yet. The
proxy sends on the newest stream and accepts an answer on any stream of the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, final

from tidemill.common.errors import ClientCannot, ClientMute, ClientTimeout, Overloaded
from tidemill.message.client_key import UNKNOWN_CLIENT, ClientKey
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.transport.aio.call import DisconnectError

if TYPE_CHECKING:
    from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

ASKED_MAX: Final = 64  # concurrent commands of operators and their scripts
ASKED_OF_A_CLIENT_MAX: Final = 2  # of those; some clients never answer
NONCE_BYTES: Final = 16  # random, so that only a client that has the command can answer
# Time over which a draining proxy spreads the reconnects of its clients.
SPREAD_S: Final = 1.0
SPREAD_EACH_S: Final = 0.002  # per connection, if there are fewer than 500
# Time for clients to read the last command before their connections are closed.
SPREAD_GRACE_S: Final = 0.5


class TelemetrySink(Protocol):
    """The sending side of a telemetry stream."""

    @property
    def connection(self) -> Hashable:
        """Key of the connection: equal for all streams of one connection."""

    def drain_connection(self) -> None:
        """Ask the client to leave its connection."""

    def hold(self, size_bytes: int) -> bool:
        """Reserve room for a message. Return False if there is none."""

    def release(self, size_bytes: int) -> None:
        """Release reserved room."""

    async def send(self, message: bytes) -> None:
        """Hand over one message. Raises DisconnectError."""


class ClientAnswer(NamedTuple):
    """The answer of a client to a command."""

    code: v2.Code.ValueType
    message: str
    stack: str


@final
class TelemetryStreams:
    """The open streams by client, and the commands in flight."""

    def __init__(self) -> None:
        self._streams: dict[ClientKey, list[TelemetrySink]] = {}  # the newest last
        self._asked: dict[str, tuple[ClientKey, asyncio.Future[ClientAnswer]]] = {}  # by nonce

    @contextlib.contextmanager
    def open(self, client: ClientKey, sink: TelemetrySink) -> Iterator[None]:
        """Register the stream of a client until the block ends."""
        self._streams.setdefault(client, []).append(sink)
        try:
            yield
        finally:
            sinks = self._streams[client]
            sinks.remove(sink)
            if not sinks:
                del self._streams[client]

    def __contains__(self, client: ClientKey) -> bool:
        return client in self._streams

    # ------------------------------------------------------------ commands

    async def ask(
        self, client: ClientKey, command: service.TelemetryCommand, *, timeout_ms: int
    ) -> ClientAnswer:
        """Send a command with a nonce, and return the answer.

        Raises ClientMute, ClientTimeout, Overloaded.
        """
        streams = self._streams.get(client)
        if not streams:
            raise ClientMute.of(client.client_id)
        if sum(client == asked for asked, _ in self._asked.values()) >= ASKED_OF_A_CLIENT_MAX:
            raise Overloaded(
                f"{ASKED_OF_A_CLIENT_MAX} commands already wait for client {client.client_id}; "
                f"retry later"
            )
        if len(self._asked) >= ASKED_MAX:
            raise Overloaded(f"{ASKED_MAX} commands already wait for clients; retry later")
        nonce = secrets.token_hex(NONCE_BYTES)
        field = command.WhichOneof("command")
        assert field is not None, "an empty command"
        getattr(command, field).nonce = nonce
        answer: asyncio.Future[ClientAnswer] = asyncio.get_running_loop().create_future()
        self._asked[nonce] = client, answer
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await _send(streams[-1], command.SerializeToString())
                return await answer
        except TimeoutError:
            raise ClientTimeout(
                f"client {client.client_id} did not answer within {timeout_ms} ms; clients in Java "
                f"and Go answer, clients in Python never do"
            ) from None
        except DisconnectError:
            raise ClientTimeout(
                f"client {client.client_id} disconnected before it answered"
            ) from None
        finally:
            del self._asked[nonce]

    def is_asked(self, client: ClientKey) -> bool:
        """Whether a command waits for an answer of the client."""
        return any(client.matches(asked) for asked, _ in self._asked.values())

    def resolve(self, client: ClientKey, nonce: str, answer: ClientAnswer) -> None:
        """Return an answer to its command, if the command still waits."""
        asked, waiting = self._asked.get(nonce, (UNKNOWN_CLIENT, None))
        if waiting is not None and client.matches(asked) and not waiting.done():
            waiting.set_result(answer)

    async def write(self, sink: TelemetrySink, encoded: bytes) -> None:
        """Send a command without an answer; return when it has left the buffer of the stream.

        Raises DisconnectError, Overloaded.
        """
        await _send(sink, encoded)

    async def try_send(self, sink: TelemetrySink, encoded: bytes, *, timeout_s: float) -> None:
        """Send a command without an answer, unless the client does not read or has disconnected."""
        with contextlib.suppress(TimeoutError, DisconnectError, Overloaded):
            async with asyncio.timeout(timeout_s):
                await _send(sink, encoded)

    def reject_large_answer(self, client: ClientKey, size_bytes: int) -> None:
        """Fail all commands of a client whose answer was too large.

        The answer was dropped with its nonce, so its command is unknown.
        """
        for asked, waiting in self._asked.values():
            if client.matches(asked) and not waiting.done():
                sentence = (
                    f"the answer of client {client.client_id} has {size_bytes} bytes, too many"
                )
                waiting.set_exception(ClientCannot(sentence))

    # ------------------------------------------------------------ drain

    async def ask_to_reconnect(self) -> None:
        """Ask all clients to reconnect, spread over some time. Return after that time.

        Each transport is drained together with its streams. Many clients react to the transport,
        and would otherwise reconnect all at once.
        """
        connections: dict[Hashable, list[TelemetrySink]] = {}
        for sinks in self._streams.values():
            for sink in sinks:
                connections.setdefault(sink.connection, []).append(sink)
        spread_s = min(SPREAD_S, SPREAD_EACH_S * len(connections))
        # A client that does not read notices the end of its connection.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(spread_s + SPREAD_GRACE_S), asyncio.TaskGroup() as tasks:
                for sinks in connections.values():
                    tasks.create_task(_reconnect(sinks, random.uniform(0, spread_s)))


async def _reconnect(sinks: Sequence[TelemetrySink], delay_s: float) -> None:
    """Ask the clients of one connection to reconnect, then drain the connection."""
    await asyncio.sleep(delay_s)
    try:
        async with asyncio.TaskGroup() as tasks:
            for sink in sinks:
                tasks.create_task(_send_reconnect(sink))
    finally:
        sinks[0].drain_connection()


async def _send_reconnect(sink: TelemetrySink) -> None:
    nonce = secrets.token_hex(NONCE_BYTES)
    reconnect = service.ReconnectEndpointsCommand(nonce=nonce)
    command = service.TelemetryCommand(reconnect_endpoints_command=reconnect)
    with contextlib.suppress(DisconnectError, Overloaded):
        await _send(sink, command.SerializeToString())


async def _send(sink: TelemetrySink, encoded: bytes) -> None:
    if not sink.hold(len(encoded)):
        raise Overloaded("the client's connection has no room for the command")
    try:
        await sink.send(encoded)
    finally:
        sink.release(len(encoded))
