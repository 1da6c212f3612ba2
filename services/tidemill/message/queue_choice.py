"""The choice of a queue of its topic for a message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import count
from typing import Protocol


class Placement(Protocol):
    """The first queues of a broker group, which hold message groups of a topic."""

    @property
    def broker_group(self) -> str:
        """The name of the broker group."""
        ...

    @property
    def queues(self) -> int:
        """The number of these queues."""
        ...


class RoundRobin:
    """A counter that spreads messages without a message group over the queues of their topic."""

    def __init__(self) -> None:
        self._turns: Iterator[int] = count()

    def choose_queue(self, queues: int) -> int:
        """Return the queue of the next message of a topic with `queues` queues."""
        return next(self._turns) % queues


def level_of(priority: int, *, queues: int) -> int:
    """Return the level of a message on a PRIORITY topic: the id of its queue.

    Invariant: every process and every release returns the same level for a number of queues.
    """
    return min(priority, queues - 1)


def queue_of_message_group(message_group: str, *, queues: int) -> int:
    """Return the queue of every message of a message group.

    Invariant: every process and every release returns the same queue. Otherwise the message group
    would lose its order.
    """
    digest = blake2b(message_group.encode(), digest_size=8, person=b"queue").digest()
    return int.from_bytes(digest, "big") % queues


def broker_queue_of_message_group(
    message_group: str, placements: Sequence[Placement]
) -> tuple[str, int]:
    """Return the broker group and the queue of every message of a message group.

    Invariant: as for `queue_of_message_group`. The result does not depend on which brokers are up.
    """
    queue_id = queue_of_message_group(
        message_group, queues=sum([place.queues for place in placements])
    )
    for place in placements:
        if queue_id < place.queues:
            return place.broker_group, queue_id
        queue_id -= place.queues
    raise AssertionError("the queue is one of those that were counted")
