"""Reports about clients for one broker: clients that live, clients that ended, and hand-overs.

The broker renews the deliveries of a client while the client lives. A client calls the proxy every
few seconds and counts as ended after two minutes of silence, so one report per `REPORT_PERIOD_MS`
is enough. The end of a client is reported at once. Both may be lost with a stream: the next call of
the client is reported again, and a client whose end was lost falls silent.

The hand-overs of the last minute are reported again on each stream, because a broker that starts
does not know them. Older hand-overs are in its log, since it has extended those deliveries.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import islice
from typing import Final, NamedTuple, final

REPORT_PERIOD_MS: Final = 10_000  # a twelfth of the silence after which a client counts as ended
CLIENTS_PER_FRAME_MAX: Final = 1_024  # of each kind: 0.5 ms of the broker's time, 255 KiB at most
HANDOVERS_PER_FRAME_MAX: Final = 4_096  # less than a millisecond of the broker's time
# Age at which a hand-over is forgotten: the first deadline of a push consumer, and the time that an
# answer may take.
HANDOVER_RETENTION_MS: Final = 75_000
HANDOVERS_MAX: Final = 65_536  # about 10 MB; a broker that starts redelivers the older ones
# Time that a report waits for a request to travel with, before a frame leaves for it alone.
REPORT_DELAY_S: Final = 0.1


class FrameReports(NamedTuple):
    """The reports of one frame."""

    alive: list[str]
    ended: list[str]
    handovers: list[tuple[int, int]]  # deliveries, by slot and identity


@final
class ClientReports:
    """The reports that wait for a frame, and the time of the last report of each client."""

    def __init__(self, *, clients_max: int) -> None:
        """Keep at most `clients_max` clients of each kind; forget the oldest first."""
        self._clients_max = clients_max
        self._reported_at_ms: OrderedDict[str, int] = OrderedDict()  # the oldest report first
        # Dictionaries, since they keep the order.
        self._alive: dict[str, None] = {}
        self._ended: dict[str, None] = {}
        # The last hand-overs with their times, and how many of the newest are not reported yet.
        self._handovers: deque[tuple[int, tuple[int, int]]] = deque(maxlen=HANDOVERS_MAX)
        self._unreported = 0

    def __bool__(self) -> bool:
        return bool(self._alive or self._ended or self._unreported)

    @property
    def has_ended(self) -> bool:
        """Whether the end of a client waits for a frame."""
        return bool(self._ended)

    def add_alive(self, client_id: str, now_ms: int) -> bool:
        """Note a call of a client, by monotonic time; return whether a report is due."""
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
        """Note the end of a client. Its next call is reported at once."""
        self._reported_at_ms.pop(client_id, None)
        self._alive.pop(client_id, None)
        self._ended[client_id] = None
        _cut(self._ended, self._clients_max)

    def add_handovers(self, deliveries: Iterable[tuple[int, int]], now_ms: int) -> None:
        """Note that a client has received deliveries, by slot and identity."""
        handovers = self._handovers
        for delivery in deliveries:
            handovers.append((now_ms, delivery))
            self._unreported += 1
        while handovers and handovers[0][0] < now_ms - HANDOVER_RETENTION_MS:
            handovers.popleft()
        self._unreported = min(self._unreported, len(handovers))

    def forget_deliveries(self) -> None:
        """Forget the hand-overs: the store of their deliveries was replaced."""
        self._handovers.clear()
        self._unreported = 0

    def take(self) -> FrameReports:
        """Return the reports of the next frame, and remove them."""
        first = len(self._handovers) - self._unreported
        last = min(first + HANDOVERS_PER_FRAME_MAX, len(self._handovers))
        handovers = [self._handovers[n][1] for n in range(first, last)]
        self._unreported -= len(handovers)
        return FrameReports(_take(self._alive), _take(self._ended), handovers)

    def close(self) -> None:
        """Report all clients and hand-overs again: the broker of the next stream may be new."""
        self._reported_at_ms.clear()
        self._unreported = len(self._handovers)


def _cut(clients: dict[str, None] | OrderedDict[str, int], count_max: int) -> None:
    while len(clients) > count_max:
        del clients[next(iter(clients))]


def _take(clients: dict[str, None]) -> list[str]:
    taken = list(islice(clients, CLIENTS_PER_FRAME_MAX))
    for client_id in taken:
        del clients[client_id]
    return taken
