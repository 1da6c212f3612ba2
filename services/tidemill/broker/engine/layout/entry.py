"""Entries: the decoded content of each kind of record. The fold applies this closed set."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias

from tidemill.broker.engine.layout.ack import Acks
from tidemill.broker.engine.layout.audit import Audit
from tidemill.broker.engine.layout.config import ConfigItem
from tidemill.broker.engine.layout.dead_letter import DeadLettersDiscarded, StatedLetters
from tidemill.broker.engine.layout.dedup import StatedKeys
from tidemill.broker.engine.layout.expiry import Expiry
from tidemill.broker.engine.layout.floor import Floor
from tidemill.broker.engine.layout.message import MessageEntry
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.operation import OperationEntry, StatedOperations
from tidemill.broker.engine.layout.pop_checkpoint import PopCheckpoint
from tidemill.broker.engine.layout.renewal import Renewal
from tidemill.broker.engine.layout.state import (
    StatedAudit,
    StatedConfig,
    StatedDeliveries,
    StatedProgress,
    StatedQueues,
)
from tidemill.broker.engine.layout.timer_control import Frontier, TimerControl
from tidemill.broker.engine.layout.transaction import CheckWritten, RolledBack
from tidemill.broker.engine.layout.trim import Trim


class EpochStart(NamedTuple):
    """The first record after each start of the broker.

    As in all records, the header has the epoch.
    """


Entry: TypeAlias = (
    EpochStart
    | MessageEntry
    | PopCheckpoint
    | Acks
    | Renewal
    | ConfigItem
    | TimerControl
    | Frontier
    | Expiry
    | Trim
    | Floor
    | Audit
    | CheckWritten
    | RolledBack
    | DeadLettersDiscarded
    | OperationEntry
    | StatedConfig
    | StatedQueues
    | StatedProgress
    | StatedDeliveries
    | StatedAudit
    | StatedKeys
    | StatedLetters
    | StatedOperations
)


class Recorder(Protocol):
    """The writer of entries: the fold, as the deciding parts see it."""

    def append(self, entry: Entry, now_ms: int) -> LogOffset:
        """Append `entry` to the pending round, apply it, and return its log offset.

        Raises MessageBodyTooLarge, and changes nothing, if it does not fit into a segment.
        """
        ...
