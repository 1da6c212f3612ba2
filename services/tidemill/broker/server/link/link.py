"""BrokerLink: the stream of one proxy.

A frame in is work of the next round. Whatever that round has for the link is one `Replies`, and
goes out as one frame when the round is committed. A link whose proxy does not read its replies is
not read either, so the memory for it is bounded by `UNSENT_BYTES_MAX` and the replies of the rounds
in flight, which `UNSENT_POPS_BYTES_MAX` bounds.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from google.protobuf.message import DecodeError

from tidemill.broker.engine.layout.numbers import GroupId, TopicId
from tidemill.broker.engine.pop.readiness import NOTHING_READY
from tidemill.broker.server.link import commands
from tidemill.broker.server.link.commands import COMMANDS, NOTIFICATION, POP
from tidemill.broker.server.link.replies import Replies
from tidemill.broker.server.round.long_polling import Notification, Pop
from tidemill.broker.server.round.round_log import tell_frame
from tidemill.broker.server.wire.config_frames import changed_config, complete_config
from tidemill.common.errors import Overloaded, ServiceError
from tidemill.common.log import is_debug
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.grpc.status import RpcCode, RpcError

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.metadata.catalog import ConfigChanges
    from tidemill.broker.metrics import Traffic
    from tidemill.broker.server.link.commands import Result
    from tidemill.broker.server.round.long_polling import Key
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn
    from tidemill.common.replica_group import ReplicationView
    from tidemill.transport.aio.call import RpcCall

UNSENT_BYTES_MAX = 16 << 20  # replies that a proxy has not read; beyond it its frames wait
# With what rounds in flight have popped; beyond it pops wait, parked as if nothing were there. A
# frame may ask for hundreds, and messages that arrive may answer as many that are parked, of up to
# POP_BYTES_MAX each: whatever else the link carries waits behind them, some 20 ms.
UNSENT_POPS_BYTES_MAX = 4 << 20
# Hand-overs that are noted in one slice: a millisecond where each has to be recorded.
SLICE_HANDED_OVER = 256
REPLY_FRAME_BYTES = 256 << 10  # a reply frame is closed when it passes this


class Outlet(Protocol):
    """Where the replies go."""

    @property
    def unsent_bytes(self) -> int:
        """What waits for the proxy to read."""

    def write(self, message: bytes) -> None:
        """Send without waiting."""

    async def drained(self) -> None:
        """Wait until nothing is unsent, or the proxy is gone."""


class Link:
    """One proxy's stream, as the rounds see it."""

    def __init__(
        self,
        rounds: Rounds,
        traffic: Traffic,
        outlet: Outlet,
        *,
        auto_create: bool,
        newest: dict[bytes, Link],
    ) -> None:
        """Serve a stream; `newest` has the newest link of each process of a proxy."""
        self._rounds = rounds
        self._outlet = outlet
        self.traffic = traffic
        self._auto_create = auto_create
        self._popped_bytes = 0  # for answers that have not left
        # What was popped in frames that were written: it is hidden for nobody while it is unsent.
        self._unsent: deque[tuple[int, Sequence[Result]]] = deque()
        self._written_bytes = 0  # where the last of them ends
        # Which pops of this link wait for room on it: no more than are parked.
        self._crowded: dict[Key, set[int]] = {}
        self._is_crowded = asyncio.Event()
        self.arrived_s = 0.0  # of the frame that is being applied
        self.asked_again: frozenset[int] = frozenset()  # of its requests
        self.is_closed = False
        self._newest = newest
        self._process_id = b""  # of who opened the stream
        self.stream_number = 0  # which of that process it is
        self.epoch = 0  # of this master, where it has replicas
        self._is_debug = is_debug()

    @property
    def engine(self) -> Engine:
        """The engine, for reading what has been popped."""
        return self._rounds.engine

    @property
    def replies(self) -> Replies:
        """What the round under way has for this link."""
        effects = self._rounds.turn.effects
        replies = effects.get(self)
        if replies is None:
            replies = effects[self] = Replies(self)
        assert isinstance(replies, Replies), "a link has replies, and nothing else"
        return replies

    # ------------------------------------------------------------ the stream

    async def read(self, requests: AsyncIterator[bytes]) -> None:
        """Submit each frame, to the end of the proxy's side.

        Raises RpcError(INVALID_ARGUMENT) for one that makes no sense.
        """
        await self._rounds.submit(_Hello(self))
        async for request in requests:
            frame = _parse(request)
            if self._outlet.unsent_bytes >= UNSENT_BYTES_MAX:
                await self._outlet.drained()
            await self._rounds.submit(_Frame(self, frame, len(request)))

    async def offer_room(self) -> None:
        """Let pops that wait for room on this link have it when there is some; never returns."""
        while True:
            await self._is_crowded.wait()
            # Until what has been popped is written, and then until it is read.
            await self._rounds.settle()
            await self._outlet.drained()
            self._is_crowded.clear()
            self._rounds.put(_Room(self))

    def wake_crowded(self, turn: Turn) -> Iterator[None]:
        """Pop again where pops wait for room, the oldest first; who fills it is the last then."""
        crowded, self._crowded = self._crowded, {}
        yield from turn.polls.wake((), crowded)
        first = next(iter(crowded), None)
        if first in self._crowded:
            self._crowded[first] = self._crowded.pop(first)

    async def flush(self) -> None:
        """Wait until everything submitted so far is answered and written."""
        await self._rounds.settle()
        await self._outlet.drained()

    def close(self) -> None:
        """Send nothing more: the stream has ended, or the proxy has a newer one."""
        if self.is_closed:
            return
        self.is_closed = True
        # What has not left goes nowhere; of what has, nobody knows here.
        self._forget_sent()
        unsent = [result for _, results in self._unsent for result in results]
        self._unsent.clear()
        if unsent:
            self._rounds.put(_GiveBack(unsent))

    def leave(self, turn: Turn) -> None:
        """Let nothing wait here for a stream that has ended."""
        turn.polls.forget(self)
        self._rounds.detach(self)
        if self._newest.get(self._process_id) is self:
            del self._newest[self._process_id]

    # ------------------------------------------------------------ in a round

    def greet(self, turn: Turn) -> None:
        """Send the complete configuration, and from then on what changes."""
        self.replies.configs = [complete_config(turn.engine, auto_create=self._auto_create)]
        self._rounds.attach(self)

    def add_config_changes(self, changes: ConfigChanges) -> None:
        """Keep the changes among what the round has for this link."""
        self.replies.configs.append(changed_config(changes))

    def apply(self, frame: pb.RequestFrame, arrived_s: float, turn: Turn) -> Iterator[None]:
        """Call the engine for each request of `frame`, which arrived at `arrived_s`."""
        if frame.process_id:
            self._introduce(frame, turn)
            return
        if self.is_closed:
            # Also its appends: their sender learns nothing, and may repeat them elsewhere.
            return
        replies, self.arrived_s = self.replies, arrived_s
        replies.answered_sequence = frame.sequence
        self.asked_again = frozenset(frame.asked_again)
        replies.arrived_s = min(replies.arrived_s, arrived_s)
        if frame.alive_clients:
            turn.engine.clients_alive(frame.alive_clients, monotonic_ms=turn.monotonic_ms)
            yield
        requested = {field.name: requests for field, requests in frame.ListFields()}
        if self._is_debug:
            tell_frame(frame, requested)
        for command in COMMANDS:
            requests = requested.get(command.request_field)
            if requests is not None:
                yield from command.apply(self, replies.of(command), requests, turn)
        if frame.HasField("handed_over"):
            told = zip(frame.handed_over.slots, frame.handed_over.delivery_ids, strict=True)
            while part := list(islice(told, SLICE_HANDED_OVER)):
                turn.engine.handed_over(part, now_ms=turn.now_ms)
                yield
        for request_id in frame.cancelled_polls:
            turn.polls.cancel(self, request_id)
        if frame.ended_clients:
            # Behind its last acks, which may be in the same frame.
            turn.engine.clients_ended(frame.ended_clients)

    def _introduce(self, frame: pb.RequestFrame, turn: Turn) -> None:
        """Learn who opened the stream, and let the newest of a process be its only one.

        What a proxy had on its way in a stream that it lost, it has asked again in the next one.
        """
        self._process_id, self.stream_number = frame.process_id, frame.stream_number
        other = self._newest.get(frame.process_id, self)
        older, newer = sorted((other, self), key=lambda link: link.stream_number)
        self._newest[frame.process_id] = newer
        if older is not newer:
            older.close()
            turn.polls.forget(older)

    # ------------------------------------------------------------ pops

    @property
    def is_full(self) -> bool:
        """Whether pops have to wait until the proxy has read more.

        Also where others wait for that already: those who come would take what room there is.
        """
        if self._crowded:
            return True
        return self._outlet.unsent_bytes + self._popped_bytes >= UNSENT_POPS_BYTES_MAX

    def pop_again(self, pop: Pop) -> bool:
        """Pop, and keep the answer until the round is committed.

        False: nothing was found, or the link is full, and `offer_room` sees to it.
        """
        if self.is_closed:
            return True  # Its goodbye is queued: nothing may be hidden for nobody.
        if self.is_full:
            self._crowded.setdefault((pop.group_id, pop.topic_id), set()).add(pop.request_id)
            self._is_crowded.set()
            return False
        try:
            batches = commands.take(pop, self._rounds.turn)
        except ServiceError as error:
            self.replies.failures.append((pop.request_id, error))
            return True
        if batches:
            if pop.renews:
                self._rounds.turn.engine.on_their_way(batches)
            replies, size = self.replies, sum([batch.size_bytes for batch in batches])
            replies.of(POP).append((pop, batches))
            replies.pop_bytes += size
            self._popped_bytes += size
        return bool(batches)

    def notify(self, notification: Notification) -> bool:
        """Look, and keep the answer until the round is committed; False: nothing is ready."""
        if self.is_closed:
            return True  # Its goodbye is queued.
        turn = self._rounds.turn
        try:
            ready = turn.engine.ready_count(
                GroupId(notification.group_id),
                TopicId(notification.topic_id),
                tags=notification.tags,
                now_ms=turn.now_ms,
            )
        except ServiceError as error:
            self.replies.failures.append((notification.request_id, error))
            return True
        if ready.ready_count:
            self.replies.of(NOTIFICATION).append((notification, ready))
        return bool(ready.ready_count)

    def answer_empty(self, request: Pop | Notification) -> None:
        """Keep an empty answer until the round is committed.

        Of a pop that had no room on the link nobody knows whether anything is there.
        """
        if isinstance(request, Notification):
            self.replies.of(NOTIFICATION).append((request, NOTHING_READY))
            return
        self._answer_empty_pop(request)

    def _answer_empty_pop(self, pop: Pop) -> None:
        if pop.request_id in self._crowded.get((pop.group_id, pop.topic_id), ()):
            error = Overloaded("the proxy reads too slowly; poll again after a pause")
            self.replies.failures.append((pop.request_id, error))
            return
        self.replies.of(POP).append((pop, []))

    # ------------------------------------------------------------ when a round is committed

    def send(self, replies: Replies) -> Iterator[None]:
        """Build and send the frames of a round that is committed."""
        sent = 0
        for frame in replies.frames(REPLY_FRAME_BYTES):
            if self.is_closed:
                if unsent := replies.of(POP)[sent:]:
                    self._rounds.put(_GiveBack(unsent))
                break
            if encoded := frame.SerializeToString():
                self._outlet.write(encoded)
                self._written_bytes += len(encoded)
            if frame.pops:
                results = replies.of(POP)[sent : sent + len(frame.pops)]
                self._unsent.append((self._written_bytes, results))
                self._forget_sent()
                sent += len(frame.pops)
            yield
        self._popped_bytes -= replies.pop_bytes

    def _forget_sent(self) -> None:
        """Forget what was popped in frames that have left."""
        unsent, sent_bytes = self._unsent, self._written_bytes - self._outlet.unsent_bytes
        while unsent and unsent[0][0] <= sent_bytes:
            unsent.popleft()


