"""In which queue of its topic a message goes."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from itertools import count


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
