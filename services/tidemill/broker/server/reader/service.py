"""BrokerReader: what is read beside consumers, page by page (ADR 0046).

A page is gathered in slices, each a call of its own in a round, so that the owner's turns stay
short, and of all pages a round has one; a page leaves when the last of its rounds is committed.
"""

from __future__ import annotations

import asyncio
import fnmatch
import re
from collections import deque
from typing import TYPE_CHECKING, Final, TypeVar

from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.queries.all_in_flight import PlaceInQueues
from tidemill.broker.engine.tally import Allowance
from tidemill.broker.engine.timer.pending import PendingQuery
from tidemill.broker.server.reader.event_pages import EventPages
from tidemill.broker.server.reader.log_id import log_id_of
from tidemill.broker.server.reader.progress_pages import ProgressPage
from tidemill.broker.server.round.rpc import in_round, rpc_error
from tidemill.common.errors import BadRequest, GroupNotFound, ServiceError, TopicNotFound
from tidemill.message import limits
from tidemill.message.resource_names import DEAD_LETTER_TOPIC_PREFIX, HIDDEN_TOPIC_PREFIX
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.layout.numbers import GroupId, TopicId
    from tidemill.broker.engine.metadata.catalog import Catalog, Topic
    from tidemill.broker.engine.queries.all_in_flight import InFlightWalk
    from tidemill.broker.engine.queries.in_flight import InFlight
    from tidemill.broker.engine.timer.pending import PendingTimer, PendingWalk
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn

T = TypeVar("T")
Id = TypeVar("Id", "GroupId", "TopicId")
_Listing = pb.ListPendingRequest | pb.ListInFlightRequest | pb.ListProgressRequest
_Listed = pb.ListPendingReply | pb.ListInFlightReply | pb.ListProgressReply

QUEUES_A_PAGE: Final = 4_096  # some 80 bytes each
TOPICS_A_SLICE: Final = 1_024  # whose names are compared
QUEUES_A_SLICE: Final = 256  # fewer where their sizes have to be estimated
ENTRIES_A_SLICE: Final = 4_096  # of queues, read for these estimates: about a millisecond
ITEMS_A_PAGE: Final = 1_000  # delayed messages, or those in flight
CURSOR_DIGITS_MAX: Final = 18  # of each of its numbers, which 64 bits hold for sure
NAMES_A_SLICE: Final = 1_024  # that are looked up: a quarter of a millisecond


