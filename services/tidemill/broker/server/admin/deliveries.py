"""BrokerAdmin's look at what is in flight, and its release by an operator."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.queries.in_flight import Place, Wanted
from tidemill.broker.server.admin.service import find_group, find_topic
from tidemill.broker.server.round.rpc import in_round
from tidemill.broker.server.wire import config_log
from tidemill.common.errors import BadRequest, InvalidReceiptHandle, Overloaded
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.queries.in_flight import InFlight, InFlightLook
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn

PAGE_MAX: Final = 1_000  # messages of one call, whatever is asked for
RELEASED_MAX: Final = 1_000  # messages of one call: a record each, and later a copy


class DeliveryAdmin:
    """Shows the deliveries of a group or a client, and takes a group's from its consumers."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    async def GetDeliveries(self, request: pb.GetDeliveriesRequest) -> pb.GetDeliveriesReply:
        """Return some of what a group has in flight, in the order of the pops.

        The look takes a round a slice, so that nobody waits for it.
        """
        count = min(request.page_size or PAGE_MAX, PAGE_MAX)

        def begin(engine: Engine, _turn: Turn) -> InFlightLook:
            return _look(engine, request.filter, _after(request), max_messages=count)

        look, reply, has_more = await in_round(self._rounds, begin), pb.GetDeliveriesReply(), True

        def step(engine: Engine, turn: Turn) -> bool:
            more = look.step(turn.now_ms)
            reply.deliveries.extend([_told(engine, one) for one in look.take()])
            return more

        while has_more:
            has_more = await in_round(self._rounds, step)
        if look.end is not None:
            reply.end.CopyFrom(_place(look.end))
        return reply

    async def GetHeld(self, request: pb.GetHeldRequest) -> pb.GetHeldReply:
        """Return what a client has in flight."""

        def count(engine: Engine, _turn: Turn) -> pb.GetHeldReply:
            return pb.GetHeldReply(
                in_flight_count=engine.inspection.in_flight_of(request.client_id)
            )

        return await in_round(self._rounds, count)

    async def ReleaseDeliveries(
        self, request: pb.ReleaseDeliveriesRequest
    ) -> pb.ReleaseDeliveriesReply:
        """Give some of what a group has in flight back at once, or count it.

        As when its time is up the delivery counts as an attempt; but its handles are refused from
        here on. Where the table of deliveries has no room for more of them the page ends there, and
        the next one says why if that is still so. Raises Overloaded where none was released.
        """
        reply, has_more = pb.ReleaseDeliveriesReply(), True
        last: Place | None = _after(request)

        def begin(engine: Engine, _turn: Turn) -> InFlightLook:
            # What is popped from here on is none of it: it may be what was released.
            reply.before_id = request.before_id or engine.log.log_end
            return _look(
                engine,
                request.filter,
                _after(request),
                max_messages=RELEASED_MAX,
                before_id=reply.before_id,
            )

        look = await in_round(self._rounds, begin)

        def step(engine: Engine, turn: Turn) -> bool:
            nonlocal last
            more = look.step(turn.now_ms)
            for found in look.take():
                if request.dry_run:
                    reply.count += 1
                    continue
                try:
                    # Who was acked in this round has nothing to release.
                    with contextlib.suppress(InvalidReceiptHandle):
                        engine.commands.release(found.delivery, turn.now_ms)
                        reply.count += 1
                except Overloaded:
                    if not reply.count or last is None:
                        raise
                    look.end = last
                    return False
                last = found.place
            return more

        try:
            while has_more:
                has_more = await in_round(self._rounds, step)
        finally:
            if reply.count and not request.dry_run:
                config_log.deliveries_released(request.filter, reply.count, by=request.asked_by)
        if look.end is not None:
            reply.end.CopyFrom(_place(look.end))
        return reply


def _look(
    engine: Engine,
    wanted: pb.DeliveryFilter,
    after: Place | None,
    *,
    max_messages: int,
    before_id: int | None = None,
) -> InFlightLook:
    group = find_group(engine, wanted.group)
    topic = find_topic(engine, wanted.topic) if wanted.topic else None
    queue_id = QueueId(wanted.queue_id) if wanted.HasField("queue_id") else None
    if queue_id is not None and topic is None:
        raise BadRequest("a queue is one of a topic: say which topic")
    if queue_id is not None and topic is not None and queue_id >= topic.queues:
        raise BadRequest(
            f"topic {topic.name!r} has the queues 0 to {topic.queues - 1}, not {queue_id}"
        )
    return engine.inspection.in_flight(
        Wanted(
            group.id,
            None if topic is None else topic.id,
            queue_id,
            wanted.client_id,
            wanted.message_id,
        ),
        after=after,
        before_id=engine.log.log_end if before_id is None else before_id,
        max_messages=max_messages,
    )


def _after(request: pb.GetDeliveriesRequest | pb.ReleaseDeliveriesRequest) -> Place | None:
    if not request.HasField("after"):
        return None
    return Place(request.after.since_ms, request.after.slot, request.after.index)


def _place(place: Place) -> pb.DeliveryPosition:
    return pb.DeliveryPosition(
        since_ms=place.popped_at_ms, slot=place.slot, index=place.message_index
    )


def _told(engine: Engine, found: InFlight) -> pb.InFlight:
    return pb.InFlight(
        topic=engine.catalog.topics[found.delivery.topic_id].name,
        queue_id=found.queue_id,
        is_retry=found.is_retry,
        queue_offset=found.queue_offset,
        message_id=found.message_id,
        delivery_attempt=found.delivery_attempt,
        client_id=found.client_id,
        until_ms=found.delivery.visible_at_ms,
        renews=found.renews,
        is_on_its_way=found.is_on_its_way,
        place=_place(found.place),
    )
