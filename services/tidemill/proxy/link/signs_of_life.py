"""What a broker is told of consumers, so that it renews what they hold: lives, ends, hand-overs.

A client speaks every few seconds at several places, and two minutes of silence are long: it is told
of once in `TOLD_EVERY_MS`. An end is told at once. What a lost stream took along is not told again:
a sign of life comes again by itself, and a client whose end was lost falls silent.

Hand-overs are told again on each stream, those of the last minute: a broker that starts does not
know of them, and what was handed over earlier it has extended, which its log says.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import islice
from typing import Final, NamedTuple, final

TOLD_EVERY_MS: Final = 10_000  # a twelfth of the silence after which a broker gives messages back
TOLD_A_FRAME_MAX: Final = 1_024  # of either kind: 0.5 ms of the broker's time, 255 KiB at most
HANDED_OVER_A_FRAME_MAX: Final = 4_096  # under a millisecond of the broker's time
# For which they are kept, from the last one back: as long as a push consumer's first deadline, and
# what an answer may take.
HANDED_OVER_KEPT_MS: Final = 75_000
HANDED_OVER_KEPT_MAX: Final = 65_536  # some 10 MB; a broker that starts redelivers those beyond it
# A sign of life waits so long for a request to travel with, before a frame leaves for it alone.
WAIT_S: Final = 0.1


class Signs(NamedTuple):
    """What a frame tells."""

    alive: list[str]
    ended: list[str]
    handed_over: list[tuple[int, int]]  # deliveries, by slot and identity


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
        # The last ones, with when they were, and how many of the newest are to be told.
        self._handed_over: deque[tuple[int, tuple[int, int]]] = deque(maxlen=HANDED_OVER_KEPT_MAX)
        self._untold = 0

    def __bool__(self) -> bool:
        return bool(self._alive or self._ended or self._untold)

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

    def handed_over(self, deliveries: Iterable[tuple[int, int]], now_ms: int) -> None:
        """Note that a client has what was popped for it, by slot and identity."""
        kept = self._handed_over
        for delivery in deliveries:
            kept.append((now_ms, delivery))
            self._untold += 1
        while kept and kept[0][0] < now_ms - HANDED_OVER_KEPT_MS:
            kept.popleft()
        self._untold = min(self._untold, len(kept))

    def forget_deliveries(self) -> None:
        """Forget hand-overs: they were of another store."""
        self._handed_over.clear()
        self._untold = 0

    def take(self) -> Signs:
        """Return what the next frame tells."""
        kept, first = self._handed_over, len(self._handed_over) - self._untold
        last = min(first + HANDED_OVER_A_FRAME_MAX, len(kept))
        handed_over = [kept[n][1] for n in range(first, last)]
        self._untold -= len(handed_over)
        return Signs(_take(self._alive), _take(self._ended), handed_over)

    def lose(self) -> None:
        """Know that the stream is lost: a new broker may have heard of nobody, nor of hand-overs.

        Also of those that were told already.
        """
        self._told_at_ms.clear()
        self._untold = len(self._handed_over)


def _cut(of: dict[str, None] | OrderedDict[str, int], most: int) -> None:
    while len(of) > most:
        del of[next(iter(of))]


def _take(of: dict[str, None]) -> list[str]:
    taken = list(islice(of, TOLD_A_FRAME_MAX))
    for client_id in taken:
        del of[client_id]
    return taken
