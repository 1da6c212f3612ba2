"""Large messages that wait for room: their order, their time and their number."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest

from tests.support.clients import http2_peer as peer
from tests.support.clients.http2_peer import fields_of, grpc_message, parse
from tidemill.transport.grpc import room_queue
from tidemill.transport.grpc.address_share import AddressShare
from tidemill.transport.grpc.connection_memory import CALL_BYTES, ROOM_WAIT_S_MAX
from tidemill.transport.grpc.memory import MemoryAccount, MemoryShare
from tidemill.transport.grpc.server_call import (
    CallEnded,
    CallStarted,
    MessageReceived,
    RequestPolicy,
)
from tidemill.transport.grpc.server_connection import ServerConnection
from tidemill.transport.http2 import frames
from tidemill.transport.http2.limits import Limit, Limits

MIB = 1 << 20
LARGE_BYTES = 4 * MIB
# Of a message, in its first frame: the prefix and a few bytes.
BEGUN = grpc_message(bytes(100), length=LARGE_BYTES)


class Client:
    """One connection of an address, with large messages."""

    def __init__(
        self, account: MemoryAccount, address: AddressShare | None, hits: Counter[Limit]
    ) -> None:
        self.connection = ServerConnection(
            Limits(),
            message_bytes_max=16 * MIB,
            now_s=0.0,
            hits=hits,
            account=account,
            address=address,
            policies={"/test.Service/Method": RequestPolicy(16 * MIB, b"large", b"no room")},
        )
        self.wakes = 0
        self.connection.memory.on_grant = self._wake
        self.connection.receive(peer.CLIENT_GREETING, 0.0)
        self._next_id = 1
        self.granted()

    def _wake(self) -> None:
        self.wakes += 1

    def begin(self, *, now_s: float = 0.0, timeout: str = "", begun: bytes = BEGUN) -> int:
        """Begin a call with a large message; return the id of its stream."""
        stream_id, self._next_id = self._next_id, self._next_id + 2
        fields = (*peer.GRPC_REQUEST, *((("grpc-timeout", timeout),) if timeout else ()))
        events = self.connection.receive(
            peer.headers(stream_id, fields) + peer.data(stream_id, begun), now_s
        )
        assert isinstance(events[0], CallStarted)
        return stream_id

    def granted(self) -> list[int]:
        """Return the streams whose windows were opened since the last call, in order."""
        self.frames = parse(self.connection.http.take_output())
        opened = peer.of(frames.WINDOW_UPDATE, self.frames)
        return [one.stream_id for one in opened if one.stream_id]


class World:
    """An account and its clients."""

    def __init__(self, bytes_max: int = 64 * MIB) -> None:
        self.account = MemoryAccount(bytes_max)
        self.hits: Counter[Limit] = Counter()

    def client(self, address: AddressShare | None = None) -> Client:
        return Client(self.account, address, self.hits)

    def fill(self, *, free_bytes: int = MIB) -> MemoryShare:
        """Let others hold all except `free_bytes` and the reserved bytes."""
        share = MemoryShare(self.account, self.account.bytes_max)
        self.leave(share, free_bytes)
        return share

    def leave(self, others: MemoryShare, free_bytes: int) -> None:
        """Let others hold all except `free_bytes` and the reserved bytes."""
        others.count_granted(0)
        reserved_bytes = self.account.queue.reserved_for(room_queue.RoomTicket(None))
        free_bytes += reserved_bytes
        others.count_granted(self.account.bytes_max - self.account.bytes - free_bytes)


def test_a_large_message_waits_for_room_and_gets_it_when_there_is_some() -> None:
    world = World()
    others, client = world.fill(), world.client()
    waits = client.begin()
    assert (client.granted(), client.wakes) == ([], 0)
    world.account.queue.grant_room()
    assert client.granted() == [], "there is no room yet"
    others.count_granted(0)
    world.account.queue.grant_room()
    assert (client.granted(), client.wakes) == ([waits], 1)
    assert world.hits == {}
    rest = bytes(LARGE_BYTES - 100)
    events = client.connection.receive(
        b"".join(peer.data(waits, rest[at : at + 16_384]) for at in range(0, len(rest), 16_384)),
        0.0,
    )
    assert [type(one) for one in events] == [MessageReceived]


def test_on_room_is_called_only_while_a_message_waits() -> None:
    world = World()
    calls: list[None] = []
    world.account.queue.on_room = lambda: calls.append(None)
    others, client = world.fill(), world.client()
    assert not calls, "no message waits"
    client.begin()
    del calls[:]
    others.count_granted(0)
    assert calls


def test_connections_take_turns_independent_of_their_waiting_messages() -> None:
    world = World()
    others = world.fill()
    many, one = world.client(), world.client()
    first, second, _ = (many.begin() for _ in range(3))
    only = one.begin()
    # Room for one message at a time.
    world.leave(others, 5 * LARGE_BYTES // 2)
    order: list[tuple[Client, int]] = []
    for _ in range(3):
        world.account.queue.grant_room()
        order += [(many, stream_id) for stream_id in many.granted()]
        order += [(one, stream_id) for stream_id in one.granted()]
        client, stream_id = order[-1]
        client.connection.receive(peer.rst_stream(stream_id), 0.0)
    assert order == [(many, first), (one, only), (many, second)]


def test_a_later_message_does_not_overtake_a_waiting_one() -> None:
    world = World()
    others, before, later = world.fill(), world.client(), world.client()
    waits = before.begin()
    others.count_granted(0)
    comes = later.begin()
    assert later.granted() == [], "there is room, and an earlier message waits for it"
    world.account.queue.grant_room()
    assert (before.granted(), later.granted()) == ([waits], [comes])


def test_another_address_does_not_wait_behind_one_with_a_full_share() -> None:
    world = World(128 * MIB)
    crowded = AddressShare()
    clients = [world.client(crowded) for _ in range(8)]
    for _ in range(8):
        for client in clients:
            client.begin()
    granted = sum(len(client.granted()) for client in clients)
    assert 0 < granted < 64
    assert crowded.bytes < world.account.bytes_max // 2
    other = world.client(AddressShare())
    assert [other.begin()] == other.granted()
    world.account.queue.grant_room()
    assert not any(client.granted() for client in clients)


def test_waiting_and_arriving_messages_leave_room_for_small_calls() -> None:
    """A message that took the last room would cause rejections of clients that hold nothing."""
    world = World()
    address = AddressShare()
    clients = [world.client(address) for _ in range(32)]
    for _ in range(4):
        for client in clients:
            client.begin()
    assert world.hits == {}
    small = world.client(address)
    for _ in range(100):
        small.begin(begun=grpc_message(bytes(200)))
    assert world.hits == {}


def test_a_granted_message_arrives_even_if_the_room_is_used_up() -> None:
    world = World()
    client = world.client()
    comes = client.begin()
    assert client.granted() == [comes]
    MemoryShare(world.account, 0).count_granted(world.account.bytes_max)
    assert client.connection.receive(peer.data(comes, bytes(16_000)), 0.0) == []
    assert world.hits == {}


def test_a_connection_with_too_much_memory_is_skipped() -> None:
    world = World()
    full, other = world.client(), world.client()
    holds = full.begin(begun=b"")
    assert full.connection.memory.hold(full.connection._calls[holds], 12 * MIB)
    world.fill(free_bytes=13 * MIB)
    full.begin()
    waits = other.begin()
    world.account.queue.grant_room()
    assert (full.granted(), other.granted()) == ([], [waits])


@pytest.mark.parametrize(("timeout", "wait_s"), [("", ROOM_WAIT_S_MAX), ("3S", 1.5)])
def test_a_call_that_waits_too_long_is_rejected_and_holds_nothing(
    timeout: str, wait_s: float
) -> None:
    world = World()
    world.fill()
    client = world.client()
    waits = client.begin(now_s=100.0, timeout=timeout)
    assert client.connection.check(100.0 + wait_s) == []
    [ended] = client.connection.check(100.1 + wait_s)
    assert isinstance(ended, CallEnded)
    client.granted()
    assert peer.content(client.frames, waits) == grpc_message(b"no room")
    assert fields_of(peer.of(frames.HEADERS, client.frames)[-1].payload)["grpc-status"] == "0"
    assert world.hits == {Limit.MEMORY: 1}
    assert (client.connection.share.bytes, world.account.queue.bytes) == (0, 0)


def test_a_cancelled_stream_leaves_the_room_queue() -> None:
    world = World()
    others, client = world.fill(), world.client()
    cancelled, waits = client.begin(), client.begin()
    client.connection.receive(peer.rst_stream(cancelled), 0.0)
    lost = world.client()
    lost.begin()
    lost.connection.close(frames.ErrorCode.CANCEL, "lost")
    others.count_granted(0)
    world.account.queue.grant_room()
    assert client.granted() == [waits]
    assert world.account.queue.bytes == 0
    assert not world.account.queue._addresses


def test_the_waiting_messages_are_limited_and_an_address_leaves_as_much_for_others() -> None:
    """Each waiting message holds a window, and together they hold three quarters of the account."""
    world = World()
    world.fill(free_bytes=16 * MIB)
    held_bytes = CALL_BYTES + Limits().stream_window_bytes
    counts = []
    for address in (AddressShare(), AddressShare()):
        clients = [world.client(address) for _ in range(50)]
        count = 0
        while not world.hits:
            clients[count % 50].begin(begun=grpc_message(b"x", length=(16 << 20) - 5))
            count += 1
        world.hits.clear()
        assert not any(client.granted() for client in clients)
        counts.append(count - 1)
    most = world.account.bytes_max * 3 // 4 // held_bytes
    # For the last message of each address, as much remained as its address then held.
    assert counts == [(most + 1) // 2, (most - counts[0] + 1) // 2]
    assert world.account.queue.bytes == sum(counts) * held_bytes


def test_waiting_messages_leave_their_address_room_for_granted_and_small_calls() -> None:
    world = World()
    address = AddressShare()
    clients = [world.client(address) for _ in range(64)]
    others = world.fill(free_bytes=7 * MIB)
    waiting = [(client, client.begin()) for client in clients for _ in range(5)]
    others.count_granted(0)
    for client, stream_id in waiting:
        more = b"".join(peer.data(stream_id, bytes(16_000)) for _ in range(4))
        client.connection.receive(more, 0.0)
    assert not any(client.granted() for client in clients)
    world.account.queue.grant_room()
    assert sum(len(client.granted()) for client in clients) >= 4
    assert address.bytes < world.account.bytes_max * 11 // 16
    world.client(address).begin(begun=grpc_message(bytes(200)))
    assert world.hits == {}


def test_a_turn_examines_a_limited_number_of_addresses_and_connections() -> None:
    world = World()
    looked: list[int] = []

    class UnusedRoom:
        is_short_of_room = False

        def grant_next(self) -> bool:
            looked.append(1)
            return False

    for _ in range(100):
        address = AddressShare()
        for _ in range(2):
            assert world.account.queue.join(room_queue.RoomTicket(address), UnusedRoom(), 1)
    crowded = AddressShare()
    world.account.queue.grant_room()
    assert len(looked) == 2 * room_queue.ADDRESSES_PER_TURN
    alone = room_queue.RoomQueue(MIB)
    for _ in range(100):
        assert alone.join(room_queue.RoomTicket(crowded), UnusedRoom(), 1)
    looked.clear()
    alone.grant_room()
    assert len(looked) == room_queue.TICKETS_PER_TURN


class QueuedConnection:
    """A connection that waits in a queue and may have room or not."""

    is_short_of_room = False

    def __init__(self, queue: room_queue.RoomQueue, address: AddressShare, *, has_budget: bool):
        self._queue = queue
        self._has_budget = has_budget
        self._ticket = room_queue.RoomTicket(address)
        self.granted_count = 0
        assert queue.join(self._ticket, self, 1)

    def grant_next(self) -> bool:
        if self._has_budget:
            self.granted_count += 1
            self._queue.withdraw(self._ticket, 1)
        return self._has_budget


class FailingConnection(QueuedConnection):
    """A connection that fails each time."""

    def grant_next(self) -> bool:
        raise ValueError("broken")


def offers_until_quiet(queue: room_queue.RoomQueue) -> int:
    """Grant room as the shell does, once per scheduled turn; return the number of turns."""
    asked: list[None] = []
    queue.on_room = lambda: asked.append(None)
    queue.recheck()
    count = 0
    while asked and count < 1_000:
        asked.clear()
        queue.grant_room()
        count += 1
    return count


def test_connections_behind_many_full_ones_get_their_turn() -> None:
    queue, address = room_queue.RoomQueue(MIB), AddressShare()
    for _ in range(3 * room_queue.TICKETS_PER_TURN):
        QueuedConnection(queue, address, has_budget=False)
    last = QueuedConnection(queue, address, has_budget=True)
    offers_until_quiet(queue)
    assert last.granted_count == 1


def test_without_room_each_connection_is_examined_once() -> None:
    queue, address = room_queue.RoomQueue(MIB), AddressShare()
    for _ in range(3 * room_queue.TICKETS_PER_TURN):
        QueuedConnection(queue, address, has_budget=False)
    assert offers_until_quiet(queue) == 3


def test_a_failing_connection_does_not_take_the_turn_of_another() -> None:
    queue, address = room_queue.RoomQueue(MIB), AddressShare()
    FailingConnection(queue, address, has_budget=True)
    waits = [QueuedConnection(queue, AddressShare(), has_budget=True) for _ in range(3)]
    with pytest.raises(ValueError, match="broken"):
        queue.grant_room()
    assert [one.granted_count for one in waits] == [1, 1, 1]
    behind = QueuedConnection(queue, address, has_budget=True)
    for _ in range(2):
        with contextlib.suppress(ValueError):
            queue.grant_room()
    assert behind.granted_count == 1
