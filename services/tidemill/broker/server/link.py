"""BrokerLink: the stream of one proxy.

A frame in is work of the next round; whatever that round has for the link goes out as one frame. A
link whose proxy does not read its replies is not read either, so the memory for it is bounded by
`UNSENT_BYTES_MAX` and one round's replies, which `UNSENT_POPS_BYTES_MAX` bounds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Protocol

from google.protobuf.message import DecodeError

from tidemill.broker.engine.pop.consumption import Delivery
from tidemill.broker.server import config_log
from tidemill.broker.server.config_frames import changed_config, complete_config
from tidemill.broker.server.long_polling import Pop
from tidemill.broker.server.replies import Replies
from tidemill.common.errors import Overloaded, ServiceError
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.grpc.status import RpcCode, RpcError

if TYPE_CHECKING:
    from tidemill.broker.engine.metadata.catalog import ConfigChanges
    from tidemill.broker.metrics import Traffic
    from tidemill.broker.server.rounds import Rounds, Turn
    from tidemill.transport.aio.call import RpcCall

UNSENT_BYTES_MAX = 16 << 20  # replies that a proxy has not read; beyond it its frames wait
# With what the round has popped already; beyond it pops are refused. A frame may ask for hundreds,
# and messages that arrive may answer as many that are parked, of up to POP_BYTES_MAX each.
UNSENT_POPS_BYTES_MAX = 256 << 20
REPLY_FRAME_BYTES = 256 << 10  # a reply frame is closed when it passes this
GIVE_BACK_MS = 1000  # invisible duration of messages that nobody has got
SLICE_REQUESTS = 64  # applied between two looks at the time; under 1 ms


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
        self, rounds: Rounds, traffic: Traffic, outlet: Outlet, *, auto_create: bool
    ) -> None:
        self._rounds = rounds
        self._outlet = outlet
        self._traffic = traffic
        self._auto_create = auto_create
        self._replies = Replies()
        self._applied_sequence = 0
        self._arrived_s = 0.0  # of the frame that is being applied
        self.is_closed = False

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

    async def flush(self) -> None:
        """Wait until everything submitted so far is answered and written."""
        await self._rounds.settle()
        await self._outlet.drained()

    def close(self) -> None:
        """Send nothing more: the stream has ended."""
        self.is_closed = True

    # ------------------------------------------------------------ in a round

    def greet(self, turn: Turn) -> None:
        """Send the complete configuration, and from then on what changes."""
        self._replies.configs = [complete_config(turn.engine, auto_create=self._auto_create)]
        self._rounds.attach(self)
        turn.touch(self)

    def config_changed(self, changes: ConfigChanges) -> None:
        """Keep the changes for the end of the round."""
        self._replies.configs.append(changed_config(changes))

    def apply(self, frame: pb.RequestFrame, arrived_s: float, turn: Turn) -> Iterator[None]:
        """Call the engine for each request of `frame`, which arrived at `arrived_s`."""
        if self.is_closed:
            # Also its appends: their sender learns nothing, and may repeat them elsewhere.
            return
        turn.touch(self)
        self._applied_sequence, self._arrived_s = frame.sequence, arrived_s
        self._replies.arrived_s = min(self._replies.arrived_s, arrived_s)
        if frame.HasField("appends"):
            yield from self._apply_appends(frame.appends, turn)
        if frame.HasField("acks"):
            yield from self._apply_acks(frame.acks, turn)
        for change in frame.changes:
            self._apply_change(change, turn)
        for dead_letter in frame.dead_letters:
            self._apply_dead_letter(dead_letter, turn)
        for ensure in frame.ensures:
            self._apply_ensure(ensure, turn)
        for n, cancel in enumerate(frame.timer_cancels, 1):
            self._apply_timer_cancel(cancel, turn)
            if n % SLICE_REQUESTS == 0:
                yield
        for pop in frame.pops:
            self._apply_pop(pop, turn)
            yield
        for request_id in frame.cancelled_pops:
            turn.polls.cancel(self, request_id)

    def _apply_appends(self, appends: pb.AppendBatch, turn: Turn) -> Iterator[None]:
        replies, now_ms = self._replies, turn.now_ms
        send, appended = turn.engine.send, self._traffic.appended
        firing_ms = turn.firing_ms
        columns = zip(
            appends.request_ids, appends.topic_ids, appends.queue_ids, appends.crcs, appends.blobs,
            strict=True,
        )  # fmt: skip
        for n, (request_id, topic_id, queue_id, crc, blob) in enumerate(columns, 1):
            try:
                offset, due_at_ms = send(
                    topic_id, queue_id, blob, crc, now_ms=now_ms, firing_ms=firing_ms
                )
            except ServiceError as error:
                replies.failures.append((request_id, error))
            else:
                if due_at_ms:
                    replies.append_dues[len(replies.append_ids)] = due_at_ms
                replies.append_ids.append(request_id)
                replies.append_offsets.append(offset)
                appended(topic_id, blob)
            if n % SLICE_REQUESTS == 0:
                yield

    def _apply_acks(self, acks: pb.AckBatch, turn: Turn) -> Iterator[None]:
        replies, now_ms, ack = self._replies, turn.now_ms, turn.engine.ack
        columns = zip(
            acks.group_ids, acks.topic_ids, acks.slots, acks.delivery_ids, acks.indexes,
            acks.visible_at_ms, strict=True,
        )  # fmt: skip
        for n, (request_id, fields) in enumerate(zip(acks.request_ids, columns, strict=True), 1):
            try:
                result = ack(Delivery._make(fields), now_ms)
            except ServiceError as error:
                replies.failures.append((request_id, error))
            else:
                replies.ack_ids.append(request_id)
                replies.ack_results.append(result)
                self._traffic.acked(fields[1], fields[0], result)
            if n % SLICE_REQUESTS == 0:
                yield

    def _apply_change(self, change: pb.ChangeInvisibleRequest, turn: Turn) -> None:
        try:
            delivery = turn.engine.change_invisible(
                _delivery(change),
                invisible_duration_ms=change.invisible_duration_ms,
                suspend=change.suspend,
                now_ms=turn.now_ms,
            )
        except ServiceError as error:
            self._replies.failures.append((change.request_id, error))
        else:
            self._replies.changed.append((change.request_id, delivery))

    def _apply_dead_letter(self, request: pb.DeadLetterRequest, turn: Turn) -> None:
        try:
            turn.engine.dead_letter(_delivery(request), turn.now_ms)
        except ServiceError as error:
            self._replies.failures.append((request.request_id, error))
        else:
            self._replies.done.append(request.request_id)

    def _apply_ensure(self, request: pb.EnsureRequest, turn: Turn) -> None:
        catalog = turn.engine.catalog
        topic, group = catalog.find_topic(request.topic), catalog.find_group(request.group)
        try:
            turn.engine.administration.ensure(request.topic, request.group, turn.now_ms)
        except ServiceError as error:
            self._replies.failures.append((request.request_id, error))
        else:
            self._replies.ensured.append(request.request_id)
            if topic is None and (made := catalog.find_topic(request.topic)):
                config_log.topic_put(None, made, auto_create=True)
            if group is None and (joined := catalog.find_group(request.group)):
                config_log.group_put(None, joined, auto_create=True)

    def _apply_timer_cancel(self, request: pb.CancelTimerRequest, turn: Turn) -> None:
        try:
            turn.engine.timers.cancel(
                request.timer_id, topic_id=request.topic_id, now_ms=turn.now_ms
            )
        except ServiceError as error:
            self._replies.failures.append((request.request_id, error))
        else:
            self._replies.cancelled.append(request.request_id)

    # ------------------------------------------------------------ pops

    def _apply_pop(self, request: pb.PopRequest, turn: Turn) -> None:
        self._traffic.polled(request.topic_id, request.group_id)
        pop = Pop(
            request_id=request.request_id,
            group_id=request.group_id,
            topic_id=request.topic_id,
            max_messages=request.max_messages,
            invisible_duration_ms=request.invisible_duration_ms,
            tags=frozenset(request.tags),
            attempt_id=request.attempt_id,
            arrived_s=self._arrived_s,
        )
        if self.pop_again(pop):
            return
        if request.poll_duration_ms <= 0 or turn.is_draining:
            self.answer_empty(pop)
            return
        try:
            deadline_ms = turn.monotonic_ms + request.poll_duration_ms
            turn.polls.park(self, pop, deadline_ms=deadline_ms)
        except ServiceError as error:
            self._replies.failures.append((pop.request_id, error))

    def pop_again(self, pop: Pop) -> bool:
        """Pop, and keep the answer for the end of the round; False when nothing was found."""
        turn = self._rounds.turn
        if self.is_closed:
            return True  # Its goodbye is queued: nothing may be hidden for nobody.
        try:
            if self._outlet.unsent_bytes + self._replies.pop_bytes >= UNSENT_POPS_BYTES_MAX:
                raise Overloaded("the proxy reads too slowly; poll again after a pause")
            batches = turn.engine.pop(
                pop.group_id,
                pop.topic_id,
                max_messages=pop.max_messages,
                invisible_duration_ms=pop.invisible_duration_ms,
                tags=pop.tags,
                attempt_id=pop.attempt_id,
                now_ms=turn.now_ms,
            )
        except ServiceError as error:
            self._replies.failures.append((pop.request_id, error))
            turn.touch(self)
            return True
        if batches:
            self._replies.pops.append((pop, batches))
            self._replies.pop_bytes += sum([batch.size_bytes for batch in batches])
            turn.touch(self)
        return bool(batches)

    def answer_empty(self, pop: Pop) -> None:
        """Keep an empty answer for the end of the round."""
        self._replies.pops.append((pop, []))
        self._rounds.turn.touch(self)

    def answer(self) -> Iterator[None]:
        """Build and send this round's frames."""
        replies, self._replies = self._replies, Replies()
        replies.answered_sequence, self._applied_sequence = self._applied_sequence, 0
        if self.is_closed:
            self._give_back(replies)
            return
        for frame in replies.frames(self._rounds.engine, self._traffic, REPLY_FRAME_BYTES):
            encoded = frame.SerializeToString()
            if encoded and not self.is_closed:
                self._outlet.write(encoded)
            yield

    def _give_back(self, replies: Replies) -> None:
        """Make visible again what was popped for a proxy that left during the sync."""
        turn = self._rounds.turn
        for pop, batches in replies.pops:
            for batch in batches:
                for index in batch.indexes:
                    delivery = Delivery(
                        pop.group_id, pop.topic_id, batch.slot, batch.delivery_id, index,
                        batch.visible_at_ms,
                    )  # fmt: skip
                    with contextlib.suppress(ServiceError):  # Acked or void meanwhile.
                        turn.engine.change_invisible(
                            delivery,
                            invisible_duration_ms=GIVE_BACK_MS,
                            suspend=False,
                            now_ms=turn.now_ms,
                        )
        self._rounds.wake()


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