class _Frame:
    """One frame as work."""

    __slots__ = ("_arrived_s", "_frame", "_link", "size_bytes")

    def __init__(self, link: Link, frame: pb.RequestFrame, size_bytes: int) -> None:
        self._link = link
        self._frame = frame
        self._arrived_s = time.monotonic()
        self.size_bytes = size_bytes

    def apply(self, turn: Turn) -> Iterator[None]:
        return self._link.apply(self._frame, self._arrived_s, turn)


class _Hello:
    """A new link."""

    size_bytes = 0

    def __init__(self, link: Link) -> None:
        self._link = link

    def apply(self, turn: Turn) -> Iterator[None]:
        self._link.greet(turn)
        yield


class _Room:
    """A link that was full and has room again."""

    size_bytes = 0

    def __init__(self, link: Link) -> None:
        self._link = link

    def apply(self, turn: Turn) -> Iterator[None]:
        return self._link.wake_crowded(turn)


class _Goodbye:
    """A link that closed. In a round, because rounds give way in their middle."""

    size_bytes = 0

    def __init__(self, link: Link) -> None:
        self._link = link

    def apply(self, turn: Turn) -> Iterator[None]:
        self._link.leave(turn)
        yield


class _GiveBack:
    """What was popped for a proxy that left before the round was committed."""

    size_bytes = 0

    def __init__(self, popped: list[Result]) -> None:
        self._popped = popped

    def apply(self, turn: Turn) -> Iterator[None]:
        for pop, batches in self._popped:
            commands.give_back(pop, batches, turn)
            yield


