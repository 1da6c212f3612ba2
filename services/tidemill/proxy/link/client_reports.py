"""What a broker is told of consumers, so that it renews what they hold: lives, ends, hand-overs.

A client speaks every few seconds at several places, and two minutes of silence are long: it is told
of once in `REPORT_PERIOD_MS`. An end is reported_at_ms at once. What a lost stream took along is not reported_at_ms again:
a sign of life comes again by itself, and a client whose end was lost falls silent.

Hand-overs are reported_at_ms again on each stream, those of the last minute: a broker that starts does not
know of them, and what was handed over earlier it has extended, which its log says.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import islice
from typing import Final, NamedTuple, final

REPORT_PERIOD_MS: Final = (
    10_000  # a twelfth of the silence after which a broker gives messages back
)
CLIENTS_PER_FRAME_MAX: Final = 1_024  # of either kind: 0.5 ms of the broker's time, 255 KiB at most
HANDOVERS_PER_FRAME_MAX: Final = 4_096  # under a millisecond of the broker's time
# For which they are kept, from the last one back: as long as a push consumer's first deadline, and
# what an answer may take.
HANDOVER_RETENTION_MS: Final = 75_000
HANDOVERS_MAX: Final = 65_536  # some 10 MB; a broker that starts redelivers those beyond it
# A sign of life waits so long for a request to travel with, before a frame leaves for it alone.
REPORT_DELAY_S: Final = 0.1


class FrameReports(NamedTuple):
    """What a frame tells."""

    alive: list[str]
    ended: list[str]
    handovers: list[tuple[int, int]]  # deliveries, by slot and identity


@final
class ClientReports:
    """What one broker is to be reported_at_ms, and when it was reported_at_ms last."""

    def __init__(self, *, clients_max: int) -> None:
        """Keep at most `clients_max` of each; beyond it the oldest are forgotten."""
        self._clients_max = clients_max
        self._reported_at_ms: OrderedDict[str, int] = (
            OrderedDict()
        )  # the one reported_at_ms longest ago first
        # Dictionaries, since they keep the order.
        self._alive: dict[str, None] = {}
        self._ended: dict[str, None] = {}
        # The last ones, with when they were, and how many of the newest are to be reported_at_ms.
        self._handovers: deque[tuple[int, tuple[int, int]]] = deque(maxlen=HANDOVERS_MAX)
        self._unreported = 0

    def __bool__(self) -> bool:
        return bool(self._alive or self._ended or self._unreported)

    @property
    def has_ended(self) -> bool:
        """Whether an end is to be reported_at_ms."""
        return bool(self._ended)

    def add_alive(self, client_id: str, now_ms: int) -> bool:
        """Note a sign of life, by monotonic time; True: it is to be reported_at_ms."""
        reported_at_ms = self._reported_at_ms
        if now_ms - reported_at_ms.get(client_id, now_ms - REPORT_PERIOD_MS) < REPORT_PERIOD_MS:
            return False
        reported_at_ms[client_id] = now_ms
        reported_at_ms.move_to_end(client_id)
        _cut(reported_at_ms, self._clients_max)
        self._alive[client_id] = None
        _cut(self._alive, self._clients_max)
        return True

    def add_ended(self, client_id: str) -> None:
        """Note that a client has ended; its next sign of life is reported_at_ms at once."""
        self._reported_at_ms.pop(client_id, None)
        self._alive.pop(client_id, None)
        self._ended[client_id] = None
        _cut(self._ended, self._clients_max)

    def add_handovers(self, deliveries: Iterable[tuple[int, int]], now_ms: int) -> None:
        """Note that a client has what was popped for it, by slot and identity."""
        kept = self._handovers
        for delivery in deliveries:
            kept.append((now_ms, delivery))
            self._unreported += 1
        while kept and kept[0][0] < now_ms - HANDOVER_RETENTION_MS:
            kept.popleft()
        self._unreported = min(self._unreported, len(kept))

    def forget_deliveries(self) -> None:
        """Forget hand-overs: they were of another store."""
        self._handovers.clear()
        self._unreported = 0

    def take(self) -> FrameReports:
        """Return what the next frame tells."""
        kept, first = self._handovers, len(self._handovers) - self._unreported
        last = min(first + HANDOVERS_PER_FRAME_MAX, len(kept))
        handovers = [kept[n][1] for n in range(first, last)]
        self._unreported -= len(handovers)
        return FrameReports(_take(self._alive), _take(self._ended), handovers)

    def close(self) -> None:
        """Know that the stream is lost: a new broker may have heard of nobody, nor of hand-overs.

        Also of those that were reported_at_ms already.
        """
        self._reported_at_ms.clear()
        self._unreported = len(self._handovers)


def _cut(of: dict[str, None] | OrderedDict[str, int], most: int) -> None:
    while len(of) > most:
        del of[next(iter(of))]


def _take(of: dict[str, None]) -> list[str]:
    taken = list(islice(of, CLIENTS_PER_FRAME_MAX))
    for client_id in taken:
        del of[client_id]
    return taken
