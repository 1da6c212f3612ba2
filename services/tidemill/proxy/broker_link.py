"""The proxy's end of the link: one stream to a broker that carries everybody's requests.

A request joins the frame that is being gathered; when the broker has answered the last frame, or
enough has come together, the next one leaves; two are under way at most. An idle link so sends at
once and a busy one in batches, and nobody waits for a timer. A frame costs both sides as much as
many requests do, so it passes no task: frames go out and come in by plain calls from the loop.

Every request ends in exactly one of four ways: its reply, its failure as the broker tells it,
BrokerTimeout, or BrokerUnreachable when the stream breaks. After the last two the outcome is
unknown, save for a send or ack that had not left when its time was up: it never leaves. What a pop
brings after its caller has gone is given back at once.
"""

from __future__ import annotations

import asyncio
import random
import time
import zlib
from collections.abc import Collection, Iterable
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import structlog
from google.protobuf.message import DecodeError

from tidemill.common.errors import (
    BY_NAME,
    BrokerTimeout,
    BrokerUnreachable,
    Overloaded,
    ServiceError,
    from_wire,
)
from tidemill.proxy.configuration import Configuration
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2
from tidemill.transport.aio.channel import Channel, ClientStream, connected
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2.limits import Limits

if TYPE_CHECKING:
    from tidemill.message.receipt_handle import HandleFields
    from tidemill.proxy.metrics import ProxyMetrics

log = structlog.get_logger()

EXPIRY_TICK_S = 0.05  # a request times out this much late at most
BUSY_REQUESTS = 16  # under way on a link that is busy
BUSY_TURNS = 4  # of the event loop before a busy link sends: it takes some to read a call
SECOND_FRAME_REQUESTS = 48  # sends and acks that are worth a frame before the last is answered
BLOBS_A_FRAME_BYTES = 8 << 20  # a stall of some ms, far below what the broker takes
ACKS_A_FRAME_MAX = 4_096  # and the rest of the last request: some 20 ms of the broker's time
ACK_BYTES = 200  # about what an ack that waits takes in memory
GIVE_BACK_MS = 1000  # invisible duration of messages that nobody has got
RECONNECT_MIN_MS = 50
# Low, since a broker that was restarted is back within half a second, and one attempt is cheap.
RECONNECT_MAX_MS = 250
# Until then a missing broker is one that starts beside us.
WAITING_WARN_FIRST_S = 1.0
WAITING_WARN_EVERY_S = 10.0  # an operator who comes later should not have to wait for long
# Pops whose late reply would still be given back. The broker answers a cancelled pop only if it had
# answered it already, so most of these are never heard of again and the oldest are dropped.
ABANDONED_MAX = 10_000
CONNECT_TIMEOUT_S = 2.0
# Of one frame: one is closed when it passes 256 KiB, so the largest ends with a pop of 16 MiB
# (POP_BYTES_MAX in the broker) or is the whole configuration, some 100 bytes a topic.
REPLY_BYTES_MAX = 64 << 20
EXCHANGE = "/tidemill.broker.v1.BrokerLink/Exchange"
LIMITS = Limits(
    stream_window_bytes=16 << 20,
    frame_bytes=1 << 20,
    # A broker whose machine vanished is noticed within the sum of these.
    keepalive_period_s=10.0,
    keepalive_timeout_s=10.0,
)
# What became of an append: its queue offset and 0, or its timer id and when it will be delivered.
# A plain tuple, since every send makes one.
Appended: TypeAlias = tuple[int, int]
_UNKNOWN = "the broker did not answer in time; the outcome is unknown"
_NOT_SENT = "the broker took nothing in time; the request was not sent and has done nothing"


class _Pending(NamedTuple):
    """A request whose reply is awaited."""

    kind: str
    future: asyncio.Future[Any]
    started_s: float  # time.monotonic(), since the loop's own clock counts whole milliseconds
    size_bytes: int


class _Abandoned(NamedTuple):
    """A pop whose caller has gone: what it still brings goes back."""

    group_id: int
    topic_id: int


