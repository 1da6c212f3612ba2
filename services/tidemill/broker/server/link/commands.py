"""The commands of the link, one row each, at the broker.

A row contains the engine call of a request, the result that is kept until the round is durable, and
the way from the result to a reply. The link and its reply frames loop over the rows. Most requests
are messages with a request id, applied one by one. Appends and acks travel as columns, because
every message needs them. A pop may wait (`pops.py`); its result then comes in a later round.

To add a command, add a field to both frames (broker.proto), a row here, and a row at the proxy
(`proxy/link/commands.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, final

from tidemill.broker.engine.dedup.deduplication import KeyLookup, RepeatedSend
from tidemill.broker.engine.layout.numbers import (
    DeliverySlot,
    GroupId,
    HalfId,
    LogOffset,
    QueueId,
    TimerId,
    TopicId,
)
from tidemill.broker.engine.message_filter import EVERY_MESSAGE
from tidemill.broker.engine.pop.consumption import Delivery
from tidemill.broker.engine.tally import SLICE_BYTES, Allowance
from tidemill.broker.engine.transaction.transactions import HalfSender
from tidemill.broker.server.link.pops import NOTIFICATION, POP
from tidemill.broker.server.round.long_polling import NotificationPoll, PopPoll
from tidemill.broker.server.wire import config_frames, config_log
from tidemill.broker.server.wire.filters import find_filter
from tidemill.common.errors import BadRequest, IllegalFilter, ServiceError, TopicNotFound
from tidemill.message.client_key import NO_OWNER, ClientKey
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.pop.consumption import AckResult, DeliveryBatch
    from tidemill.broker.metrics.traffic import Traffic
    from tidemill.broker.server.link.pops import LinkPops
    from tidemill.broker.server.link.replies import LinkReplies, Result
    from tidemill.broker.server.round.turn import Turn
    from tidemill.common.histogram import Histogram
    from tidemill.common.metrics import Labels

SLICE_REQUESTS = 64  # of one slice; under 1 ms
# A message of this size ends a slice, which then has at most 1 MiB and one message.
LARGE_BYTES = SLICE_BYTES // SLICE_REQUESTS
_OK = "20000"  # OK as clients see it, so that dashboards can join this histogram with the proxies'


class FrameContext(NamedTuple):
    """The values that all commands of one request frame use."""

    turn: Turn
    replies: LinkReplies
    pops: LinkPops
    traffic: Traffic
    arrived_s: float  # time.monotonic()
    repeated_ids: frozenset[int]  # of requests that an earlier stream may have brought


class ReplySource(NamedTuple):
    """The sources of reply frames, besides the results."""

    engine: Engine
    traffic: Traffic


# Calls the engine for each request and adds to the results; yields between slices.
Apply: TypeAlias = "Callable[[FrameContext, list[Result], Any], Iterator[None]]"
# Adds durable results to a frame; returns the bytes of their messages.
Reply: TypeAlias = "Callable[[pb.ReplyFrame, Sequence[Result], ReplySource], int]"
# Counts results: name, results, histogram, arrival of the oldest frame, time of the reply.
Observe: TypeAlias = "Callable[[str, Sequence[Result], Histogram[Labels], float, float], None]"


def _observe_together(
    name: str,
    results: Sequence[Result],
    latencies: Histogram[Labels],
    arrived_s: float,
    now_s: float,
) -> None:
    labels = ("grpc", name, _OK, "false", "success")
    latencies.observe(labels, (now_s - arrived_s) * 1000, len(results))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerCommand:
    """One kind of request."""

    name: str  # in the metrics, and the key of the results
    request_field: str  # of RequestFrame
    reply_field: str  # of ReplyFrame
    apply: Apply
    reply: Reply
    observe: Observe = _observe_together
    # Returns the columns of a batch, for requests that travel as columns.
    columns: Callable[[Any], tuple[Sized, ...]] | None = None
    is_large: bool = False  # replies may have megabytes, so they are split into several frames


def _one_by_one(
    name: str,
    request_field: str,
    reply_field: str,
    call: Callable[[Any, Turn], Any],
    add: Callable[[pb.ReplyFrame, int, Any], object],
    *,
    repeat: Callable[[Any, Turn], Any] | None = None,
) -> BrokerCommand:
    """Return a command whose requests are messages.

    `call` makes the engine call of one request; `add` adds its result to the reply frame. `repeat`
    replaces `call` for a request that an earlier stream may have brought.
    """
    call_again = call if repeat is None else repeat

    def apply(context: FrameContext, results: list[Result], requests: Any) -> Iterator[None]:
        turn, repeated_ids = context.turn, context.repeated_ids
        failures, tally = context.replies.failures, turn.engine.tally
        allowance = Allowance(tally, items=SLICE_REQUESTS)
        for n, request in enumerate(requests, 1):
            try:
                is_repeated = request.request_id in repeated_ids
                result = (call_again if is_repeated else call)(request, turn)
            except ServiceError as error:
                failures.append((request.request_id, error))
            else:
                results.append((request.request_id, result))
            # A dead letter is a copy, which may be large.
            if n % SLICE_REQUESTS == 0 or allowance.is_spent:
                yield
                allowance = Allowance(tally, items=SLICE_REQUESTS)

    def reply(frame: pb.ReplyFrame, results: Sequence[Result], _: ReplySource) -> int:
        for request_id, result in results:
            add(frame, request_id, result)
        return 0

    return BrokerCommand(
        name=name, request_field=request_field, reply_field=reply_field, apply=apply, reply=reply
    )


# ---------------------------------------------------------------- appends


def repeated_key(repeat: RepeatedSend, request_id: int = 0) -> pb.RepeatedKey:
    """Render the answer of a message that repeats a dedup key."""
    return pb.RepeatedKey(
        request_id=request_id,
        message_id=repeat.first.message_id,
        is_mismatch=repeat.is_mismatch,
        half_id=repeat.first.half_id,
    )


def _append_columns(appends: pb.AppendBatch) -> tuple[Any, ...]:
    return (
        appends.request_ids,
        appends.topic_ids,
        appends.queue_ids,
        appends.crcs,
        appends.blobs,
        appends.key_versions or [0] * len(appends.request_ids),
    )


def _apply_appends(
    context: FrameContext, results: list[Result], appends: pb.AppendBatch
) -> Iterator[None]:
    turn, repeated_ids = context.turn, context.repeated_ids
    failures, count = context.replies.failures, context.traffic.appended
    has_known_key = turn.engine.deduplication.has_known_key
    send = turn.engine.commands.send_unless_repeated
    now_ms, firing_ms = turn.now_ms, turn.firing_ms
    rows = zip(*_append_columns(appends), strict=True)
    for n, (request_id, topic_id, queue_id, crc, blob, key_version) in enumerate(rows, 1):
        # A message with a known dedup key is found by its key, also long after.
        if request_id in repeated_ids and not has_known_key(topic_id, blob):
            yield  # The search below takes a slice.
            try:
                known = turn.engine.store.find_sent(topic_id, queue_id, blob)
            except ServiceError as error:
                failures.append((request_id, error))
                continue
            if known is not None:
                results.append((request_id, known, 0, None))
                continue
        try:
            sent = send(
                topic_id,
                queue_id,
                blob,
                crc,
                now_ms=now_ms,
                firing_ms=firing_ms,
                key_version=key_version,
            )
        except ServiceError as error:
            failures.append((request_id, error))
        else:
            if isinstance(sent, RepeatedSend):
                first = sent.first
                results.append((request_id, first.queue_offset, first.due_at_ms, sent))
            else:
                results.append((request_id, *sent, None))
                count(topic_id, blob)
        if n % SLICE_REQUESTS == 0 or len(blob) >= LARGE_BYTES:
            yield


def _reply_appends(frame: pb.ReplyFrame, results: Sequence[Result], _: ReplySource) -> int:
    request_ids, queue_offsets, dues, repeats = zip(*results, strict=True)
    frame.appends.request_ids.extend(request_ids)
    frame.appends.queue_offsets.extend(queue_offsets)
    if any(dues):
        frame.appends.due_at_ms.extend(dues)
    if any(repeats):
        frame.appends.repeats.extend(
            [
                repeated_key(repeat, request_id)
                for request_id, repeat in zip(request_ids, repeats, strict=True)
                if repeat is not None
            ]
        )
    return 0


# ---------------------------------------------------------------- acks


def _ack_columns(acks: pb.AckBatch) -> tuple[Any, ...]:
    return (
        acks.request_ids,
        acks.group_ids,
        acks.topic_ids,
        acks.slots,
        acks.delivery_ids,
        acks.indexes,
        acks.visible_at_ms,
        acks.owners or [NO_OWNER] * len(acks.request_ids),
    )


def _apply_acks(context: FrameContext, results: list[Result], acks: pb.AckBatch) -> Iterator[None]:
    failures, count = context.replies.failures, context.traffic.acked
    ack, now_ms = context.turn.engine.commands.ack, context.turn.now_ms
    request_ids, *fields = _ack_columns(acks)
    deliveries = map(Delivery._make, zip(*fields, strict=True))
    for n, (request_id, delivery) in enumerate(zip(request_ids, deliveries, strict=True), 1):
        try:
            result = ack(delivery, now_ms)
        except ServiceError as error:
            failures.append((request_id, error))
        else:
            results.append((request_id, result))
            count(delivery[1], delivery[0], result)
        if n % SLICE_REQUESTS == 0:
            yield


def _reply_acks(frame: pb.ReplyFrame, results: Sequence[Result], _: ReplySource) -> int:
    request_ids: Iterable[int]
    outcomes: Iterable[AckResult]
    request_ids, outcomes = zip(*results, strict=True)
    frame.acks.request_ids.extend(request_ids)
    # The numbers of both enums are equal.
    frame.acks.results.extend(map(pb.AckResult.ValueType, outcomes))
    return 0


# ---------------------------------------------------------------- pops


def _apply_pops(
    context: FrameContext, _results: list[Result], requests: Iterable[pb.PopRequest]
) -> Iterator[None]:
    turn, pops = context.turn, context.pops
    for request in requests:
        context.traffic.polled(TopicId(request.topic_id), GroupId(request.group_id))
        try:
            wanted = find_filter(request.tags, request.sql)
        except IllegalFilter as error:
            context.replies.failures.append((request.request_id, error))
            continue
        pop = PopPoll(
            request_id=request.request_id,
            group_id=request.group_id,
            topic_id=request.topic_id,
            max_messages=request.max_messages,
            invisible_duration_ms=request.invisible_duration_ms,
            wanted=wanted,
            attempt_id=request.attempt_id,
            client=ClientKey(request.client_id, request.owner),
            renews=request.renews,
            wants_remaining=request.wants_remaining,
            level_min=request.level_min,
            priority_factor=(
                request.priority_factor if request.HasField("priority_factor") else None
            ),
            level_below=request.level_below,
            arrived_s=context.arrived_s,
        )
        turn.polls.filters.note(
            pop.group_id,
            pop.topic_id,
            pop.wanted,
            pop.client.client_id,
            catalog=turn.engine.catalog,
            monotonic_ms=turn.monotonic_ms,
        )
        while turn.engine.consumption.prepare_pop(GroupId(pop.group_id), TopicId(pop.topic_id)):
            yield
        pops.begin_pop(pop, request.poll_duration_ms, turn)
        yield


def _reply_pops(frame: pb.ReplyFrame, results: Sequence[Result], source: ReplySource) -> int:
    size = 0
    for pop, batches in results:
        reply = frame.pops.add(request_id=pop.request_id, was_parked=pop.is_parked)
        for batch in batches:
            size += _add_batch(reply, pop, batch, source)
        if pop.wants_remaining:
            _add_remaining(reply, pop, source)
    return size


def _add_remaining(reply: pb.PopReply, pop: PopPoll, source: ReplySource) -> None:
    """Add the levels of the messages that are left; with a filter they are unknown."""
    if pop.wanted is not EVERY_MESSAGE:
        return
    group_id, topic_id = GroupId(pop.group_id), TopicId(pop.topic_id)
    ready = source.engine.consumption.remaining_count(group_id, topic_id)
    if ready is not None:
        reply.remaining.ready_count = ready.ready_count
        if ready.levels is not None:
            reply.remaining.levels.CopyFrom(pb.ReadyLevels(**ready.levels._asdict()))


def _add_batch(reply: pb.PopReply, pop: PopPoll, batch: DeliveryBatch, source: ReplySource) -> int:
    """Add one batch with its messages; return their size in bytes."""
    batch, records = source.engine.consumption.read_batch(batch)
    if not records:
        return 0
    # One constructor call copies the messages; fields one by one cost a call each.
    blobs = [bytes(record.blob) for record in records]
    target = reply.batches.add(
        slot=batch.slot,
        delivery_id=batch.delivery_id,
        popped_at_ms=batch.popped_at_ms,
        visible_at_ms=batch.visible_at_ms,
        queue_id=batch.queue_id,
        indexes=batch.indexes,
        queue_offsets=batch.queue_offsets,
        stored_at_ms=[record.stored_at_ms for record in records],
        delivery_attempts=batch.delivery_attempts,
        blobs=blobs,
    )
    origins = [record.origin_topic for record in records]
    if any(origins):
        target.origin_topics.extend(origins)
    size = sum(map(len, blobs))
    topic_id, group_id = TopicId(pop.topic_id), GroupId(pop.group_id)
    source.traffic.delivered(topic_id, group_id, batch.delivery_attempts, size)
    waits_ms = [batch.popped_at_ms - record.stored_at_ms for record in records]
    source.traffic.handed_over(topic_id, group_id, waits_ms, blobs)
    return size


def _observe_polls(
    name: str,
    results: Sequence[Result],
    latencies: Histogram[Labels],
    _arrived_s: float,
    now_s: float,
) -> None:
    # Each from its own arrival: a parked poll came with an earlier frame.
    for request, _ in results:
        labels = ("grpc", name, _OK, "true" if request.is_parked else "false", "success")
        latencies.observe(labels, (now_s - request.arrived_s) * 1000)


# ---------------------------------------------------------------- notifications


def _apply_notifications(
    context: FrameContext, _results: list[Result], requests: Iterable[pb.NotificationRequest]
) -> Iterator[None]:
    for request in requests:
        try:
            wanted = find_filter(request.tags, request.sql)
        except IllegalFilter as error:
            context.replies.failures.append((request.request_id, error))
            continue
        notification = NotificationPoll(
            request_id=request.request_id,
            group_id=request.group_id,
            topic_id=request.topic_id,
            wanted=wanted,
            level_min=request.level_min,
            arrived_s=context.arrived_s,
        )
        context.pops.begin_notification(notification, request.poll_duration_ms, context.turn)
        yield


def _reply_notifications(
    frame: pb.ReplyFrame, results: Sequence[Result], _source: ReplySource
) -> int:
    for notification, ready in results:
        frame.notifications.add(
            request_id=notification.request_id,
            ready_count=ready.ready_count,
            is_unsure=ready.is_unsure,
            levels=ready.levels and pb.ReadyLevels(**ready.levels._asdict()),
        )
    return 0


# ---------------------------------------------------------------- one by one


def _delivery(request: pb.ChangeInvisibleRequest | pb.DeadLetterRequest) -> Delivery:
    return Delivery(
        group_id=GroupId(request.group_id),
        topic_id=TopicId(request.topic_id),
        slot=DeliverySlot(request.slot),
        delivery_id=LogOffset(request.delivery_id),
        message_index=request.index,
        visible_at_ms=request.visible_at_ms,
        owner=request.owner,
    )


def _change_invisible(request: pb.ChangeInvisibleRequest, turn: Turn) -> Delivery:
    if request.gives_back:
        return turn.engine.commands.give_back(
            _delivery(request),
            invisible_duration_ms=request.invisible_duration_ms,
            now_ms=turn.now_ms,
        )
    return turn.engine.commands.change_invisible(
        _delivery(request),
        invisible_duration_ms=request.invisible_duration_ms,
        suspend=request.suspend,
        now_ms=turn.now_ms,
    )


def _change_invisible_again(request: pb.ChangeInvisibleRequest, turn: Turn) -> Delivery:
    if request.gives_back:
        return _change_invisible(request, turn)
    return turn.engine.commands.change_invisible_again(
        _delivery(request),
        invisible_duration_ms=request.invisible_duration_ms,
        suspend=request.suspend,
        now_ms=turn.now_ms,
    )


def _add_change(frame: pb.ReplyFrame, request_id: int, delivery: Delivery) -> None:
    frame.changes.add(
        request_id=request_id,
        slot=delivery.slot,
        delivery_id=delivery.delivery_id,
        visible_at_ms=delivery.visible_at_ms,
    )


def _dead_letter(request: pb.DeadLetterRequest, turn: Turn) -> None:
    turn.engine.commands.dead_letter(_delivery(request), turn.now_ms)


def _dead_letter_again(request: pb.DeadLetterRequest, turn: Turn) -> None:
    turn.engine.commands.dead_letter_again(_delivery(request), turn.now_ms)


def _ensure(request: pb.EnsureRequest, turn: Turn) -> None:
    catalog = turn.engine.catalog
    topic, group = catalog.find_topic(request.topic), catalog.find_group(request.group)
    turn.engine.administration.ensure(request.topic, request.group, turn.now_ms)
    if topic is None and (made := catalog.find_topic(request.topic)):
        config_log.topic_created_by_use(made, catalog.topic_ids)
    if group is None and (joined := catalog.find_group(request.group)):
        config_log.group_created_by_use(joined, catalog.group_ids)


def _found(request: pb.FoundClusterRequest, turn: Turn) -> None:
    addresses = {member.name: member.address for member in request.members}
    before = turn.engine.catalog.membership.home
    turn.engine.broker_groups.found(addresses, turn.now_ms)
    if before is None:
        config_log.cluster_founded(turn.engine.catalog.membership)


def _cancel_timer(request: pb.RecallRequest, turn: Turn) -> None:
    turn.engine.timers.commands.cancel(
        TimerId(request.timer_id), topic_id=TopicId(request.topic_id), now_ms=turn.now_ms
    )


# ---------------------------------------------------------------- transactions


def _send_half(request: pb.HalfRequest, turn: Turn) -> int | RepeatedSend:
    sender = HalfSender(ClientKey(request.client_id, request.owner), request.first_check_ms or None)
    sent = turn.engine.commands.send_unless_repeated(
        TopicId(request.topic_id),
        QueueId(request.queue_id),
        request.blob,
        request.crc,
        now_ms=turn.now_ms,
        firing_ms=turn.firing_ms,
        sender=sender,
        key_version=request.key_version,
    )
    return sent if isinstance(sent, RepeatedSend) else sent[0]


def _add_half(frame: pb.ReplyFrame, request_id: int, result: int | RepeatedSend) -> None:
    if isinstance(result, RepeatedSend):
        repeat = repeated_key(result, request_id)
        frame.halves.add(request_id=request_id, half_id=repeat.half_id, repeat=repeat)
    else:
        frame.halves.add(request_id=request_id, half_id=result)


def _end_transaction(request: pb.EndTransactionRequest, turn: Turn) -> None:
    transactions = turn.engine.transactions
    half_id, topic_id = HalfId(request.half_id), TopicId(request.topic_id)
    match request.resolution:
        case pb.RESOLUTION_COMMIT:
            transactions.commit(
                half_id, topic_id=topic_id, now_ms=turn.now_ms, firing_ms=turn.firing_ms
            )
        case pb.RESOLUTION_ROLLBACK:
            transactions.roll_back(half_id, topic_id=topic_id, now_ms=turn.now_ms)
        case _:
            transactions.note_unsure(half_id, topic_id=topic_id)


# ---------------------------------------------------------------- dedup keys


def _look_up_key(request: pb.KeyLookup, turn: Turn) -> KeyLookup:
    engine = turn.engine
    if not request.key:
        raise BadRequest("a lookup has a key")
    topic = engine.catalog.topics.get(TopicId(request.topic_id))
    if topic is None:
        raise TopicNotFound("the topic was deleted; query its route again")
    placement = config_frames.read_key_placement(request.placement)
    topic = engine.key_spreads.fence(topic, placement, turn.now_ms)
    return engine.deduplication.look_up(
        topic,
        request.key,
        request.body_crc,
        version=placement.version,
        is_message_id=request.is_message_id,
    )


def _add_key_lookup(frame: pb.ReplyFrame, request_id: int, result: KeyLookup) -> None:
    reply = frame.key_lookups.add(request_id=request_id, is_replaceable=result.is_replaceable)
    if result.repeat is not None:
        first = result.repeat.first
        reply.repeat.CopyFrom(repeated_key(result.repeat, request_id))
        reply.queue_offset, reply.due_at_ms = first.queue_offset, first.due_at_ms


# ---------------------------------------------------------------- the table

APPEND: Final = BrokerCommand(
    name="append",
    request_field="appends",
    reply_field="appends",
    apply=_apply_appends,
    reply=_reply_appends,
    columns=_append_columns,
)
ACK: Final = BrokerCommand(
    name="ack",
    request_field="acks",
    reply_field="acks",
    apply=_apply_acks,
    reply=_reply_acks,
    columns=_ack_columns,
)
CHANGE_INVISIBLE: Final = _one_by_one(
    "change_invisible",
    "changes",
    "changes",
    _change_invisible,
    _add_change,
    repeat=_change_invisible_again,
)
DEAD_LETTER: Final = _one_by_one(
    "dead_letter",
    "dead_letters",
    "dead_letters",
    _dead_letter,
    lambda frame, request_id, _: frame.dead_letters.add(request_id=request_id),
    repeat=_dead_letter_again,
)
ENSURE: Final = _one_by_one(
    "ensure",
    "ensures",
    "ensures",
    _ensure,
    lambda frame, request_id, _: frame.ensures.add(request_id=request_id),
)
CANCEL_TIMER: Final = _one_by_one(
    "cancel_timer",
    "timer_cancels",
    "cancelled_timers",
    _cancel_timer,
    lambda frame, request_id, _: frame.cancelled_timers.append(request_id),
)
FOUND: Final = _one_by_one(
    "found",
    "founds",
    "founded",
    _found,
    lambda frame, request_id, _: frame.founded.append(request_id),
)
HALF: Final = _one_by_one("half", "halves", "halves", _send_half, _add_half)
END_TRANSACTION: Final = _one_by_one(
    "end_transaction",
    "transaction_ends",
    "ended_transactions",
    _end_transaction,
    lambda frame, request_id, _: frame.ended_transactions.append(request_id),
)
LOOK_UP_KEY: Final = _one_by_one(
    "look_up_key", "key_lookups", "key_lookups", _look_up_key, _add_key_lookup
)
_POP_ROW: Final = BrokerCommand(
    name=POP,
    request_field="pops",
    reply_field="pops",
    apply=_apply_pops,
    reply=_reply_pops,
    observe=_observe_polls,
    is_large=True,
)
_NOTIFICATION_ROW: Final = BrokerCommand(
    name=NOTIFICATION,
    request_field="notifications",
    reply_field="notifications",
    apply=_apply_notifications,
    reply=_reply_notifications,
    observe=_observe_polls,
)

# Requests of one frame are applied in this order: a pop finds the messages of its own frame, and a
# notification counts the messages that the pops have left.
COMMANDS: Final = (
    APPEND,
    ACK,
    CHANGE_INVISIBLE,
    DEAD_LETTER,
    ENSURE,
    CANCEL_TIMER,
    HALF,
    END_TRANSACTION,
    LOOK_UP_KEY,
    FOUND,
    _POP_ROW,
    _NOTIFICATION_ROW,
)
