"""For any bytes of a peer and any cuts: no exception, exact accounts, ended calls."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.clients import http2_peer as peer
from tests.support.clients.streams import half_close, stream_count
from tests.support.clients.transport_trial import LIMITS, End, random_frames, run_trial
from tests.support.seeds import examples
from tidemill.transport.grpc.client_connection import (
    ClientCall,
    ClientConnection,
    ResponseEnded,
    ResponseMessage,
)
from tidemill.transport.grpc.memory import MemoryAccount
from tidemill.transport.grpc.server_call import (
    CallEnded,
    CallStarted,
    MessageReceived,
    RequestsEnded,
    ServerCall,
)
from tidemill.transport.grpc.server_connection import ServerConnection
from tidemill.transport.grpc.status import RpcCode
from tidemill.transport.http2 import frames
from tidemill.transport.http2.connection import Connection, Role
from tidemill.transport.http2.events import DataReceived, Event
from tidemill.transport.http2.limits import Limits
from tidemill.transport.http2.stream import Stream

EXAMPLES = examples(100)
SEEDS = st.integers(min_value=0, max_value=2**32)

quickly = settings(max_examples=EXAMPLES, deadline=None)


@quickly
@given(end=st.sampled_from(End), raw=st.binary(max_size=300), seed=SEEDS, greets=st.booleans())
def test_no_bytes_do_any_harm(end: End, raw: bytes, seed: int, greets: bool) -> None:
    is_server = end in (End.HTTP_SERVER, End.GRPC_SERVER)
    greeting = (frames.PREFACE if is_server else b"") + peer.settings() if greets else b""
    run_trial(end, peer.pieces(greeting + raw, Random(seed)))


@settings(max_examples=5 * EXAMPLES, deadline=None)
@given(end=st.sampled_from(End), seed=SEEDS, count=st.integers(1, 80))
def test_no_frames_do_any_harm(end: End, seed: int, count: int) -> None:
    random = Random(seed)
    found = list(random_frames(end, random, count))
    if random.random() < 0.5:
        found = list(peer.pieces(b"".join(found), random, size_max=200))
    run_trial(end, found)


@quickly
@given(role=st.sampled_from(Role), seed=SEEDS, count=st.integers(1, 60))
def test_events_do_not_depend_on_the_cuts(role: Role, seed: int, count: int) -> None:
    random = Random(seed)
    end = End.HTTP_SERVER if role is Role.SERVER else End.HTTP_CLIENT
    raw = b"".join(random_frames(end, random, count))
    whole = meaning(role, [raw])
    assert meaning(role, list(peer.pieces(raw, random, size_max=300))) == whole


def meaning(role: Role, pieces: list[bytes]) -> tuple[list[object], bytes]:
    """Return the events of the bytes, with joined content, and the output."""
    connection = Connection(role, LIMITS, now_s=0.0)
    if role is Role.CLIENT:
        for _ in range(5):
            stream = connection.open_stream(b"")
            assert stream is not None
            connection.send_data(stream, bytes(1_000))
    events: list[Event] = []
    for piece in pieces:
        events += connection.receive(piece, 0.0)
    return [described(event) for event in events], connection.take_output()


def described(event: Event) -> object:
    if isinstance(event, DataReceived):
        return ("data", event.stream.id, event.data, event.is_last)
    return tuple(part.id if isinstance(part, Stream) else part for part in (type(event), *event))


# ---------------------------------------------------------------- our client and our server


@dataclass
class Plan:
    """One call: its requests, its end, and the client's view of it."""

    requests: list[bytes]
    code: RpcCode
    is_unary: bool
    cancel_after: int | None  # messages received
    received: list[bytes] = field(default_factory=list)
    served: list[bytes] = field(default_factory=list)
    ended: list[tuple[RpcCode, str]] = field(default_factory=list)
    is_cancelled: bool = False