class BrokerLink:
    """Requests to one broker, and what the broker has told of its configuration."""

    def __init__(
        self,
        address: str,
        metrics: ProxyMetrics,
        *,
        pending_max: int,
        pending_bytes_max: int,
    ) -> None:
        self.address = address
        self.configuration = Configuration()
        self.configured = asyncio.Event()  # set once the first configuration has been applied
        self._metrics = metrics
        self._pending_max = pending_max
        self._pending_bytes_max = pending_bytes_max
        self._pending: dict[int, _Pending] = {}
        self._pending_bytes = 0
        self._parked: dict[int, _Abandoned] = {}  # pops under way, should they be abandoned
        self._abandoned: dict[int, _Abandoned] = {}
        self._request_id = 0
        self._are_polls_released = False
        self.is_connected = False
        self._loop: asyncio.AbstractEventLoop  # from `run` on
        self._stream: ClientStream | None = None
        self._sequence = 0  # of the frame sent last on this stream
        self._answered_sequence = 0  # of the last frame that is answered
        self._is_gathering = False
        self._turns_left = 0  # of the event loop until the gathered frame leaves
        # (request id, topic id, queue id, CRC of the blob, blob)
        self._appends: list[tuple[int, int, int, int, bytes]] = []
        # (request id, group id, topic id, slot, delivery id, index, visible at)
        self._acks: list[tuple[int, int, int, int, int, int, int]] = []
        self._expiries: dict[int, list[int]] = {}  # tick -> requests that time out in it
        self._frame = link_pb2.RequestFrame()

    # ------------------------------------------------------------ requests

    def append(
        self, topic_id: int, queue_id: int, blob: bytes, *, timeout_ms: int
    ) -> asyncio.Future[Appended]:
        """Store or schedule a message; the future says where, once it is durable."""
        future: asyncio.Future[Appended]
        request_id, future = self._begin("append", timeout_ms, len(blob))
        self._appends.append((request_id, topic_id, queue_id, zlib.crc32(blob), blob))
        return future

    def ack(
        self,
        group_id: int,
        topic_id: int,
        deliveries: Collection[HandleFields],
        *,
        timeout_ms: int,
    ) -> asyncio.Future[list[int]]:
        """Settle deliveries; the future brings an AckResult for each, in order."""
        future: asyncio.Future[list[int]]
        request_id, future = self._begin("ack", timeout_ms, ACK_BYTES * len(deliveries))
        # All under one id: they travel in one frame, and so do their results.
        self._acks += [
            (request_id, group_id, topic_id, slot, delivery_id, index, visible_at_ms)
            for slot, delivery_id, visible_at_ms, index in deliveries
        ]
        return future

    async def pop(self, request: link_pb2.PopRequest, *, timeout_ms: int) -> link_pb2.PopReply:
        """Take messages; when the caller goes, so does the poll, and nothing it took is lost."""
        future: asyncio.Future[link_pb2.PopReply]
        request_id, future = self._begin("pop", timeout_ms)
        request.request_id = request_id
        if self._are_polls_released:
            request.poll_duration_ms = 0
        self._frame.pops.append(request)
        self._parked[request_id] = _Abandoned(request.group_id, request.topic_id)
        try:
            return await future
        except (asyncio.CancelledError, BrokerTimeout):
            if future.done() and not future.cancelled() and not future.exception():
                # The reply came in the turn in which the caller went.
                self.give_back(request.group_id, request.topic_id, future.result().batches)
            else:
                self._abandon(request_id)
            raise
        finally:
            self._parked.pop(request_id, None)

    async def change_invisible(
        self, request: link_pb2.ChangeInvisibleRequest, *, timeout_ms: int
    ) -> link_pb2.ChangeInvisibleReply:
        """Replace a delivery by one with another invisible duration."""
        future: asyncio.Future[link_pb2.ChangeInvisibleReply]
        request.request_id, future = self._begin("change_invisible", timeout_ms)
        self._frame.changes.append(request)
        return await future

    async def dead_letter(self, request: link_pb2.DeadLetterRequest, *, timeout_ms: int) -> None:
        """Move a message to the group's dead-letter topic."""
        future: asyncio.Future[link_pb2.DeadLetterReply]
        request.request_id, future = self._begin("dead_letter", timeout_ms)
        self._frame.dead_letters.append(request)
        await future

    async def cancel_timer(self, timer_id: int, topic_id: int, *, timeout_ms: int) -> None:
        """Cancel the delivery of a delayed message. Raises MessageNotFound when it is too late."""
        future: asyncio.Future[int]
        request_id, future = self._begin("cancel_timer", timeout_ms)
        self._frame.timer_cancels.add(request_id=request_id, timer_id=timer_id, topic_id=topic_id)
        await future

    async def ensure(self, *, topic: str = "", group: str = "", timeout_ms: int) -> None:
        """Create what is missing; the configuration holds it when this returns."""
        future: asyncio.Future[link_pb2.EnsureReply]
        request_id, future = self._begin("ensure", timeout_ms)
        self._frame.ensures.add(request_id=request_id, topic=topic, group=group)
        await future

    def give_back(
        self,
        group_id: int,
        topic_id: int,
        batches: Iterable[link_pb2.Batch],
        *,
        skip: int = 0,
    ) -> None:
        """Make messages visible again soon, all but the first `skip`: nobody has got them.

        Nobody waits for the answers. Where they fail, the invisible duration ends by itself.
        """
        if not self.is_connected:
            return
        count = 0
        for batch in batches:
            for index in batch.indexes:
                count += 1
                if count <= skip:
                    continue
                self._request_id += 1
                self._frame.changes.add(
                    request_id=self._request_id,
                    group_id=group_id,
                    topic_id=topic_id,
                    slot=batch.slot,
                    delivery_id=batch.delivery_id,
                    index=index,
                    visible_at_ms=batch.visible_at_ms,
                    invisible_duration_ms=GIVE_BACK_MS,
                )
        if count > skip:
            self._metrics.messages_returned += count - skip
            self._wake()

    def release_polls(self) -> None:
        """Answer every parked pop empty, and every later one at once: the process is to stop."""
        self._are_polls_released = True
        for request_id in list(self._parked):
            if pending := self._forget(request_id):
                self._abandon(request_id)
                if not pending.future.done():
                    pending.future.set_result(link_pb2.PopReply(request_id=request_id))

    def _begin(
        self, kind: str, timeout_ms: int, size_bytes: int = 0
    ) -> tuple[int, asyncio.Future[Any]]:
        if not self.is_connected:
            raise BrokerUnreachable(f"there is no connection to the broker at {self.address}")
        # Beyond the limits a request is refused: what waits here is memory of the proxy.
        if (
            len(self._pending) >= self._pending_max
            or self._pending_bytes + size_bytes > self._pending_bytes_max
        ):
            self._metrics.throttled += 1
            raise Overloaded(
                f"{len(self._pending)} requests with {self._pending_bytes} bytes wait for the"
                " broker already; repeat after a pause"
            )
        loop = self._loop
        self._request_id = request_id = self._request_id + 1
        future: asyncio.Future[Any] = loop.create_future()
        now_s = loop.time()
        tick = int((now_s + timeout_ms / 1000) / EXPIRY_TICK_S) + 1
        expiring = self._expiries.get(tick)
        if expiring is None:
            # One timer for all that time out together: one each would cost more than the request.
            expiring = self._expiries[tick] = []
            loop.call_at(tick * EXPIRY_TICK_S, self._expire, tick)
        expiring.append(request_id)
        self._pending[request_id] = _Pending(kind, future, time.monotonic(), size_bytes)
        self._pending_bytes += size_bytes
        if not self._is_gathering:
            self._wake()
        return request_id, future

    def _abandon(self, request_id: int) -> None:
        self._forget(request_id)
        if self.is_connected:
            if len(self._abandoned) >= ABANDONED_MAX:
                del self._abandoned[next(iter(self._abandoned))]
            self._abandoned[request_id] = self._parked[request_id]
            self._frame.cancelled_pops.append(request_id)
            self._wake()

    def _expire(self, tick: int) -> None:
        expired = [
            request_id for request_id in self._expiries.pop(tick) if request_id in self._pending
        ]
        unsent = self._withdraw(expired) if expired else ()
        for request_id in expired:
            pending = self._forget(request_id, result="timeout")
            if pending and not pending.future.done():
                outcome = _NOT_SENT if request_id in unsent else _UNKNOWN
                pending.future.set_exception(BrokerTimeout(outcome))

    def _withdraw(self, request_ids: Collection[int]) -> set[int]:
        """Keep sends and acks that have not left from leaving; return which those are.

        They would be memory that nobody counts, and surprise those who were told to try again.
        """
        waiting = {append[0] for append in self._appends} | {ack[0] for ack in self._acks}
        unsent = waiting.intersection(request_ids)
        if unsent:
            self._appends = [append for append in self._appends if append[0] not in unsent]
            self._acks = [ack for ack in self._acks if ack[0] not in unsent]
        return unsent

    def _forget(self, request_id: int, result: str = "") -> _Pending | None:
        pending = self._pending.pop(request_id, None)
        if pending:
            self._pending_bytes -= pending.size_bytes
            if result:
                elapsed_s = time.monotonic() - pending.started_s
                self._metrics.observe_backend(pending.kind, result, elapsed_s * 1000)
        return pending

    # ------------------------------------------------------------ the stream

    async def run(self) -> None:
        """Keep the stream open until cancelled; while there is none, requests are refused."""
        self._loop = asyncio.get_running_loop()
        attempt = 0
        warn_at_s = time.monotonic() + WAITING_WARN_FIRST_S
        while True:
            try:
                async with connected(
                    self.address, LIMITS,
                    message_bytes_max=REPLY_BYTES_MAX, timeout_s=CONNECT_TIMEOUT_S,
                ) as channel:  # fmt: skip
                    await self._exchange(channel)
            except RpcError as error:
                reason = str(error)
            else:
                reason = "the broker ended the stream"
            now_s = time.monotonic()
            if self._lose_connection(reason):
                attempt, warn_at_s = 0, now_s + WAITING_WARN_FIRST_S
            else:
                attempt += 1
            if now_s >= warn_at_s:
                log.warning("waiting for the broker", address=self.address, reason=reason)
                warn_at_s = now_s + WAITING_WARN_EVERY_S
            ceiling_ms = min(RECONNECT_MIN_MS << min(attempt, 10), RECONNECT_MAX_MS)
            await asyncio.sleep(random.uniform(ceiling_ms / 2, ceiling_ms) / 1000)

    async def _exchange(self, channel: Channel) -> None:
        self._sequence = self._answered_sequence = 0
        stream = self._stream = channel.open(EXCHANGE, self._receive)
        try:
            await stream.ended()
        finally:
            self._stream = None
            stream.cancel()

    def _receive(self, encoded: bytes) -> None:
        try:
            reply = link_pb2.ReplyFrame.FromString(encoded)
        except DecodeError:
            if self._stream is not None:
                self._stream.fail(RpcError(RpcCode.INTERNAL, "the broker sent what is no frame"))
            return
        self._apply(reply)

    def _wake(self) -> None:
        """See to it that a frame leaves soon: there is something to ask.

        Those who are about to ask join it: a few on an idle link, many on a busy one. No time is
        waited: each turn of the loop does what is to be done anyway, above all the reading of calls
        that have arrived already.
        """
        if self._is_gathering or self._stream is None or not self._may_send:
            return
        self._is_gathering = True
        self._turns_left = BUSY_TURNS if len(self._pending) >= BUSY_REQUESTS else 1
        self._loop.call_soon(self._gather)

    @property
    def _may_send(self) -> bool:
        """Whether a frame may leave: none is unanswered, or one is and a good deal has gathered."""
        unanswered = self._sequence - self._answered_sequence
        if unanswered == 1:
            return len(self._appends) + len(self._acks) >= SECOND_FRAME_REQUESTS
        return unanswered == 0

    def _gather(self) -> None:
        self._turns_left -= 1
        if self._turns_left > 0:
            self._loop.call_soon(self._gather)
            return
        self._is_gathering = False
        if self._stream is not None and self._has_work:
            frame = self._take_frame()
            frame.sequence = self._sequence = self._sequence + 1
            self._stream.write(frame.SerializeToString())

    @property
    def _has_work(self) -> bool:
        return bool(self._appends or self._acks or self._frame.ListFields())

    def _take_frame(self) -> link_pb2.RequestFrame:
        frame, self._frame = self._frame, link_pb2.RequestFrame()
        acks = self._take_acks()
        if acks:
            ids, groups, topics, slots, deliveries, indexes, instants = zip(*acks, strict=True)
            batch = frame.acks
            batch.request_ids.extend(ids)
            batch.group_ids.extend(groups)
            batch.topic_ids.extend(topics)
            batch.slots.extend(slots)
            batch.delivery_ids.extend(deliveries)
            batch.indexes.extend(indexes)
            batch.visible_at_ms.extend(instants)
        appends = self._take_appends()
        if appends:
            ids, topics, queues, crcs, blobs = zip(*appends, strict=True)
            columns = frame.appends
            columns.request_ids.extend(ids)
            columns.topic_ids.extend(topics)
            columns.queue_ids.extend(queues)
            columns.crcs.extend(crcs)
            columns.blobs.extend(blobs)
        return frame

    def _take_acks(self) -> list[tuple[int, int, int, int, int, int, int]]:
        acks, end = self._acks, ACKS_A_FRAME_MAX
        if len(acks) <= end:
            self._acks = []
            return acks
        # Those of one request travel together.
        while end < len(acks) and acks[end][0] == acks[end - 1][0]:
            end += 1
        taken, self._acks = acks[:end], acks[end:]
        return taken

    def _take_appends(self) -> list[tuple[int, int, int, int, bytes]]:
        frame_bytes = 0
        for count, append in enumerate(self._appends):
            frame_bytes += len(append[4])
            if frame_bytes > BLOBS_A_FRAME_BYTES and count:
                taken, self._appends = self._appends[:count], self._appends[count:]
                return taken
        taken, self._appends = self._appends, []
        return taken

    # ------------------------------------------------------------ replies

    def _apply(self, reply: link_pb2.ReplyFrame) -> None:
        """Apply one frame: its configuration first, since the replies beside it rely on it."""
        if reply.HasField("config"):
            self.configuration.apply(reply.config)
            if reply.config.is_complete:
                self.is_connected = True
                self.configured.set()
                log.info(
                    "broker connected",
                    address=self.address,
                    broker=reply.config.broker_name,
                    topics=len(reply.config.topics),
                    groups=len(reply.config.groups),
                )
        if reply.answered_sequence:
            self._answered_sequence = reply.answered_sequence
            if self._has_work:
                self._wake()
        resolve = self._resolve
        if reply.HasField("appends"):
            appends = reply.appends
            offsets = appends.queue_offsets
            dues = appends.due_at_ms or repeat(0, len(offsets))
            self._resolve_appends(appends.request_ids, zip(offsets, dues, strict=True))
        if reply.HasField("acks"):
            results: dict[int, list[int]] = {}
            for request_id, result in zip(reply.acks.request_ids, reply.acks.results, strict=True):
                results.setdefault(request_id, []).append(result)
            for request_id, outcomes in results.items():
                resolve(request_id, outcomes)
        for pop in reply.pops:
            if not resolve(pop.request_id, pop):
                self._give_back_late(pop)
        for change in reply.changes:
            resolve(change.request_id, change)
        for dead_letter in reply.dead_letters:
            resolve(dead_letter.request_id, dead_letter)
        for ensure in reply.ensures:
            resolve(ensure.request_id, ensure)
        for request_id in reply.cancelled_timers:
            resolve(request_id, request_id)
        for failure in reply.failures:
            self._abandoned.pop(failure.request_id, None)
            self._fail(failure.request_id, _error_of(failure))

    def _resolve_appends(self, request_ids: Iterable[int], results: Iterable[Appended]) -> None:
        """Do what `_resolve` does, for the many of a frame."""
        pending, now_s = self._pending, time.monotonic()
        observe = self._metrics.observe_backend
        for request_id, appended in zip(request_ids, results, strict=True):
            append = pending.pop(request_id, None)
            if append is not None:
                self._pending_bytes -= append.size_bytes
                observe("append", "success", (now_s - append.started_s) * 1000)
                if not append.future.done():
                    append.future.set_result(appended)

    def _resolve(self, request_id: int, result: object) -> bool:
        """Hand a result to whoever waits; say whether somebody did."""
        pending = self._forget(request_id, result="success")
        if pending is None or pending.future.done():
            return False
        pending.future.set_result(result)
        return True

    def _fail(self, request_id: int, error: ServiceError) -> None:
        pending = self._forget(request_id, result="refused")
        if pending and not pending.future.done():
            pending.future.set_exception(error)

    def _give_back_late(self, pop: link_pb2.PopReply) -> None:
        # A pop whose caller was cancelled in this very turn of the loop is still among the parked.
        caller = self._abandoned.pop(pop.request_id, None) or self._parked.get(pop.request_id)
        if caller:
            self.give_back(caller.group_id, caller.topic_id, pop.batches)

    def _lose_connection(self, reason: str) -> bool:
        """Fail all that is under way, and say whether there had been a connection."""
        was_connected, self.is_connected = self.is_connected, False
        self._appends, self._acks = [], []
        self._frame = link_pb2.RequestFrame()
        # The broker forgets the parked pops of a lost stream by itself.
        self._abandoned.clear()
        if was_connected:
            log.warning(
                "broker lost", address=self.address, reason=reason, pending=len(self._pending)
            )
        error = BrokerUnreachable("the connection to the broker was lost; the outcome is unknown")
        for request_id in list(self._pending):
            self._fail(request_id, error)
        return was_connected


def _error_of(failure: link_pb2.Failure) -> ServiceError:
    # A broker of a newer release may know errors that this proxy does not.
    if failure.error not in BY_NAME:
        return BrokerUnreachable(f"the broker refused: {failure.error}: {failure.message}")
    return from_wire(failure.error, failure.message)
