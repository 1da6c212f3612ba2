"""BrokerAdmin's calls about deliveries in flight: list and release."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.queries.in_flight import InFlightFilter, PopPosition
from tidemill.broker.server.admin.lookup import check_queue_id, find_group, find_topic
from tidemill.broker.server.round.rpc import in_round, read_in_round
from tidemill.broker.server.wire import config_log
from tidemill.broker.server.wire.audit_facts import change_of
from tidemill.common.errors import InvalidReceiptHandle, Overloaded
from tidemill.message.client_key import ClientKey
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.queries.in_flight import InFlight, InFlightListing
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn

PAGE_MAX: Final = 1_000  # messages of one page, even if a request wants more
RELEASED_MAX: Final = 1_000  # messages of one call: each needs a record and later a copy


class DeliveryAdmin:
    """Lists the deliveries in flight of a consumer group or a client, and releases them."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    async def GetDeliveries(self, request: pb.GetDeliveriesRequest) -> pb.GetDeliveriesReply:
        """Return a page of a consumer group's deliveries, by pop time; each slice takes a round."""
        count = min(request.page_size or PAGE_MAX, PAGE_MAX)

        def begin(engine: Engine, _turn: Turn) -> InFlightListing[PopPosition]:
            return _listing(engine, request.filter, _after(request), max_messages=count)

        listing = await read_in_round(self._rounds, begin)
        reply, has_more = pb.GetDeliveriesReply(), True

        def step(engine: Engine, turn: Turn) -> bool:
            more = listing.step(turn.now_ms)
            reply.deliveries.extend([_rendered(engine, one) for one in listing.take()])
            return more

        while has_more:
            has_more = await read_in_round(self._rounds, step)
        if listing.next_position is not None:
            reply.end.CopyFrom(_place(listing.next_position))
        return reply

    async def GetHeld(self, request: pb.GetHeldRequest) -> pb.GetHeldReply:
        """Return the number of a client's deliveries in flight."""

        def count(engine: Engine, _turn: Turn) -> pb.GetHeldReply:
            client = ClientKey(request.client_id, request.owner)
            return pb.GetHeldReply(in_flight_count=engine.inspection.in_flight_of(client))

        return await read_in_round(self._rounds, count)

    async def ReleaseDeliveries(
        self, request: pb.ReleaseDeliveriesRequest
    ) -> pb.ReleaseDeliveriesReply:
        """Make a page of a consumer group's deliveries visible again now; a dry run counts them.

        As at the end of the invisible duration, the delivery counts as an attempt; but its receipt
        handles are invalid from now on. If the delivery table becomes full, the page ends there.
        Raises Overloaded if it is full at the first delivery.
        """
        reply, has_more = pb.ReleaseDeliveriesReply(), True
        last = stop = _after(request)

        def begin(engine: Engine, _turn: Turn) -> InFlightListing[PopPosition]:
            # Excludes later pops, which may deliver the released messages again.
            reply.before_id = request.before_id or engine.log.log_end
            return _listing(
                engine,
                request.filter,
                _after(request),
                max_messages=RELEASED_MAX,
                before_id=reply.before_id,
            )

        listing = await read_in_round(self._rounds, begin)
        change = change_of(request, before=_facts(request.filter))

        def step(engine: Engine, turn: Turn) -> bool:
            nonlocal last, stop
            more = listing.step(turn.now_ms)
            for found in listing.take():
                if request.dry_run:
                    reply.count += 1
                    continue
                try:
                    # A message may have been acked in this round.
                    with contextlib.suppress(InvalidReceiptHandle), engine.fold.audited(change):
                        engine.commands.release(found.delivery, turn.now_ms)
                        reply.count += 1
                except Overloaded:
                    if not reply.count or last is None:
                        raise
                    stop = last
                    return False
                last = found.position
            stop = listing.next_position
            return more

        try:
            while has_more:
                has_more = await in_round(self._rounds, step)
        finally:
            if reply.count and not request.dry_run:
                config_log.deliveries_released(request.filter, reply.count, by=request.asked_by)
        if stop is not None:
            reply.end.CopyFrom(_place(stop))
        return reply


def _facts(selection: pb.DeliveryFilter) -> dict[str, Any]:
    """Return the filter of a release for the audit log."""
    facts: dict[str, Any] = {
        "topic": selection.topic,
        "clientId": selection.client_id,
        "messageId": selection.message_id,
    }
    if selection.HasField("queue_id"):
        facts["queue"] = selection.queue_id
    return {name: value for name, value in facts.items() if value != ""}


def _listing(
    engine: Engine,
    selection: pb.DeliveryFilter,
    after: PopPosition | None,
    *,
    max_messages: int,
    before_id: int | None = None,
) -> InFlightListing[PopPosition]:
    group = find_group(engine, selection.group)
    topic = find_topic(engine, selection.topic) if selection.topic else None
    queue_id = QueueId(selection.queue_id) if selection.HasField("queue_id") else None
    if queue_id is not None and topic is not None:
        check_queue_id(topic, queue_id)
    in_flight_filter = InFlightFilter(
        group_ids=frozenset([group.id]),
        topic_id=None if topic is None else topic.id,
        queue_id=queue_id,
        client_id=selection.client_id,
        message_id=selection.message_id,
        before_id=engine.log.log_end if before_id is None else before_id,
    )
    return engine.inspection.in_flight(in_flight_filter, after=after, max_messages=max_messages)


def _after(request: pb.GetDeliveriesRequest | pb.ReleaseDeliveriesRequest) -> PopPosition | None:
    if not request.HasField("after"):
        return None
    return PopPosition(request.after.since_ms, request.after.slot, request.after.index)


def _place(place: PopPosition) -> pb.DeliveryPosition:
    return pb.DeliveryPosition(
        since_ms=place.popped_at_ms, slot=place.slot, index=place.message_index
    )


def _rendered(engine: Engine, found: InFlight) -> pb.InFlight:
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
        is_on_its_way=found.is_handover_pending,
        place=_place(found.position),
    )
