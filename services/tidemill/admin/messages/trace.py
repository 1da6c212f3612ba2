"""A message's journey: what happened to it, by the logs of all broker groups.

    cursor: base64url of {broker: [position, index, end of the log, id of the log], ...}

It names the broker groups of which there is more to read. Where each log ends was fixed by the
first call, so that following the cursor ends, however much is written meanwhile. Who holds one may
have written it: it is believed in nothing that a call could not bear.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import BrokerAnswer, BrokerGroupClient, Brokers
from tidemill.admin.json.messages import MessageEventView, MessageTraceView
from tidemill.common.errors import BadRequest, BrokerGroupUnreachable, MessageNotFound
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb

LOG_BYTES_MAX: Final = 64 << 20  # of a call, over all broker groups
LOG_BYTES_A_PAGE: Final = 8 << 20  # of one question, which each has the request timeout for
EVENTS_MAX: Final = 10_000  # of a call: a message that is popped by very many groups
CURSOR_CHARS_MAX: Final = 16_384  # some hundred broker groups


class TraceCursor(NamedTuple):
    """Up to where the log of a broker group was read, and up to where it is to be."""

    position: int
    number: int  # of the record at the position the events before this index were read
    end: int
    log_id: str


async def trace(
    cluster: Brokers, message_id: str, cursor: str, *, is_gone: Callable[[], Awaitable[bool]]
) -> MessageTraceView:
    """Read on in the logs of all broker groups; raise MessageNotFound where none knows it.

    Between two pages it ends where who asked `is_gone`.
    """
    places = _decode(cursor) if cursor else None
    events: list[MessageEventView] = []
    unreachable: list[str] = []
    read_bytes = 0
    damaged: Counter[str] = Counter()

    async def ask(member: BrokerGroupClient) -> pb.ReadEventsReply | None:
        request = pb.ReadEventsRequest(message_id=message_id, log_bytes_max=LOG_BYTES_A_PAGE)
        if places is None:
            request.from_message = True
        elif member.name in places and member.name not in unreachable:
            place = places[member.name]
            request.from_position, request.from_index = place.position, place.number
            request.until_position, request.log_id = place.end, place.log_id
        else:
            return None
        return await member.client.call(calls.READ_EVENTS, request)

    while True:
        found = await cluster.ask_all(ask)
        before, places = places or {}, dict(places or {})
        asked = {answer.broker for answer in found.answers}
        # One that was removed since, or is none, cannot be read either.
        away = [*found.unreachable, *(name for name in before if name not in asked)]
        unreachable += [name for name in dict.fromkeys(away) if name not in unreachable]
        for answer in found.answers:
            if answer.value is None:
                continue
            events += _events_of(answer.broker, answer.value)
            if answer.value.damaged_bytes:
                damaged[answer.broker] += answer.value.damaged_bytes
            place = _place_behind(answer, before.get(answer.broker))
            known = before.get(answer.broker)
            begin = known.position if known else place.position
            if known is None and answer.value.events:
                begin = answer.value.events[0].position  # It began with the message.
            read_bytes += place.position - begin
            places[answer.broker] = place
            if place.position >= place.end:
                del places[answer.broker]
        open_places = {name: place for name, place in places.items() if name not in unreachable}
        is_full = read_bytes >= LOG_BYTES_MAX or len(events) >= EVENTS_MAX
        if not open_places or is_full or places == before or await is_gone():
            break
    if not events and not damaged and not cursor and not open_places:
        if unreachable:
            raise BrokerGroupUnreachable(
                f"{', '.join(unreachable)} cannot be asked, and nobody else holds the message"
                f" {message_id}"
            )
        raise MessageNotFound(f"no broker group has a record of the message {message_id}")
    return MessageTraceView(
        events=events,
        cursor=_encode(open_places) or None,
        read_bytes=read_bytes,
        left_bytes=sum(place.end - place.position for place in open_places.values()),
        damaged_bytes=dict(damaged) or None,
        unreachable=unreachable or None,
    )


def _place_behind(
    answer: BrokerAnswer[pb.ReadEventsReply | None], before: TraceCursor | None
) -> TraceCursor:
    reply = answer.value
    assert reply is not None, "it was asked"
    # Behind the end nothing comes, whatever a cursor says.
    end = reply.log_end if before is None else min(before.end, reply.log_end)
    return TraceCursor(reply.next_position, reply.next_index, end, reply.log_id)


def _events_of(broker: str, reply: pb.ReadEventsReply) -> list[MessageEventView]:
    return [
        MessageEventView(
            event=pb.EventKind.Name(event.kind).removeprefix("EVENT_KIND_").lower(),
            at_ms=event.at_ms,
            broker=broker,
            position=event.position,
            index=event.index,
            topic=event.topic,
            queue_id=event.queue_id,
            queue_offset=event.queue_offset,
            consumer_group=event.consumer_group or None,
            attempt=event.attempt or None,
            due_at_ms=event.due_at_ms or None,
            client_id=event.client_id or None,
            reason=event.reason or None,
            origin_topic=event.origin_topic or None,
            body_size=event.body_size or None,
        )
        for event in reply.events
    ]


def _encode(places: dict[str, TraceCursor]) -> str:
    if not places:
        return ""
    return base64.urlsafe_b64encode(json.dumps(places, separators=(",", ":")).encode()).decode()


def _decode(cursor: str) -> dict[str, TraceCursor]:
    """Return the places of a cursor; raise BadRequest for what no call gave out."""
    try:
        values = json.loads(base64.urlsafe_b64decode(cursor))
        places = {name: TraceCursor(*fields) for name, fields in values.items()}
        is_ours = bool(places) and all(map(_is_sendable, places, places.values()))
    except (ValueError, TypeError, AttributeError, RecursionError):
        is_ours = False
    if not is_ours:
        raise BadRequest("cursor is not one that this API gave out")
    return places


def _is_sendable(name: str, place: TraceCursor) -> bool:
    """Whether a request can hold what a cursor says of a broker group."""
    position, number, end, log_id = place
    # Exactly: True is an int, too, and infinity a number.
    if [type(each) for each in place] != [int, int, int, str]:
        return False
    name.encode(), log_id.encode()  # Half a character is none: ValueError.
    return 0 <= position < end < 1 << 63 and 0 <= number < 1 << 32
