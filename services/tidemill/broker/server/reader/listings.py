"""BrokerReader's listings: queues, progress, delayed messages and deliveries (ADR 0046).

A page is gathered in slices. Each slice is a call in a round, and a round has a slice of one page
only, so that rounds stay short. A page is returned when the last of its rounds is committed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, TypeVar, final

from tidemill.broker.engine.queries.in_flight import InFlightFilter, QueuePosition
from tidemill.broker.engine.timer.pending import PendingQuery
from tidemill.broker.engine.timer.status import DueRange
from tidemill.broker.server.reader.event_pages import EventPages
from tidemill.broker.server.reader.progress_pages import ProgressPage
from tidemill.broker.server.reader.queue_pages import QueuePage, describe_log, topic_filter
from tidemill.broker.server.round.rpc import read_in_round, rpc_error
from tidemill.common.errors import BadRequest, GroupNotFound, ServiceError, TopicNotFound
from tidemill.message import limits
from tidemill.message.resource_names import HIDDEN_TOPIC_PREFIX
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.layout.numbers import GroupId, TopicId
    from tidemill.broker.engine.metadata.catalog import Catalog
    from tidemill.broker.engine.queries.in_flight import InFlight, InFlightListing
    from tidemill.broker.engine.timer.pending import PendingTimer, PendingWalk
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn

T = TypeVar("T")
Id = TypeVar("Id", "GroupId", "TopicId")
_ListRequest = pb.ListPendingRequest | pb.ListInFlightRequest | pb.ListProgressRequest
_ListReply = pb.ListPendingReply | pb.ListInFlightReply | pb.ListProgressReply

ITEMS_A_PAGE: Final = 1_000  # delayed messages or deliveries
CURSOR_DIGITS_MAX: Final = 18  # of each number, which then fits into 64 bits
NAMES_A_SLICE: Final = 1_024  # looked up: a quarter of a millisecond


@final
class BrokerReader:
    """Pages of queues, events, progress, delayed messages and deliveries."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._events = EventPages(rounds)
        # With many callers, a round still does one slice of one page.
        self._one_by_one = asyncio.Lock()

    async def GetQueues(self, request: pb.GetQueuesRequest) -> pb.BrokerGroupQueues:
        """Return a page of queues with their offsets and sizes in the log."""
        _check(limits.NAMES.check_count, len(request.topics))
        _check(limits.TOPIC_PATTERN.check_text, request.topic_pattern)
        is_requested = topic_filter(request.topics, request.topic_pattern)
        page = QueuePage(is_requested, *_numbers(request.cursor, count=2))

        def begin(engine: Engine, _turn: Turn) -> None:
            describe_log(engine, page.reply)
            if request.with_groups and not request.cursor:
                page.reply.groups.extend(group.name for group in engine.catalog.groups.values())
            if request.topic_pattern:
                page.add_topics(engine.catalog.topics)
            elif not request.without_queues:
                found = map(engine.catalog.find_topic, request.topics)
                page.add_topics({topic.id for topic in found if topic is not None})

        await self._slice(begin)
        if not request.without_queues:
            while await self._slice(lambda engine, _turn: page.step(engine)):
                pass
        return page.reply

    async def ReadEvents(self, request: pb.ReadEventsRequest) -> pb.ReadEventsReply:
        """Return a page of events of messages, in the order of the log."""
        return await self._events.read(request)

    async def ListProgress(self, request: pb.ListProgressRequest) -> pb.ListProgressReply:
        """Return a page of the progress of consumer groups in their queues."""
        page = ProgressPage(*_numbers(request.cursor, count=3))
        named = await self._named(request, page.reply, request.groups, _id_of_group, _no_group)

        def begin(engine: Engine, _turn: Turn) -> None:
            page.add_groups(engine.catalog.groups if named is None else named)

        await self._slice(begin)
        while await self._slice(lambda engine, _turn: page.step(engine)):
            pass
        return page.reply

    async def ListPending(self, request: pb.ListPendingRequest) -> pb.ListPendingReply:
        """Return a page of pending delayed messages, by timer id."""
        (from_id,) = _numbers(request.cursor, count=1)
        reply = pb.ListPendingReply()
        topic_ids = await self._named(request, reply, request.topics, _id_of_topic, _no_topic)

        def begin(engine: Engine, _turn: Turn) -> PendingWalk:
            return engine.timers.commands.pending(
                PendingQuery(
                    from_id=from_id,
                    topic_ids=topic_ids,
                    due=DueRange(request.due_from_ms, request.due_until_ms),
                    with_messages=request.with_messages,
                    max_timers=ITEMS_A_PAGE,
                )
            )

        walk = await self._slice(begin)
        while await self._slice(lambda _engine, _turn: walk.step()):
            pass

        def render(engine: Engine, _turn: Turn) -> None:
            reply.items.extend(_pending(engine, timer) for timer in walk.found)

        await self._slice(render)
        reply.cursor = "" if walk.next_id is None else str(walk.next_id)
        reply.damaged_count = walk.damaged_count
        return reply

    async def ListInFlight(self, request: pb.ListInFlightRequest) -> pb.ListInFlightReply:
        """Return a page of deliveries in flight, by queue."""
        first = QueuePosition(*_numbers(request.cursor, count=4))
        reply = pb.ListInFlightReply()
        group_ids = await self._named(request, reply, request.groups, _id_of_group, _no_group)

        def begin(engine: Engine, _turn: Turn) -> InFlightListing[QueuePosition]:
            return engine.inspection.in_flight_by_queue(
                InFlightFilter(group_ids), first=first, max_messages=ITEMS_A_PAGE
            )

        listing = await self._slice(begin)

        def step(engine: Engine, turn: Turn) -> bool:
            has_more = listing.step(turn.now_ms)
            found = (_in_flight(engine, one) for one in listing.take())
            reply.items.extend(one for one in found if one is not None)
            return has_more

        while await self._slice(step):
            pass
        reply.cursor = ".".join(map(str, listing.next_position or ()))
        return reply

    async def _named(
        self,
        request: _ListRequest,
        reply: _ListReply,
        names: Collection[str],
        find_id: Callable[[Catalog, str], Id | None],
        error_of: Callable[[str], ServiceError],
    ) -> frozenset[Id] | None:
        """Return the ids of the requested names; None if the request has no names and means all.

        A missing name ends the call with `error_of(name)`, unless the request skips missing names.
        """
        if not names:
            return None
        ids, missing = await self._look_up(names, find_id)
        if missing and not request.skips_missing:
            raise rpc_error(error_of(missing[0]))
        reply.missing.extend(missing)
        return ids

    async def _look_up(
        self, names: Collection[str], find_id: Callable[[Catalog, str], Id | None]
    ) -> tuple[frozenset[Id], list[str]]:
        """Return the ids of the existing names, and the missing names, each once."""
        _check(limits.NAMES.check_count, len(names))
        remaining = deque(dict.fromkeys(names))
        ids: set[Id] = set()
        missing: list[str] = []

        def look_up(engine: Engine, _turn: Turn) -> bool:
            for _ in range(min(NAMES_A_SLICE, len(remaining))):
                name = remaining.popleft()
                id_ = find_id(engine.catalog, name)
                if id_ is None:
                    missing.append(name)
                else:
                    ids.add(id_)
            return bool(remaining)

        while await self._slice(look_up):
            pass
        return frozenset(ids), missing

    async def _slice(self, function: Callable[[Engine, Turn], T]) -> T:
        """Do one slice of a page in a round; its ServiceError ends the call."""
        async with self._one_by_one:
            return await read_in_round(self._rounds, function)


