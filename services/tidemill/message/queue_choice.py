"""In which queue of its topic a message goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import count
from typing import Protocol


class Placement(Protocol):
    """The first queues of a broker group, in which a topic keeps message groups."""

    @property
    def broker_group(self) -> str:
        """Its name."""
        ...

    @property
    def queues(self) -> int:
        """How many."""
        ...


class RoundRobin:
    """Spreads messages without a group over the queues of their topic."""

    def __init__(self) -> None:
        self._turns: Iterator[int] = count()

    def choose_queue(self, queues: int) -> int:
        """Return the queue of the next message of a topic with so many queues."""
        return next(self._turns) % queues


def queue_of_group(message_group: str, *, queues: int) -> int:
    """Return the queue of every message of a message group.

    Invariant: the same answer everywhere and in every release; two would break the group's order.
    """
    digest = blake2b(message_group.encode(), digest_size=8, person=b"queue").digest()
    return int.from_bytes(digest, "big") % queues


def place_of_group(message_group: str, placements: Sequence[Placement]) -> tuple[str, int]:
    """Return the broker group and the queue of every message of a message group.

    Invariant: as of `queue_of_group`, and whoever is up.
    """
    queue_id = queue_of_group(message_group, queues=sum([place.queues for place in placements]))
    for place in placements:
        if queue_id < place.queues:
            return place.broker_group, queue_id
        queue_id -= place.queues
    raise AssertionError("the queue is one of those that were counted")
