"""Pages of lifecycle events: read between the rounds, in slices, and encoded slice by slice."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, final

from tidemill.broker.engine.events.event import Event, EventKind, EventQuery
from tidemill.broker.server.reader.log_id import log_id_of
from tidemill.broker.server.round.rpc import rpc_error
from tidemill.common.errors import BadRequest, LogChanged, NotMaster, ServiceError
from tidemill.message import limits
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.server.round.rounds import Rounds

EVENTS_A_PAGE: Final = 4_096
PAGE_BYTES: Final = 1 << 20  # of a page, and one slice more: clients accept 4 MiB by default
LOG_BYTES_MAX: Final = 64 << 20  # read for one request, even if it wants more
# Read for one page, so that it is answered in time even if no event matches.
LOG_BYTES_A_PAGE: Final = 16 << 20

_KINDS: Final = {kind: pb.EventKind.ValueType(kind) for kind in EventKind}


@final
class EventPages:
    """Reads pages of events; each turn of the event loop does one slice of one page."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        # With many readers, other tasks still wait for at most one slice.
        self._turn = asyncio.Lock()

    async def read(self, request: pb.ReadEventsRequest) -> pb.ReadEventsReply:
        """Return a page."""
        try:
            return await self._read(request)
        except ServiceError as error:
            raise rpc_error(error) from error

    async def _read(self, request: pb.ReadEventsRequest) -> pb.ReadEventsReply:
        engine = self._rounds.engine
        self._check_master()
        query = _query(request)
        _check_position(engine, request)
        position, index = request.from_position, request.from_index
        if request.from_message:
            begin = await self._find_first(engine, request.message_id)
            engine.events.record_starts.note(begin)
            position, index = max((begin, 0), (position, index))
        place = await self._find_place(engine, position)
        position, index = place, index if place == position else 0
        read = engine.events.read(
            query,
            from_position=position,
            from_index=index,
            until_position=request.until_position,
            log_bytes_max=min(request.log_bytes_max or LOG_BYTES_MAX, LOG_BYTES_A_PAGE),
            events_max=EVENTS_A_PAGE,
        )
        reply, has_more = pb.ReadEventsReply(log_id=log_id_of(engine)), True
        bytes_left = PAGE_BYTES
        while has_more and bytes_left > 0:
            async with self._turn:
                self._check_master()
                has_more = read.step()
                events = list(map(_encoded, read.take()))
                bytes_left -= sum(map(pb.Event.ByteSize, events))
                reply.events.extend(events)
                await asyncio.sleep(0)
        reply.next_position, reply.next_index = read.next_position, read.next_index
        reply.gone_from, reply.damaged_bytes = read.gone_from, read.damaged_bytes
        reply.log_min, reply.log_end = read.bounds()
        engine.events.record_starts.note(reply.next_position)
        engine.events.record_starts.note(reply.log_end)
        return reply

    async def _find_place(self, engine: Engine, position: int) -> int:
        """Return the begin of the first record at or after `position`."""
        search, has_more = engine.events.record_starts.search(position), True
        while has_more:
            async with self._turn:
                self._check_master()
                has_more = search.step()
                await asyncio.sleep(0)
        return search.found

    async def _find_first(self, engine: Engine, message_id: str) -> int:
        """Return the position of the first record of a message, or the end of the log."""
        begin, low = int(engine.log.committed_offset), engine.log.state_floor
        slices = engine.events.find_records(message_id)
        while True:
            async with self._turn:
                self._check_master()
                found = next(slices, None)
                await asyncio.sleep(0)
            if found is None:
                return begin
            begin = min([begin, *[offset for offset in found if offset >= low]])

    def _check_master(self) -> None:
        if not self._rounds.is_master:
            raise NotMaster("this replica of the broker group is not the master; call the master")


def _query(request: pb.ReadEventsRequest) -> EventQuery:
    limits.EVENT_TOPICS.check_count(len(request.topics))
    limits.EVENT_KINDS.check_count(len(request.kinds))
    numbers = [request.from_position, request.until_position, request.log_bytes_max]
    if min(numbers) < 0:
        raise BadRequest("from_position, until_position and log_bytes_max must not be negative")
    if request.from_message and not request.message_id:
        raise BadRequest("from_message needs a message_id")
    unknown = set(request.kinds) - set(EventKind)
    if unknown:
        raise BadRequest(f"event kind {min(unknown)} is unknown")
    return EventQuery(frozenset(request.topics), frozenset(request.kinds), request.message_id)


def _check_position(engine: Engine, request: pb.ReadEventsRequest) -> None:
    log_id, end = log_id_of(engine), engine.log.committed_offset
    if request.log_id not in ("", log_id):
        raise LogChanged(f"the log id is {log_id} now, not {request.log_id}; read from position 0")
    if request.from_index and request.from_position >= end:
        raise LogChanged(
            f"no record begins at position {request.from_position}, the end of the log; read from"
            f" index 0"
        )
    if request.from_position > end:
        raise LogChanged(
            f"the log ends at {end}, before position {request.from_position}; it is a different"
            f" log, or was restored and has lost records; read from position 0"
        )


def _encoded(event: Event) -> pb.Event:
    return pb.Event(
        position=event[0],
        index=event[1],
        kind=_KINDS[event[2]],
        at_ms=event[3],
        topic=event[4],
        queue_id=event[5],
        queue_offset=event[6],
        topic_id=event[7],
        message_id=event[8],
        consumer_group=event[9],
        attempt=event[10],
        due_at_ms=event[11],
        client_id=event[12],
        reason=event[13],
        origin_topic=event[14],
        origin_queue_id=event[15],
        origin_queue_offset=event[16],
        end_offset=event[17],
        timer_id=event[18],
        body_size=event[19],
        body_crc32=event[20],
        delivery_id=event[21],
        delivery_index=event[22],
        half_id=event[23],
    )
