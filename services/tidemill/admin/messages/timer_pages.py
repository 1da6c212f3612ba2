"""Pages of the timers of all broker groups, in one order: by due time, number and broker group.

    token: due_at_ms ":" timer_id [":" broker]

Each broker lists its own by due time and number. One whose search ended early knows no more than up
to a place: what others have behind that place waits for the next page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from tidemill.admin.cluster.brokers import BrokerAnswer
from tidemill.admin.http import paging
from tidemill.admin.http.paging import decode_token
from tidemill.admin.json.schema import EXACT_MAX
from tidemill.common.errors import BadRequest
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

PLACE_CHARS_MAX: Final = 64 + 96  # of two numbers of 64 bits, and of the name of a broker group
TIMER_ID_MAX: Final = 2**63 - 1


class TimerCursor(NamedTuple):
    """A place in the list, as places are ordered."""

    due_at_ms: int
    timer_id: int
    broker: str


class TimerPage(NamedTuple):
    """Timers in their order, each with its broker group; None: there are no more."""

    timers: list[tuple[str, pb.Timer]]
    next_token: str | None


def place_of(token: str) -> TimerCursor:
    """Return the place behind which a page begins; raise BadRequest."""
    due_at_ms, _, rest = decode_token(token).partition(":")
    timer_id, _, broker = rest.partition(":")
    # isdecimal() takes other scripts' digits too, and int() reads those as well.
    if not (due_at_ms.isdecimal() and timer_id.isdecimal() and len(token) <= PLACE_CHARS_MAX):
        raise BadRequest("pageToken is not one that this API gave out")
    return TimerCursor(min(int(due_at_ms), EXACT_MAX), min(int(timer_id), TIMER_ID_MAX), broker)


def request_behind(
    request: pb.ListTimersRequest, place: TimerCursor, broker: str
) -> pb.ListTimersRequest:
    """Return what one broker group is asked for the page behind `place`."""
    own = pb.ListTimersRequest()
    own.CopyFrom(request)
    own.after_due_ms, own.after_timer_id = place.due_at_ms, place.timer_id
    if broker > place.broker:
        # Its timer of this time and number comes behind the place, so it begins just before.
        if place.timer_id:
            own.after_timer_id = place.timer_id - 1
        elif place.due_at_ms:
            own.after_due_ms, own.after_timer_id = place.due_at_ms - 1, TIMER_ID_MAX
        else:
            own.ClearField("after_due_ms")
            own.ClearField("after_timer_id")
    return own


def merged(answers: Sequence[BrokerAnswer[pb.ListTimersReply]], page_size: int) -> TimerPage:
    """Return the first `page_size` of all."""
    ends = [
        TimerCursor(reply.last_due_ms, reply.last_timer_id, broker)
        for broker, reply in answers
        if reply.has_more
    ]
    found = [
        (TimerCursor(timer.due_at_ms, timer.timer_id, broker), timer)
        for broker, reply in answers
        for timer in reply.timers
    ]
    page, token = paging.merged(found, ends, page_size)
    return TimerPage([(place.broker, timer) for place, timer in page], token)
