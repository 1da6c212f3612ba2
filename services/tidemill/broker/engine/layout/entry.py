"""Entries: what a record of each kind says, as a tuple. The closed set that the fold applies."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias

from tidemill.broker.engine.layout.ack import Acks
from tidemill.broker.engine.layout.config import ConfigItem
from tidemill.broker.engine.layout.expiry import Expiry
from tidemill.broker.engine.layout.message import MessageEntry
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.pop_checkpoint import PopCheckpoint
from tidemill.broker.engine.layout.renewal import Renewal
from tidemill.broker.engine.layout.state import (
    StatedConfig,
    StatedDeliveries,
    StatedProgress,
    StatedQueues,
)
from tidemill.broker.engine.layout.timer_control import Frontier, TimerControl


class EpochStart(NamedTuple):
    """The first record of each life of the broker; its epoch is in its header, as in all."""


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
    | StatedConfig
    | StatedQueues
    | StatedProgress
    | StatedDeliveries
)


class Recorder(Protocol):
    """Where decisions become records: the fold, as those see it who decide."""

    def append(self, entry: Entry, now_ms: int) -> LogOffset:
        """Put `entry` into the pending round, apply it, and return its log offset.

        Raises MessageBodyTooLarge, and changes nothing, when it cannot fit into a segment.
        """
        ...
