"""Large messages as clients send them: several DATA frames per read, in any order.

The clients keep to their windows. So a rejection, a second grant or missing room is an error of the
server.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest

from tests.support.clients import http2_peer as peer
from tests.support.clients.http2_peer import grpc_message, parse
from tests.unit.transport.grpc.test_room_queue import BEGUN, LARGE_BYTES, MIB, Client, World
from tidemill.transport.grpc.address_share import AddressShare
from tidemill.transport.grpc.server_call import (
    CallEnded,
    MessageReceived,
    RequestPolicy,
    ServerEvent,
)
from tidemill.transport.grpc.server_connection import ServerConnection
from tidemill.transport.http2 import frames
from tidemill.transport.http2.limits import Limits

FRAME_BYTES = 16_384
STEPS = 250
# Sizes of messages: one frame, about a window, more than a window, and the largest.
LENGTHS = (10_000, 65_000, 70_000, 500_000, MIB, LARGE_BYTES, 12 * MIB)


@dataclass(slots=True)
class MessageInFlight:
    """A message in flight, as its client sees it."""

    length: int
    left: int
    window: int
    granted: int = 0


@dataclass(slots=True)
class Sender:
    """A client that keeps to the windows of its streams."""

    client: Client
    streams: dict[int, MessageInFlight] = field(default_factory=dict)
    next_id: int = 1

    def begin(self, length: int, now_s: float) -> list[ServerEvent]:
        """Begin a call with a message of `length`, including its prefix."""
        stream_id, self.next_id = self.next_id, self.next_id + 2
        self.streams[stream_id] = MessageInFlight(length, length, 65_535)
        return self.client.connection.receive(peer.headers(stream_id, peer.GRPC_REQUEST), now_s)

    def send(self, stream_id: int, bytes_max: int, now_s: float) -> list[ServerEvent]:
        """Send as much of a message as the windows allow, in frames of one read."""
        sending = self.streams[stream_id]
        count = min(sending.left, sending.window, bytes_max)
        whole = grpc_message(b"", length=sending.length - 5) + bytes(count)
        begin = 0 if sending.left == sending.length else 5
        data = whole[begin : begin + count]
        cuts = [*range(0, count, FRAME_BYTES), count]
        sending.left -= count
        sending.window -= count
        raw = b"".join(
            peer.data(stream_id, data[at:to], is_last=not sending.left and to == count)
            for at, to in pairwise(cuts)
        )
        return self.client.connection.receive(raw, now_s)

    def read(self) -> None:
        """Process the server's output."""
        for frame in parse(self.client.connection.http.take_output()):
            sending = self.streams.get(frame.stream_id)
            if sending is not None and frame.kind == frames.WINDOW_UPDATE:
                increment = int.from_bytes(frame.payload, "big")
                sending.window += increment
                sending.granted += increment


def test_a_granted_message_may_arrive_in_reads_of_several_frames() -> None:
    world, address = World(), AddressShare()
    sender = Sender(world.client(address))
    sender.begin(LARGE_BYTES, 0.0)
    sender.send(1, 100, 0.0)
    sender.read()
    assert sender.streams[1].granted
    # By then there is little room, and a second message of the address waits for some.
    world.fill()
    world.client(address).begin()
    now_s, events = 0.0, list[ServerEvent]()
    while sender.streams[1].left:
        now_s += 0.16  # 400 KB per second: longer than the limit of waiting for room
        events += sender.send(1, 4 * FRAME_BYTES, now_s)
        events += sender.client.connection.check(now_s)
        sender.read()
    assert [type(one) for one in events] == [MessageReceived]
    assert sender.streams[1].granted <= LARGE_BYTES
    assert world.hits == {}


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_frames_grants_each_message_once_and_returns_all_room(seed: int) -> None:
    """Only calls that wait too long end. No client may send more than its message."""
    chance, world = Random(seed), World()
    addresses = [AddressShare() for _ in range(4)]
    senders: list[Sender] = []
    now_s = 0.0
    for _ in range(STEPS):
        now_s += (
            chance.random() / 8
        )  # less than the stall timeout, and much more than the limit of waiting
        if len(senders) < 12 and chance.random() < 0.3:
            senders.append(Sender(world.client(chance.choice(addresses))))
        if not senders:
            continue
        sender, what = chance.choice(senders), chance.random()
        events: list[ServerEvent] = []
        if what < 0.4:
            events += sender.begin(chance.choice(LENGTHS), now_s)
        elif what < 0.5 and sender.streams:
            gone = chance.choice(list(sender.streams))
            sender.streams.pop(gone)
            sender.client.connection.receive(peer.rst_stream(gone), now_s)
        elif what < 0.98:
            for _ in range(min(4, len(sender.streams))):
                one = chance.choice(list(sender.streams))
                events += sender.send(one, FRAME_BYTES * chance.choice([1, 3, 8]), now_s)
                forget(sender, events)
                if not sender.streams:
                    break
        else:
            sender.client.connection.close(frames.ErrorCode.CANCEL, "lost")
            senders.remove(sender)
            continue
        forget(sender, events)
        for other in senders:
            forget(other, other.client.connection.check(now_s))
        world.account.queue.grant_room()
        for other in senders:
            other.read()
            for sending in other.streams.values():
                assert sending.granted <= max(sending.length - 65_535, 0)
        assert world.account.bytes <= world.account.bytes_max
    for sender in senders:
        sender.client.connection.close(frames.ErrorCode.CANCEL, "the end")
    assert (world.account.bytes, world.account.queue.bytes) == (0, 0)
    assert {(one.bytes, one.waiting_bytes) for one in addresses} == {(0, 0)}