def _parse(request: bytes) -> pb.RequestFrame:
    try:
        frame = pb.RequestFrame.FromString(request)
    except DecodeError:
        raise RpcError(RpcCode.INVALID_ARGUMENT, "this is no RequestFrame") from None
    told = frame.handed_over
    if not columns_agree(frame) or len(told.slots) != len(told.delivery_ids):
        raise RpcError(RpcCode.INVALID_ARGUMENT, "a batch has columns of different lengths")
    return frame


def columns_agree(frame: pb.RequestFrame) -> bool:
    """Return whether the columns of each batch have one length, as from any proxy of ours."""
    for command in COMMANDS:
        if command.columns is not None:
            columns = command.columns(getattr(frame, command.request_field))
            if len(set(map(len, columns))) > 1:
                return False
    return True


def _not_master(view: ReplicationView | None) -> pb.NotMaster:
    if view is None:
        return pb.NotMaster()
    address = "" if view.master is None else view.address_of(view.master.replica_id)
    return pb.NotMaster(epoch=view.epoch, version=view.version, address=address)


class BrokerLinkService:
    """The gRPC face of the links."""

    def __init__(
        self,
        rounds: Rounds,
        traffic: Traffic,
        *,
        auto_create: bool,
        view: Callable[[], ReplicationView | None] = lambda: None,
    ) -> None:
        """`view` says what is known of the replicas of this broker group."""
        self._rounds = rounds
        self._traffic = traffic
        self._auto_create = auto_create
        self._view = view
        self._newest: dict[bytes, Link] = {}

    async def exchange(self, call: RpcCall) -> None:
        """Serve one proxy until it leaves, or the broker stops and has answered all it asked.

        A replica that is not the master says who is, as far as it knows.
        """
        if not self._rounds.is_master:
            frame = pb.ReplyFrame(not_master=_not_master(self._view()))
            await call.send(frame.SerializeToString())
            return
        link = Link(
            self._rounds, self._traffic, call, auto_create=self._auto_create, newest=self._newest
        )
        view = self._view()
        link.epoch = 0 if view is None else view.epoch
        offering = asyncio.create_task(link.offer_room(), name="offer room")
        try:
            await link.read(call)
            await link.flush()
        finally:
            offering.cancel()
            link.close()
            self._rounds.put(_Goodbye(link))
