"""Pages of the timers of all broker groups, ordered by due time, timer id and broker group.

    token: due_at_ms ":" timer_id [":" broker]

Each broker lists its timers in this order. If a broker ends its search early, the page ends there
too: later timers of other brokers belong to the next page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

from tidemill.admin.cluster.brokers import BrokerAnswer
from tidemill.admin.http import paging
from tidemill.admin.json.schema import EXACT_MAX
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

TIMER_ID_MAX: Final = 2**63 - 1
Token = Annotated[
    paging.PageCursor,
    paging.cursor_query(
        "[0-9]{1,16}:[0-9]{1,19}(:[A-Za-z0-9._-]{1,64})?",
        "due time, id and broker group of its last timer",
    ),
]


class TimerCursor(NamedTuple):
    """A position in the list. Its order is the order of the list."""

    due_at_ms: int
    timer_id: int
    broker: str


class TimerPage(NamedTuple):
    """Ordered timers with their broker groups, and the token of the next page."""

    timers: list[tuple[str, pb.Timer]]
    next_token: str | None  # None: this is the last page


def cursor_of(token: str) -> TimerCursor:
    """Return the position after which a page begins."""
    due_at_ms, _, rest = token.partition(":")
    timer_id, _, broker = rest.partition(":")
    return TimerCursor(min(int(due_at_ms), EXACT_MAX), min(int(timer_id), TIMER_ID_MAX), broker)


def request_after(
    request: pb.ListTimersRequest, cursor: TimerCursor, broker: str
) -> pb.ListTimersRequest:
    """Return the request to one broker group for the page after `cursor`."""
    own = pb.ListTimersRequest()
    own.CopyFrom(request)
    own.after_due_ms, own.after_timer_id = cursor.due_at_ms, cursor.timer_id
    if broker > cursor.broker:
        # A timer of this broker with the same time and id is after the cursor: start just before.
        if cursor.timer_id:
            own.after_timer_id = cursor.timer_id - 1
        elif cursor.due_at_ms:
            own.after_due_ms, own.after_timer_id = cursor.due_at_ms - 1, TIMER_ID_MAX
        else:
            own.ClearField("after_due_ms")
            own.ClearField("after_timer_id")
    return own


def merged(answers: Sequence[BrokerAnswer[pb.ListTimersReply]], page_size: int) -> TimerPage:
    """Return the first `page_size` timers of all broker groups."""
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
    return TimerPage([(cursor.broker, timer) for cursor, timer in page], token)
