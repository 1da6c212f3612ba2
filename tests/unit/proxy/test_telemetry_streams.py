"""Commands go to the newest stream of a client, and a nonce finds the answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Hashable

import pytest

from tidemill.common.errors import ClientCannot, ClientMute, ClientTimeout, Overloaded
from tidemill.message.client_key import ClientKey
from tidemill.proxy.clients import telemetry_streams
from tidemill.proxy.clients.telemetry_streams import ASKED_MAX, ClientAnswer, TelemetryStreams
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.transport.aio.call import DisconnectError

LONG_MS = 10_000
CLIENT, OTHER = ClientKey("c"), ClientKey("a")
DONE = ClientAnswer(v2.OK, "", "all threads")


class Outlet:
    """The stream of one client."""

    def __init__(self, *, has_room: bool = True, is_gone: bool = False, reads: bool = True) -> None:
        self.sent: list[service.TelemetryCommand] = []
        self.came = asyncio.Event()
        self.held_bytes = 0
        self.connection: Hashable = self
        self.left_after: list[int] = []  # how many commands had been sent when it was told to leave
        self._has_room = has_room
        self._is_gone = is_gone
        self._reads = reads

    def hold(self, size_bytes: int) -> bool:
        if self._has_room:
            self.held_bytes += size_bytes
        return self._has_room

    def release(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes

    def drain_connection(self) -> None:
        self.left_after.append(len(self.sent))

    async def send(self, message: bytes) -> None:
        if self._is_gone:
            raise DisconnectError
        if not self._reads:
            await asyncio.Event().wait()
        self.sent.append(service.TelemetryCommand.FromString(message))
        self.came.set()

    async def nonce(self) -> str:
        """Wait for the first command and return its nonce."""
        await self.came.wait()
        return self.sent[0].print_thread_stack_trace_command.nonce


def stack_wanted() -> service.TelemetryCommand:
    command = service.PrintThreadStackTraceCommand()
    return service.TelemetryCommand(print_thread_stack_trace_command=command)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(main())


def test_only_the_answer_with_the_nonce_counts() -> None:
    async def scenario() -> None:
        streams, old, new = TelemetryStreams(), Outlet(), Outlet()
        with streams.open(CLIENT, old), streams.open(CLIENT, new):
            asking = asyncio.create_task(streams.ask(CLIENT, stack_wanted(), timeout_ms=LONG_MS))
            nonce = await new.nonce()
            assert not old.sent
            assert streams.is_asked(CLIENT)
            assert not streams.is_asked(ClientKey("other"))
            streams.resolve(CLIENT, "another nonce", ClientAnswer(v2.OK, "", "wrong"))
            streams.resolve(ClientKey("other"), nonce, ClientAnswer(v2.OK, "", "wrong"))
            streams.resolve(CLIENT, nonce, DONE)
            streams.resolve(CLIENT, nonce, ClientAnswer(v2.OK, "", "too late"))
            assert await asking == DONE
        assert new.held_bytes == 0
        assert not streams.is_asked(CLIENT)

    run(scenario)


def test_a_client_without_a_stream_cannot_be_asked() -> None:
    async def scenario() -> None:
        streams = TelemetryStreams()
        with streams.open(CLIENT, Outlet()):
            assert CLIENT in streams
        assert CLIENT not in streams
        with pytest.raises(ClientMute):
            await streams.ask(CLIENT, stack_wanted(), timeout_ms=LONG_MS)

    run(scenario)


def test_silent_disconnected_and_full_clients_have_different_errors() -> None:
    async def scenario() -> None:
        streams = TelemetryStreams()
        with streams.open(CLIENT, Outlet()), pytest.raises(ClientTimeout, match="within 1 ms"):
            await streams.ask(CLIENT, stack_wanted(), timeout_ms=1)
        with (
            streams.open(CLIENT, Outlet(is_gone=True)),
            pytest.raises(ClientTimeout, match="disconnected"),
        ):
            await streams.ask(CLIENT, stack_wanted(), timeout_ms=LONG_MS)
        with streams.open(CLIENT, Outlet(has_room=False)), pytest.raises(Overloaded):
            await streams.ask(CLIENT, stack_wanted(), timeout_ms=LONG_MS)
        assert not streams.is_asked(CLIENT)

    run(scenario)


def test_concurrent_questions_are_limited_per_client_and_in_total() -> None:
    async def scenario() -> None:
        streams = TelemetryStreams()
        with contextlib.ExitStack() as opened:
            for n in range(ASKED_MAX):
                opened.enter_context(streams.open(ClientKey(f"c{n}"), Outlet()))
            asking = [
                asyncio.create_task(
                    streams.ask(ClientKey(f"c{n // 2}"), stack_wanted(), timeout_ms=LONG_MS)
                )
                for n in range(ASKED_MAX)
            ]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="for client c0;"):
                await streams.ask(ClientKey("c0"), stack_wanted(), timeout_ms=LONG_MS)
            with pytest.raises(Overloaded, match="for clients;"):
                await streams.ask(
                    ClientKey(f"c{ASKED_MAX - 1}"), stack_wanted(), timeout_ms=LONG_MS
                )
            for task in asking:
                task.cancel()
            await asyncio.wait(asking)

    run(scenario)


def test_all_streams_are_asked_to_reconnect_despite_slow_readers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(telemetry_streams, "SPREAD_S", 0.0)
    monkeypatch.setattr(telemetry_streams, "SPREAD_GRACE_S", 0.1)

    async def scenario() -> None:
        streams = TelemetryStreams()
        outlets = [Outlet(), Outlet(is_gone=True), Outlet(has_room=False), Outlet()]
        with (
            streams.open(OTHER, outlets[0]),
            streams.open(ClientKey("b"), outlets[1]),
            streams.open(CLIENT, outlets[2]),
            streams.open(OTHER, outlets[3]),
            streams.open(ClientKey("d"), Outlet(reads=False)),
        ):
            await streams.ask_to_reconnect()
        for outlet in (outlets[0], outlets[3]):
            [command] = outlet.sent
            assert command.reconnect_endpoints_command.nonce
        assert not any(outlet.held_bytes for outlet in outlets)

    run(scenario)


def test_each_connection_is_drained_once_with_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_streams, "SPREAD_S", 0.0)
    monkeypatch.setattr(telemetry_streams, "SPREAD_GRACE_S", 0.1)

    async def scenario() -> None:
        streams = TelemetryStreams()
        first, second, alone, mute = Outlet(), Outlet(), Outlet(), Outlet(reads=False)
        first.connection = second.connection = "shared"
        with (
            streams.open(OTHER, first),
            streams.open(ClientKey("b"), second),
            streams.open(CLIENT, alone),
            streams.open(ClientKey("d"), mute),
        ):
            await streams.ask_to_reconnect()
        assert [len(one.sent) for one in (first, second, alone)] == [1, 1, 1]
        # A connection with two streams is drained once, after both commands.
        assert (first.left_after, second.left_after, alone.left_after) == ([1], [], [1])
        assert mute.left_after == [0], "the connection of a client that does not read is drained"

    run(scenario)


def test_a_too_large_answer_fails_its_question() -> None:
    async def scenario() -> None:
        streams, outlet = TelemetryStreams(), Outlet()
        with streams.open(CLIENT, outlet):
            asking = asyncio.create_task(streams.ask(CLIENT, stack_wanted(), timeout_ms=LONG_MS))
            await outlet.nonce()
            streams.reject_large_answer(ClientKey("d"), 5)
            assert not asking.done()
            streams.reject_large_answer(CLIENT, 3_000_000)
            with pytest.raises(ClientCannot, match="3000000 bytes"):
                await asking

    run(scenario)