class _Goodbye:
    """A link that closed. In a round, because rounds give way in their middle."""

    size_bytes = 0

    def __init__(self, link: Link, rounds: Rounds) -> None:
        self._link = link
        self._rounds = rounds

    def apply(self, turn: Turn) -> Iterator[None]:
        turn.polls.forget(self._link)
        self._rounds.detach(self._link)
        yield


def _parse(request: bytes) -> pb.RequestFrame:
    try:
        frame = pb.RequestFrame.FromString(request)
    except DecodeError:
        raise RpcError(RpcCode.INVALID_ARGUMENT, "this is no RequestFrame") from None
    if not columns_agree(frame):
        raise RpcError(RpcCode.INVALID_ARGUMENT, "a batch has columns of different lengths")
    return frame


def columns_agree(frame: pb.RequestFrame) -> bool:
    """Return whether the columns of each batch have one length, as from any proxy of ours."""
    appends, acks = frame.appends, frame.acks
    append_lengths = {
        len(appends.request_ids), len(appends.topic_ids), len(appends.queue_ids),
        len(appends.crcs), len(appends.blobs),
    }  # fmt: skip
    ack_lengths = {
        len(acks.request_ids), len(acks.group_ids), len(acks.topic_ids), len(acks.slots),
        len(acks.delivery_ids), len(acks.indexes), len(acks.visible_at_ms),
    }  # fmt: skip
    return len(append_lengths) == len(ack_lengths) == 1


def _delivery(request: pb.ChangeInvisibleRequest | pb.DeadLetterRequest) -> Delivery:
    return Delivery(
        group_id=request.group_id,
        topic_id=request.topic_id,
        slot=request.slot,
        delivery_id=request.delivery_id,
        message_index=request.index,
        visible_at_ms=request.visible_at_ms,
    )


class BrokerLinkService:
    """The gRPC face of the links."""

    def __init__(self, rounds: Rounds, traffic: Traffic, *, auto_create: bool) -> None:
        self._rounds = rounds
        self._traffic = traffic
        self._auto_create = auto_create

    async def exchange(self, call: RpcCall) -> None:
        """Serve one proxy until it leaves, or the broker stops and has answered all it asked."""
        link = Link(self._rounds, self._traffic, call, auto_create=self._auto_create)
        try:
            await link.read(call)
            await link.flush()
        finally:
            link.close()
            self._rounds.put(_Goodbye(link, self._rounds))
