"""A lifecycle event of one message, or of a range of a queue."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class EventKind(IntEnum):
    """The kind of an event (numbers of pipeline.proto)."""

    STORED = 1
    SCHEDULED = 2
    FIRED = 3
    RECALLED = 4
    MOVED = 5
    DELIVERED = 6
    ACKED = 7
    RENEWED = 8
    NACKED = 9
    REVIVED = 10
    DEAD_LETTERED = 11
    EXPIRED = 12
    RESET = 13
    BROKER_GROUP_REMOVED = 14
    HALF = 15
    CHECKED = 16
    ROLLED_BACK = 17
    REPLAYED = 18
    DISCARDED = 19


class Event(NamedTuple):
    """An event, with the fields of pipeline.proto in their order."""

    position: int
    number: int  # index among the events of its record
    kind: EventKind
    at_ms: int
    topic: str = ""
    queue_id: int = 0
    queue_offset: int = 0
    topic_id: int = 0
    message_id: str = ""
    consumer_group: str = ""
    attempt: int = 0
    due_at_ms: int = 0
    client_id: str = ""
    reason: str = ""
    origin_topic: str = ""
    origin_queue_id: int = 0
    origin_queue_offset: int = 0
    end_offset: int = 0
    timer_number: int = 0  # timer id + 1; 0: no timer
    body_size: int = 0
    body_crc32: int = 0
    delivery_id: int = 0
    delivery_index: int = 0
    half_id: int = 0  # of a half message, and of the events that end it


class EventQuery(NamedTuple):
    """The conditions of a read of events. An empty set matches everything."""

    topics: frozenset[str] = frozenset()  # names of the first topic of a message
    kinds: frozenset[int] = frozenset()
    message_id: str = ""
