"""Streams of requests and responses as a handler sees them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

from tidemill.transport.aio.call import SEND_BYTES_MAX, RpcCall, bidirectional
from tidemill.transport.aio.server_protocol import ServerProtocol
from tidemill.transport.grpc.server_call import ServerCall


def test_a_request_holds_its_room_until_the_next_one_is_read() -> None:
    consumed: list[tuple[int, int]] = []

    def consume(_call: ServerCall, wire_bytes: int, held_bytes: int) -> None:
        consumed.append((wire_bytes, held_bytes))

    async def serve(_call: RpcCall) -> None: ...

    async def scenario() -> None:
        protocol = cast("ServerProtocol", SimpleNamespace(consume=consume))
        call = RpcCall(protocol, cast("ServerCall", None), bidirectional(serve))
        call.put_request(b"first", 10, 400)
        call.put_request(b"second", 11, 0)
        call.end_requests()
        assert await anext(call) == b"first"
        assert consumed == [], "the first request is in progress"
        assert await anext(call) == b"second"
        assert consumed == [(10, 400)]
        assert await anext(call, None) is None
        assert consumed == [(10, 400), (11, 0)]

    asyncio.run(scenario())


def test_a_busy_sender_lets_other_senders_take_turns() -> None:
    """Even with open windows and an empty transport, nothing else makes the sender wait."""
    sent: list[bytes] = []

    def send(_call: ServerCall, batch: list[bytes]) -> bool:
        sent.extend(batch)
        return True  # as much as one turn allows

    async def serve(_call: RpcCall) -> None: ...

    async def scenario() -> None:
        protocol = SimpleNamespace(send=send, is_congested=False, is_paused=False)
        state = SimpleNamespace(
            is_ended=False, queued_total_bytes=0, stream=SimpleNamespace(queued_bytes=0)
        )
        async with asyncio.TaskGroup() as tasks:
            for name in (b"first", b"second"):
                call = RpcCall(
                    cast("ServerProtocol", protocol),
                    cast("ServerCall", state),
                    bidirectional(serve),
                )
                messages = [name.ljust(SEND_BYTES_MAX)] * 3  # Each message is a batch.
                tasks.create_task(call.send_all(messages))

    asyncio.run(scenario())
    assert [one.strip() for one in sent] == [b"first", b"second"] * 3


def test_a_stream_gets_one_request_per_turn_of_the_loop() -> None:
    served: list[str] = []

    async def read(name: str, call: RpcCall) -> None:
        async for request in call:
            served.append(name)
            assert request == b"%d" % served.count(name)

    async def scenario() -> None:
        protocol = cast("ServerProtocol", SimpleNamespace(consume=lambda *_told: None))
        async with asyncio.TaskGroup() as tasks:
            for name in ("first", "second"):
                call = RpcCall(protocol, cast("ServerCall", None), bidirectional(serve))
                for n in range(3):
                    call.put_request(b"%d" % (n + 1), 6, 0)
                call.end_requests()
                tasks.create_task(read(name, call))

    async def serve(_call: RpcCall) -> None: ...

    asyncio.run(scenario())
    assert served == ["first", "second"] * 3