class BrokerReader:
    """The gRPC face of the engine to those who read."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._events = EventPages(rounds)
        # However many list, a round does a slice of one of them: nobody else waits for more.
        self._one_by_one = asyncio.Lock()

    async def GetQueues(self, request: pb.GetQueuesRequest) -> pb.BrokerGroupQueues:
        """Return where queues begin and end, and how much of the log they take."""
        wanted = _wanted_topics(request)
        page = _QueuePage(wanted, *_numbers(request.cursor, count=2))

        def begin(engine: Engine, _turn: Turn) -> None:
            _describe_log(engine, page.reply)
            if request.with_groups and not request.cursor:
                page.reply.groups.extend(group.name for group in engine.catalog.groups.values())
            if request.topic_pattern:
                page.look_at(engine.catalog.topics)
            elif not request.without_queues:
                found = map(engine.catalog.find_topic, request.topics)
                page.look_at({topic.id for topic in found if topic is not None})

        await self._slice(begin)
        if not request.without_queues:
            while await self._slice(lambda engine, _turn: page.step(engine)):
                pass
        return page.reply

    async def ReadEvents(self, request: pb.ReadEventsRequest) -> pb.ReadEventsReply:
        """Return what happened to messages, in the order of the log."""
        return await self._events.read(request)

    async def ListProgress(self, request: pb.ListProgressRequest) -> pb.ListProgressReply:
        """Return how far groups are in the queues that they read."""
        page = ProgressPage(*_numbers(request.cursor, count=3))
        named = await self._named(request, page.reply, request.groups, _id_of_group, _no_group)

        def begin(engine: Engine, _turn: Turn) -> None:
            page.look_at(engine.catalog.groups if named is None else named)

        await self._slice(begin)
        while await self._slice(lambda engine, _turn: page.step(engine)):
            pass
        return page.reply

    async def ListPending(self, request: pb.ListPendingRequest) -> pb.ListPendingReply:
        """Return delayed messages that wait, in the order of their timers' ids."""
        (from_id,) = _numbers(request.cursor, count=1)
        reply = pb.ListPendingReply()
        topic_ids = await self._named(request, reply, request.topics, _id_of_topic, _no_topic)

        def begin(engine: Engine, _turn: Turn) -> PendingWalk:
            return engine.timers.commands.pending(
                PendingQuery(
                    from_id=from_id,
                    topic_ids=topic_ids,
                    due_from_ms=request.due_from_ms,
                    due_until_ms=request.due_until_ms,
                    with_messages=request.with_messages,
                    max_timers=ITEMS_A_PAGE,
                )
            )

        walk = await self._slice(begin)
        while await self._slice(lambda _engine, _turn: walk.step()):
            pass

        def tell(engine: Engine, _turn: Turn) -> None:
            reply.items.extend(_pending(engine, timer) for timer in walk.found)

        await self._slice(tell)
        reply.cursor = "" if walk.next_id is None else str(walk.next_id)
        reply.damaged_count = walk.damaged_count
        return reply

    async def ListInFlight(self, request: pb.ListInFlightRequest) -> pb.ListInFlightReply:
        """Return what groups have popped and not settled, in the order of their queues."""
        first = PlaceInQueues(*_numbers(request.cursor, count=4))
        reply = pb.ListInFlightReply()
        group_ids = await self._named(request, reply, request.groups, _id_of_group, _no_group)

        def begin(engine: Engine, _turn: Turn) -> InFlightWalk:
            return engine.inspection.all_in_flight(
                group_ids, first=first, max_messages=ITEMS_A_PAGE
            )

        walk = await self._slice(begin)
        while await self._slice(lambda _engine, turn: walk.step(turn.now_ms)):
            pass

        def tell(engine: Engine, _turn: Turn) -> None:
            found = (_in_flight(engine, one) for one in walk.found)
            reply.items.extend(one for one in found if one is not None)

        await self._slice(tell)
        reply.cursor = ".".join(map(str, walk.next_place or ()))
        return reply

    async def _named(
        self,
        request: _Listing,
        reply: _Listed,
        names: Collection[str],
        find_id: Callable[[Catalog, str], Id | None],
        refuse: Callable[[str], ServiceError],
    ) -> frozenset[Id] | None:
        """Return the ids of what a request names; None: it names nothing, and so means all.

        Ends the call with what `refuse` makes of a name, unless it skips the missing.
        """
        if not names:
            return None
        ids, missing = await self._look_up(names, find_id)
        if missing and not request.skips_missing:
            raise rpc_error(refuse(missing[0]))
        reply.missing.extend(missing)
        return ids

    async def _look_up(
        self, names: Collection[str], find_id: Callable[[Catalog, str], Id | None]
    ) -> tuple[frozenset[Id], list[str]]:
        """Return the ids of what there is, and the names of what there is not, each once."""
        _check(limits.NAMES.check_count, len(names))
        left = deque(dict.fromkeys(names))
        ids: set[Id] = set()
        missing: list[str] = []

        def look(engine: Engine, _turn: Turn) -> bool:
            for _ in range(min(NAMES_A_SLICE, len(left))):
                name = left.popleft()
                id_ = find_id(engine.catalog, name)
                if id_ is None:
                    missing.append(name)
                else:
                    ids.add(id_)
            return bool(left)

        while await self._slice(look):
            pass
        return frozenset(ids), missing

    async def _slice(self, function: Callable[[Engine, Turn], T]) -> T:
        """Do a slice of a page in a round; its refusal ends the call."""
        async with self._one_by_one:
            return await in_round(self._rounds, function)


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


