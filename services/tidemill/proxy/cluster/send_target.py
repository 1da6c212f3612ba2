"""The target of a message."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tidemill.proxy.cluster.linked_group import LinkedGroup


class SendTarget(NamedTuple):
    """The broker group and the queue that store a message."""

    broker: LinkedGroup
    topic_id: int  # at this broker group; 0 if it does not know the topic yet
    queue_id: int
    may_move: bool = False  # whether another broker group may store the message instead
    priority: int | None = None  # of a message of a PRIORITY topic, which decides its queue
