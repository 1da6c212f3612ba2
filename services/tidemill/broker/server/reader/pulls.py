"""BrokerReader's calls about pulls: messages of a queue, the wait for them, and offsets (ADR 0046).

A pull reads only committed messages, between the rounds. All pulls together do one slice per turn
of the event loop, so the rounds get every other turn. The other calls run in a round.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING, Final, final

from tidemill.broker.engine.layout.dead_letter import Replay
from tidemill.broker.engine.layout.message import (
    Cause,
    HalfOutcome,
    Reason,
    TimerCause,
    TimerReason,
)
from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId
from tidemill.broker.engine.message_filter import EVERY_MESSAGE
from tidemill.broker.engine.queries.queue_reader import ENDLESS, reason_of
from tidemill.broker.engine.time_search import TimeSearch
from tidemill.broker.server.admin.lookup import check_queue_id
from tidemill.broker.server.reader.log_id import log_id_of
from tidemill.broker.server.round.long_polling import NotificationPoll
from tidemill.broker.server.round.rpc import in_round, read_in_round, rpc_error
from tidemill.broker.server.wire.filters import find_filter
from tidemill.common.errors import (
    Forbidden,
    GroupNotFound,
    LogChanged,
    NotMaster,
    ServiceError,
    TopicNotFound,
)
from tidemill.common.slices import run_slices
from tidemill.message.resource_names import HIDDEN_TOPIC_PREFIX
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.queries.queue_reader import MessageCause, QueueMessage, QueueReader
    from tidemill.broker.engine.store.consume_queue import ConsumeQueue
    from tidemill.broker.metrics.traffic import Traffic
    from tidemill.broker.server.round.long_polling import PollArguments, PopOutcome, PopPoll
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn

PULL_MAX: Final = 1_024  # messages of one pull, even if a request wants more
PULL_BYTES_MAX: Final = 1 << 20  # bytes of the log of one pull, but always one message
WAIT_MS_MAX: Final = 60_000  # more than any proxy waits
NO_GROUP: Final = 0  # the group id of parked pulls, which no consumer group has


@final
class PullReader:
    """Pulls, waits for messages, and offsets."""

    def __init__(self, rounds: Rounds, traffic: Traffic) -> None:
        self._rounds = rounds
        self._traffic = traffic
        self._one_by_one = asyncio.Lock()
        self._wait_ids = itertools.count(1)

    async def Pull(self, request: pb.PullRequest) -> pb.PullReply:
        """Return messages of one queue in order."""
        if not self._rounds.is_master:
            reason = "this replica of the broker group is not the master; call the master"
            raise rpc_error(NotMaster(reason))
        began_s, reply = time.monotonic(), pb.PullReply()
        try:
            await run_slices(self._pull(request, reply), one_by_one=self._one_by_one)
        except ServiceError as error:
            raise rpc_error(error) from error
        labels = ("grpc", "pull", "20000", "false", "success")
        self._traffic.latencies.observe(labels, (time.monotonic() - began_s) * 1000)
        return reply

    def _pull(self, request: pb.PullRequest, reply: pb.PullReply) -> Generator[None, None, None]:
        engine = self._rounds.engine
        if request.log_id not in ("", log_id_of(engine)):
            reason = f"the log id is {log_id_of(engine)} now, not {request.log_id}"
            raise LogChanged(f"{reason}; query the offsets again")
        queue = _queue(engine, request.topic_id, request.queue_id)
        if request.topic not in ("", engine.catalog.topics[TopicId(request.topic_id)].name):
            reason = f"topic {request.topic} does not have the id {request.topic_id}"
            raise TopicNotFound(f"{reason}; query its route again")
        pull = engine.inspection.read(
            queue,
            request.offset,
            wanted=find_filter(request.tags, request.sql),
            max_messages=min(max(request.max_messages, 1), PULL_MAX),
            max_bytes=min(request.max_bytes or PULL_BYTES_MAX, PULL_BYTES_MAX),
            until_offset=request.until_offset or ENDLESS,
            with_bodies=not request.without_bodies,
        )
        has_more = queue.min_offset <= request.offset <= pull.end_offset()
        while has_more:
            has_more = pull.step()
            _add(engine, reply, pull.take())
            yield
            if not engine.catalog.is_alive(TopicId(request.topic_id)):
                raise TopicNotFound("the topic was deleted; query its route again")
        _finish(reply, pull)

    async def AwaitMessage(self, request: pb.AwaitMessageRequest) -> pb.AwaitMessageReply:
        """Return as soon as a queue has a message at an offset, or after the wait."""
        wait = MessageWait(self._rounds, request, next(self._wait_ids))
        wait_ms = min(request.wait_ms, WAIT_MS_MAX)
        try:
            await read_in_round(self._rounds, lambda _engine, turn: wait.begin(turn, wait_ms))
            return pb.AwaitMessageReply(is_there=await wait.outcome)
        except ServiceError as error:
            raise rpc_error(error) from error
        finally:
            if not wait.outcome.done():
                self._rounds.put(_WaitEnd(wait))

    async def QueryOffset(self, request: pb.QueryOffsetRequest) -> pb.OffsetReply:
        """Return the first or end offset of a queue, or the first offset of a time."""

        def begin(engine: Engine, _turn: Turn) -> int | TimeSearch:
            queue = _queue(engine, request.topic_id, request.queue_id)
            if request.WhichOneof("place") == "timestamp_ms":
                return TimeSearch(
                    engine.store, [queue], request.timestamp_ms, falls=engine.catalog.clock_falls
                )
            return int(queue.min_offset if request.first else queue.max_offset)

        found = await read_in_round(self._rounds, begin)
        if not isinstance(found, TimeSearch):
            return pb.OffsetReply(offset=found)
        search = found
        while await read_in_round(self._rounds, lambda _engine, _turn: search.step()):
            pass
        return pb.OffsetReply(offset=search.offsets[0])

    async def GetPullOffset(self, request: pb.GetPullOffsetRequest) -> pb.OffsetReply:
        """Return the pull offset that a consumer group has stored; -1 if there is none."""

        def get(engine: Engine, _turn: Turn) -> int | None:
            _queue(engine, request.topic_id, request.queue_id)
            if request.group_id not in engine.catalog.groups:
                raise GroupNotFound("the consumer group was deleted; create it again")
            return engine.catalog.pull_offsets.find(_pull_key(request))

        found = await read_in_round(self._rounds, get)
        return pb.OffsetReply(offset=-1 if found is None else found)

    async def UpdatePullOffset(self, request: pb.UpdatePullOffsetRequest) -> pb.OffsetReply:
        """Store the pull offset of a consumer group."""

        def update(engine: Engine, turn: Turn) -> None:
            _queue(engine, request.topic_id, request.queue_id)
            engine.administration.update_pull_offset(
                *_pull_key(request), request.offset, turn.now_ms
            )

        await in_round(self._rounds, update)
        return pb.OffsetReply(offset=request.offset)


@final
class MessageWait:
    """The wait of one AwaitMessage call, parked with the polls of its topic."""

    def __init__(self, rounds: Rounds, request: pb.AwaitMessageRequest, number: int) -> None:
        self._rounds = rounds
        self._request = request
        self._poll = NotificationPoll(
            request_id=number, group_id=NO_GROUP, topic_id=request.topic_id, wanted=EVERY_MESSAGE
        )
        self.outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._result: bool | ServiceError = False

    def begin(self, turn: Turn, wait_ms: int) -> None:
        """Answer the call, or let it wait for a message."""
        if self.try_notify(self._poll):
            return
        if wait_ms <= 0 or turn.is_draining:
            self.answer_empty(self._poll)
            return
        turn.polls.park(self, self._poll, deadline_ms=turn.monotonic_ms + wait_ms)

    def try_pop(self, pop: PopPoll) -> PopOutcome:
        """Never called: only a notification is parked."""
        raise AssertionError(f"a pull does not pop: {pop}")

    def try_notify(self, _poll: NotificationPoll) -> bool:
        """Return False if the queue has no message at the offset, else keep the answer."""
        request, turn = self._request, self._rounds.turn
        try:
            queue = _queue(turn.engine, request.topic_id, request.queue_id)
        except ServiceError as error:
            self._result = error
        else:
            if queue.max_offset <= request.offset:
                return False
            self._result = True
        turn.effects[self] = self
        return True

    def answer_empty(self, _poll: PollArguments) -> None:
        """Keep the answer until the round is committed."""
        self._rounds.turn.effects[self] = self

    def release(self) -> Iterator[None]:
        """Set the outcome."""
        if self.outcome.done():
            return
        if isinstance(self._result, ServiceError):
            self.outcome.set_exception(self._result)
            self.outcome.exception()  # Marks it as retrieved: the caller may be cancelled.
        else:
            self.outcome.set_result(self._result)
        yield


@final
class _WaitEnd:
    """Work that forgets a wait whose call was cancelled; in a round, as `LinkRemoval`."""

    size_bytes = 0

    def __init__(self, wait: MessageWait) -> None:
        self._wait = wait

    def apply(self, turn: Turn) -> Iterator[None]:
        turn.polls.forget(self._wait)
        yield


def _queue(engine: Engine, topic_id: int, queue_id: int) -> ConsumeQueue:
    """Return a queue. Raises TopicNotFound, Forbidden, BadRequest."""
    topic = engine.catalog.topics.get(TopicId(topic_id))
    if topic is None or not engine.catalog.is_alive(topic.id):
        raise TopicNotFound("the topic was deleted; query its route again")
    if topic.name.startswith(HIDDEN_TOPIC_PREFIX):
        raise Forbidden(f"the topic {topic.name} is internal and cannot be read")
    check_queue_id(topic, queue_id)
    return engine.catalog.queue(topic.id, QueueId(queue_id))


def _pull_key(
    request: pb.GetPullOffsetRequest | pb.UpdatePullOffsetRequest,
) -> tuple[GroupId, TopicId, QueueId]:
    return GroupId(request.group_id), TopicId(request.topic_id), QueueId(request.queue_id)


def _finish(reply: pb.PullReply, pull: QueueReader) -> None:
    reply.next_offset, reply.is_at_end = pull.next_offset, pull.is_at_end
    reply.min_offset, reply.end_offset = pull.min_offset, pull.end_offset()


def _add(engine: Engine, reply: pb.PullReply, found: list[QueueMessage]) -> None:
    """Add messages to the columns."""
    count = len(reply.blobs)
    if not found:
        return
    columns = zip(*found, strict=True)
    _, _, offsets, log_offsets, stored_at_ms, attempts, causes, blobs = columns
    reply.queue_offsets.extend(offsets)
    reply.log_offsets.extend(log_offsets)
    reply.stored_at_ms.extend(stored_at_ms)
    reply.delivery_attempts.extend([before + 1 for before in attempts])
    reply.blobs.extend(blobs)
    if any(causes):
        for number, each in enumerate(found, count):
            if each.cause is not None:
                provenance, origin = _provenance(engine, each.cause, each.stored_at_ms)
                reply.provenance_of.append(number)
                reply.provenances.append(provenance.SerializeToString())
                reply.dead_letter_origins.append(origin)


def _provenance(
    engine: Engine, cause: MessageCause, stored_at_ms: int
) -> tuple[v2.Provenance, str]:
    """Return the provenance of a message, and the origin topic of a dead letter."""
    if isinstance(cause, TimerCause):
        if cause.reason == TimerReason.DELIVERED:
            return v2.Provenance(fired_at_ms=stored_at_ms, timer_id=cause.timer_id), ""
        provenance = v2.Provenance(
            reason=reason_of(cause), origin_topic=cause.origin, timer_id=cause.timer_id
        )
        return provenance, cause.origin
    if isinstance(cause, HalfOutcome):
        provenance = v2.Provenance(reason=reason_of(cause), origin_topic=cause.origin)
        return provenance, cause.origin
    assert isinstance(cause, (Cause, Replay)), "the topic of waiting timers is hidden"
    group = engine.catalog.groups.get(GroupId(cause.group_id))
    is_dead = isinstance(cause, Cause) and cause.reason != Reason.INVISIBLE_DURATION_ENDED
    provenance = v2.Provenance(
        consumer_group=group.name if group is not None else "",
        reason=reason_of(cause),
        origin_topic=cause.origin,
        origin_queue_id=cause.root_queue_id,
        origin_queue_offset=cause.root_offset,
    )
    return provenance, cause.origin if is_dead else ""
