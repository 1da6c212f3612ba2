"""What a broker is told of consumers, so that it renews what they hold: lives, ends, hand-overs.

A client speaks every few seconds at several places, and two minutes of silence are long: it is told
of once in `TOLD_EVERY_MS`. An end is told at once. What a lost stream took along is not told again:
a sign of life comes again by itself, and a client whose end was lost falls silent.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import Final, NamedTuple, final

TOLD_EVERY_MS: Final = 10_000  # a twelfth of the silence after which a broker gives messages back
TOLD_A_FRAME_MAX: Final = 1_024  # of either kind: 0.5 ms of the broker's time, 255 KiB at most
HANDED_OVER_A_FRAME_MAX: Final = 4_096  # under a millisecond of the broker's time
# A sign of life waits so long for a request to travel with, before a frame leaves for it alone.
WAIT_S: Final = 0.1


class Signs(NamedTuple):
    """What a frame tells."""

    alive: list[str]
    ended: list[str]
    handed_over: list[int]  # request ids of pops


@final
class SignsOfLife:
    """What one broker is to be told, and when it was told last."""

    def __init__(self, *, clients_max: int) -> None:
        """Keep at most `clients_max` of each; beyond it the oldest are forgotten."""
        self._clients_max = clients_max
        self._told_at_ms: OrderedDict[str, int] = OrderedDict()  # the one told longest ago first
        # Dictionaries, since they keep the order.
        self._alive: dict[str, None] = {}
        self._ended: dict[str, None] = {}
        self._handed_over: list[int] = []  # No more than pops under way, of a tenth of a second.

    def __bool__(self) -> bool:
        return bool(self._alive or self._ended or self._handed_over)

    @property
    def has_ended(self) -> bool:
        """Whether an end is to be told."""
        return bool(self._ended)

    def alive(self, client_id: str, now_ms: int) -> bool:
        """Note a sign of life, by monotonic time; True: it is to be told."""
        told = self._told_at_ms
        if now_ms - told.get(client_id, now_ms - TOLD_EVERY_MS) < TOLD_EVERY_MS:
            return False
        told[client_id] = now_ms
        told.move_to_end(client_id)
        _cut(told, self._clients_max)
        self._alive[client_id] = None
        _cut(self._alive, self._clients_max)
        return True

    def ended(self, client_id: str) -> None:
        """Note that a client has ended; its next sign of life is told at once."""
        self._told_at_ms.pop(client_id, None)
        self._alive.pop(client_id, None)
        self._ended[client_id] = None
        _cut(self._ended, self._clients_max)

    def handed_over(self, request_id: int) -> None:
        """Note that a client has got what was popped for it."""
        self._handed_over.append(request_id)

    def take(self) -> Signs:
        """Return what the next frame tells."""
        handed_over = self._handed_over[:HANDED_OVER_A_FRAME_MAX]
        del self._handed_over[:HANDED_OVER_A_FRAME_MAX]
        return Signs(_take(self._alive), _take(self._ended), handed_over)

    def lose(self) -> None:
        """Know that the stream is lost: a new broker may have heard of nobody, or of any pop."""
        self._told_at_ms.clear()
        self._handed_over.clear()


def _cut(of: dict[str, None] | OrderedDict[str, int], most: int) -> None:
    while len(of) > most:
        del of[next(iter(of))]


def _take(of: dict[str, None]) -> list[str]:
    taken = list(islice(of, TOLD_A_FRAME_MAX))
    for client_id in taken:
        del of[client_id]
    return taken