def _id_of_topic(catalog: Catalog, name: str) -> TopicId | None:
    return None if name.startswith(HIDDEN_TOPIC_PREFIX) else catalog.topic_ids.get(name)


def _no_topic(name: str) -> ServiceError:
    return TopicNotFound(f"there is no topic {name!r}")


def _no_group(name: str) -> ServiceError:
    return GroupNotFound(f"there is no consumer group {name!r}")


def _id_of_group(catalog: Catalog, name: str) -> GroupId | None:
    return catalog.group_ids.get(name)


def _pending(engine: Engine, timer: PendingTimer) -> pb.Pending:
    topic = engine.catalog.topics.get(timer.topic_id)
    return pb.Pending(
        topic=topic.name if topic is not None else "",
        timer_id=timer.timer_id,
        message_id=timer.message_id,
        due_at_ms=timer.due_at_ms,
        scheduled_at_ms=timer.scheduled_at_ms,
        log_position=timer.log_offset,
        message=timer.blob,
        wheel_slot=timer.wheel_slot,
    )


def _in_flight(engine: Engine, one: InFlight) -> pb.InFlight | None:
    group = engine.catalog.groups.get(one.delivery.group_id)
    topic = engine.catalog.topics.get(one.delivery.topic_id)
    if group is None or topic is None:
        return None  # Deleted since.
    return pb.InFlight(
        consumer_group=group.name,
        topic=topic.name,
        queue_id=one.queue_id,
        queue_offset=one.queue_offset,
        message_id=one.message_id,
        attempt=one.delivery_attempt,
        popped_at_ms=one.popped_at_ms,
        invisible_until_ms=one.delivery.visible_at_ms,
        client_id=one.client_id,
        delivery_id=one.delivery.delivery_id,
        delivery_index=one.delivery.message_index,
        is_retry=one.is_retry,
    )


def _check(check: Callable[[T], None], value: T) -> None:
    """Call a check; its BadRequest ends the call."""
    try:
        check(value)
    except BadRequest as error:
        raise rpc_error(error) from error


def _numbers(cursor: str, *, count: int) -> list[int]:
    """Return the numbers of a cursor, which are separated by dots; zeros if it is empty."""
    parts = cursor.split(".") if cursor else ["0"] * count
    is_valid = all(
        each.isascii() and each.isdigit() and len(each) <= CURSOR_DIGITS_MAX for each in parts
    )
    if len(parts) != count or not is_valid:
        raise rpc_error(BadRequest("the cursor is invalid; use the cursor of the previous page"))
    return [int(each) for each in parts]
