"""Dead letters as messages of BrokerAdmin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidemill.broker.engine.layout.dead_letter import DeadLetterState
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.dead_letter.inspection import LetterStatus

_STATES: Final = {
    DeadLetterState.OPEN: pb.DEAD_LETTER_STATE_OPEN,
    DeadLetterState.REPLAYED: pb.DEAD_LETTER_STATE_REPLAYED,
    DeadLetterState.DISCARDED: pb.DEAD_LETTER_STATE_DISCARDED,
}


def letter_of(status: LetterStatus) -> pb.DeadLetter:
    """Return a dead letter as a message."""
    return pb.DeadLetter(
        group=status.group,
        offset=status.offset,
        log_offset=status.log_offset,
        origin_topic=status.origin_topic,
        is_topic_deleted=status.is_topic_deleted,
        reason=status.reason,
        attempts=status.attempts,
        replays=status.replays,
        first_popped_at_ms=status.first_popped_at_ms,
        dead_at_ms=status.dead_at_ms,
        state=_STATES[status.state],
        settled_at_ms=status.settled_at_ms,
        settled_by=status.settled_by,
        operation_id=status.operation_id,
        body_size=status.body_size,
        head=status.head,
    )