def forget(sender: Sender, events: list[ServerEvent]) -> None:
    """Remove ended messages from a sender, and answer complete ones."""
    for event in events:
        if isinstance(event, CallEnded | MessageReceived):
            sending = sender.streams.pop(event.call.stream.id, None)
            if isinstance(event, MessageReceived):
                sender.client.connection.respond(event.call, b"")
            elif sending is not None:
                assert not sending.granted, "a granted message is not rejected"


def test_padding_takes_nothing_from_a_grant() -> None:
    world = World()
    client = world.client()
    stream_id = client.begin()
    assert client.granted() == [stream_id]
    left, events = LARGE_BYTES - 100, list[ServerEvent]()
    window = left
    while left:
        # With an exact grant, every frame except the last takes more than its content.
        count = min(left, 16_000, max(window - 256, 1))
        assert count, "the whole message arrives"
        padding = 255 if window - count > 255 else None
        padded = peer.data(stream_id, bytes(count), padding=padding, is_last=count == left)
        left, window = left - count, window - count - (256 if padding else 0)
        events += client.connection.receive(padded, 0.0)
        client.granted()
        for opened in peer.of(frames.WINDOW_UPDATE, client.frames):
            if opened.stream_id:
                window += int.from_bytes(opened.payload, "big")
    assert [type(one) for one in events] == [MessageReceived]


def test_a_message_that_needs_no_more_room_leaves_the_queue() -> None:
    """In a stream, reading the earlier messages opens the window while a message waits."""
    world = World()
    world.fill(free_bytes=100_000)
    client = world.client()
    before = grpc_message(bytes(40_000))
    content = before + grpc_message(b"", length=60_000)
    stream_id = client.begin(begun=content[:16_000])
    for at in range(16_000, len(content), 16_000):
        client.connection.receive(peer.data(stream_id, content[at : at + 16_000]), 0.0)
    call = client.connection._calls[stream_id]
    assert call.room_requested_at_s is not None
    client.connection.consume(call, len(before))
    rest = b"".join(peer.data(stream_id, bytes(15_000)) for _ in range(4))
    [event] = client.connection.receive(rest, 0.0)
    assert isinstance(event, MessageReceived)
    assert not client.connection.memory._requests
    assert world.account.queue.bytes == 0
    assert client.connection.check(60.0) == []


@pytest.mark.parametrize("length", [50_000, MIB])
def test_a_message_of_a_stream_that_arrives_byte_by_byte_is_ended(length: int) -> None:
    """A stream may stay open as long as its client likes; a message in it may not."""
    world = World()
    client = world.client()
    stream_id = client.begin(begun=grpc_message(b"", length=length))
    client.connection._calls[stream_id].has_request_stream = True
    now_s, events = 0.0, list[ServerEvent]()
    while not events and now_s < 2 * Limits().request_timeout_s:
        now_s += 50.0
        client.connection.receive(peer.data(stream_id, b"x"), now_s)
        events += client.connection.check(now_s)
    assert [type(one) for one in events] == [CallEnded]
    # Other messages wait for the room granted beyond the window.
    assert now_s < (200.0 if length > 65_535 else 400.0)
    assert client.connection.share.bytes == 0


def test_a_message_may_arrive_as_slowly_as_the_limit_allows() -> None:
    world = World()
    client = world.client()
    stream_id = client.begin(begun=grpc_message(b"", length=200_000))
    client.connection._calls[stream_id].has_request_stream = True
    now_s, left, events = 0.0, 200_000, list[ServerEvent]()
    while left:
        now_s, count = now_s + 10.0, min(left, 13_000)
        left -= count
        events += client.connection.receive(peer.data(stream_id, bytes(count)), now_s)
        events += client.connection.check(now_s)
    assert [type(one) for one in events] == [MessageReceived]


def test_an_old_stream_may_send_its_next_message() -> None:
    world = World()
    client = world.client()
    stream_id = client.begin(begun=grpc_message(b"one"))
    client.connection._calls[stream_id].has_request_stream = True
    assert client.connection.receive(peer.data(stream_id, BEGUN), 5_000.0) == []
    assert client.connection.check(5_050.0) == []


def test_a_message_over_its_limit_is_discarded_and_its_stream_continues() -> None:
    world = World()
    policies = {"/test.Service/Method": RequestPolicy(MIB, skipped_bytes_max=4 * MIB)}
    connection = ServerConnection(
        Limits(),
        message_bytes_max=16 * MIB,
        now_s=0.0,
        hits=world.hits,
        account=world.account,
        policies=policies,
    )
    connection.receive(peer.CLIENT_GREETING, 0.0)
    connection.receive(peer.headers(1, peer.GRPC_REQUEST), 0.0)
    call = connection._calls[1]
    call.has_request_stream = True
    content = grpc_message(bytes(3 * MIB)) + grpc_message(b"next")
    at, window, events = 0, 65_535, list[ServerEvent]()
    while at < len(content):
        count = min(window, FRAME_BYTES, len(content) - at)
        assert count, "discarded data opens its window again"
        events += connection.receive(peer.data(1, content[at : at + count]), 0.0)
        at, window = at + count, window - count
        assert connection.share.bytes < 65_536
        window += sum(
            int.from_bytes(one.payload, "big")
            for one in peer.of(frames.WINDOW_UPDATE, parse(connection.http.take_output()))
            if one.stream_id
        )
    assert events == [
        MessageReceived(call, b"", 5, False, 0, 3 * MIB),
        MessageReceived(call, b"next", 9, False, events[1].held_bytes),  # type: ignore[union-attr]  # It is one.
    ]
    [ended] = connection.receive(peer.data(1, grpc_message(b"", length=4 * MIB + 1)), 0.0)
    assert isinstance(ended, CallEnded), "the size of a discarded message is limited"