class _QueuePage:
    """A page of queues that is being gathered."""

    def __init__(self, wanted: Callable[[Topic], bool], topic_id: int, queue_id: int) -> None:
        """Begin with a queue of a topic, or with what comes behind it."""
        self._wanted = wanted
        self._first = topic_id, queue_id
        self._topic_ids: deque[TopicId] = deque()  # that are not looked at yet
        self._queues: deque[tuple[Topic, int]] = deque()  # that are wanted, and not described
        self.reply = pb.BrokerGroupQueues()

    def look_at(self, topic_ids: Iterable[TopicId]) -> None:
        """Take the ids of what may be wanted."""
        self._topic_ids.extend(sorted(id_ for id_ in topic_ids if id_ >= self._first[0]))

    def step(self, engine: Engine) -> bool:
        """Do one slice; True while there is more to do."""
        if not self._queues:
            return self._choose(engine)
        allowance = Allowance(engine.tally, items=ENTRIES_A_SLICE)
        left = min(QUEUES_A_SLICE, len(self._queues))
        while left and not allowance.is_spent:
            topic, number = self._queues[0]
            if len(self.reply.queues) >= QUEUES_A_PAGE:
                self.reply.cursor = f"{topic.id}.{number}"
                return False
            self._queues.popleft()
            left -= 1
            if engine.catalog.is_alive(topic.id):
                self._describe(engine, topic, QueueId(number))
        return True

    def _choose(self, engine: Engine) -> bool:
        topic_id, queue_id = self._first
        for _ in range(min(TOPICS_A_SLICE, len(self._topic_ids))):
            topic = engine.catalog.topics.get(self._topic_ids.popleft())
            if topic is None or not self._wanted(topic):
                continue
            first = queue_id if topic.id == topic_id else 0
            self._queues.extend((topic, number) for number in range(first, topic.queues))
            if len(self._queues) >= QUEUES_A_PAGE:
                break
        return bool(self._queues or self._topic_ids)

    def _describe(self, engine: Engine, topic: Topic, number: QueueId) -> None:
        queue = engine.catalog.queue(topic.id, number)
        self.reply.queues.add(
            topic=topic.name,
            topic_id=topic.id,
            queue_id=number,
            min_offset=queue.min_offset,
            max_offset=queue.max_offset,
            bytes=engine.inspection.log_bytes(queue),
        )


def _describe_log(engine: Engine, reply: pb.BrokerGroupQueues) -> None:
    reply.broker = engine.catalog.broker_name
    reply.log_min, reply.log_end = engine.log.min_offset, engine.log.committed_offset
    engine.events.record_starts.note(engine.log.committed_offset)
    reply.log_id = log_id_of(engine)


def _wanted_topics(request: pb.GetQueuesRequest) -> Callable[[Topic], bool]:
    """Return which topics a request is about."""
    _check(limits.NAMES.check_count, len(request.topics))
    _check(limits.TOPIC_PATTERN.check_text, request.topic_pattern)
    names = frozenset(request.topics)
    # No part of it is tried a second time: it takes no longer than the name is long, about.
    pattern = re.compile(fnmatch.translate(request.topic_pattern))

    def is_wanted(topic: Topic) -> bool:
        if topic.name.startswith(HIDDEN_TOPIC_PREFIX):
            return False
        if topic.name in names:
            return True
        if topic.is_system and not topic.name.startswith(DEAD_LETTER_TOPIC_PREFIX):
            return False
        return bool(request.topic_pattern) and pattern.match(topic.name) is not None

    return is_wanted


def _check(check: Callable[[T], None], value: T) -> None:
    """Call a check; its refusal ends the call."""
    try:
        check(value)
    except BadRequest as error:
        raise rpc_error(error) from error


def _numbers(cursor: str, *, count: int) -> list[int]:
    """Take a cursor of ours apart: numbers with dots between; zeros where there is none."""
    parts = cursor.split(".") if cursor else ["0"] * count
    is_ours = all(
        each.isascii() and each.isdigit() and len(each) <= CURSOR_DIGITS_MAX for each in parts
    )
    if len(parts) != count or not is_ours:
        raise rpc_error(BadRequest("the cursor is not one of an answer"))
    return [int(each) for each in parts]