class World:
    """A client and a server with a pipe between them that cuts and delays."""

    def __init__(self, random: Random) -> None:
        self._random = random
        limits = Limits(
            stream_window_bytes=random.choice((60, 300, 65_535)),
            large_messages_bytes=3_000,
            streams_max=random.choice((2, 5, 100)),
            control_burst=1 << 20,
            resets_burst=1 << 20,
            empty_data_burst=1 << 20,
            keepalive_period_s=1e9,
            stall_timeout_s=1e9,
        )
        self.client = ClientConnection("a", limits, message_bytes_max=2_000, now_s=0.0)
        account = MemoryAccount(1 << 30)
        self._queue = account.queue
        self._queue.on_room = self._want_offer
        self._wants_offer = False
        self.server = ServerConnection(limits, message_bytes_max=2_000, now_s=0.0, account=account)
        # A window below the protocol's default is valid after the client has received it.
        self.server.receive(self.client.http.take_output(), 0.0)
        self.client.receive(self.server.http.take_output(), 0.0)
        self._pipes: tuple[deque[bytes], deque[bytes]] = (deque(), deque())
        self._of_call: dict[int, Plan] = {}
        self._calls: dict[int, ServerCall] = {}
        self.waiting: list[Plan] = []
        self._sending: list[tuple[ClientCall, Plan, deque[bytes]]] = []

    def step(self) -> bool:
        """Let one thing happen; return False if nothing is left."""
        moves = [self._open] * bool(self.waiting) + [self._send] * bool(self._sending)
        moves += [self._to_server] * bool(self._pipes[0]) + [self._to_client] * bool(self._pipes[1])
        moves += [self._offer] * self._wants_offer
        if not moves:
            return False
        is_stuck = self._random.choice(moves)() and len(moves) == 1
        self._flush()
        peer.check_accounts(self.client.http)
        peer.check_accounts(self.server.http)
        return not is_stuck

    def _want_offer(self) -> None:
        self._wants_offer = True

    def _offer(self) -> bool:
        """Grant the free room, as a server does in its next turn."""
        self._wants_offer = False
        self._queue.grant_room()
        return False

    def _flush(self) -> None:
        for http, pipe in ((self.client.http, self._pipes[0]), (self.server.http, self._pipes[1])):
            pipe.extend(peer.pieces(http.take_output(), self._random, size_max=500))

    def _open(self) -> bool:
        """Begin a call; return whether the server accepts no more."""
        if stream_count(self.client.http) >= self.client.http._settings.streams_max:
            return True
        plan = self.waiting.pop()
        call = self.client.open("/model/Call")
        self._of_call[call.stream.id] = plan
        self._sending.append((call, plan, deque(plan.requests)))
        return False

    def _send(self) -> bool:
        index = self._random.randrange(len(self._sending))
        call, _, left = self._sending[index]
        if left:
            self.client.send(call, left.popleft())
        else:
            half_close(self.client, call)
            del self._sending[index]
        return False

    def _to_server(self) -> bool:
        for event in self.server.receive(self._pipes[0].popleft(), 0.0):
            if isinstance(event, CallStarted):
                self._calls[event.call.stream.id] = event.call
                if not self._of_call[event.call.stream.id].is_unary:
                    event.call.has_request_stream = True
                    self.server.start(event.call)
            elif isinstance(event, MessageReceived):
                self._serve(event.call, event.message, event.wire_bytes)
                if event.is_last:
                    self._finish(event.call)
            elif isinstance(event, RequestsEnded):
                self._finish(event.call)
            else:
                assert isinstance(event, CallEnded) is self._of_call_cancelled(event), event
        return False

    def _of_call_cancelled(self, event: object) -> bool:
        return isinstance(event, CallEnded) and self._of_call[event.call.stream.id].is_cancelled

    def _serve(self, call: ServerCall, message: bytes, wire_bytes: int) -> None:
        plan = self._of_call[call.stream.id]
        plan.served.append(message)
        if not plan.is_unary:
            self.server.consume(call, wire_bytes)
            self.server.send(call, [message])

    def _finish(self, call: ServerCall) -> None:
        plan = self._of_call[call.stream.id]
        if plan.is_unary and plan.code is RpcCode.OK:
            self.server.respond(call, plan.served[0])
        else:
            self.server.finish(call, plan.code, "grün")

    def _to_client(self) -> bool:
        for event in self.client.receive(self._pipes[1].popleft(), 0.0):
            assert isinstance(event, (ResponseMessage, ResponseEnded)) or not hasattr(event, "code")
            if isinstance(event, ResponseEnded):
                plan = self._of_call[event.call.stream.id]
                assert not plan.is_cancelled or plan.ended == []
                plan.ended.append((event.code, event.message))
            elif isinstance(event, ResponseMessage):
                plan = self._of_call[event.call.stream.id]
                if plan.is_cancelled:
                    continue  # It was in the same bytes as the reason of our cancel.
                plan.received.append(event.message)
                self.client.consume(event.call, event.wire_bytes)
                if len(plan.received) == plan.cancel_after:
                    plan.is_cancelled = True
                    self.client.cancel(event.call)
        return False


@pytest.mark.parametrize("part", range(4))
@quickly
@given(seed=SEEDS)
def test_every_call_ends_once_with_all_its_messages(part: int, seed: int) -> None:
    random = Random(f"{part} {seed}")
    world = World(random)
    plans = []
    for _ in range(random.randint(1, 8)):
        is_unary = random.random() < 0.4
        count = 1 if is_unary else random.randint(0, 6)
        sizes = [random.choice((0, 5, 55, 300, 1_995, 2_000)) for _ in range(count)]
        cancels = random.random() < 0.15 and not is_unary and count > 0
        plans.append(
            Plan(
                requests=[random.randbytes(size) for size in sizes],
                code=RpcCode(random.randint(0, 16)),
                is_unary=is_unary,
                cancel_after=random.randint(1, count) if cancels else None,
            )
        )
    world.waiting = list(plans)
    while world.step():
        pass
    for plan in plans:
        if plan.is_cancelled:
            assert plan.received == plan.requests[: plan.cancel_after]
            assert plan.ended in ([], [(plan.code, "" if plan.code is RpcCode.OK else "grün")])
            continue
        assert plan.served == plan.requests
        assert plan.ended == [(plan.code, "" if plan.code is RpcCode.OK else "grün")]
        is_answered = not plan.is_unary or plan.code is RpcCode.OK
        assert plan.received == (plan.requests if is_answered else [])
    assert stream_count(world.client.http) == stream_count(world.server.http) == 0
    assert world.server.call_count == 0
    assert (
        world.server.http._incoming.budget_left == world.client.http._incoming.budget_left == 3_000
    )
