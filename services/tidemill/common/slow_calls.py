"""The last slow calls of a process, for operators that look for the cause of a delay."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, final

SLOW_CALLS_MAX: Final = 1_000  # about 300 KB


class CallParts(NamedTuple):
    """The parts of the time of the slowest request of a call to a broker."""

    queue_ms: int | None  # waiting at the proxy, on the network and at the broker; None: unknown
    broker_ms: int
    sync_ms: int | None  # None: unknown
    replicate_ms: int | None  # None: unknown, or the broker has no replicas


class SlowCall(NamedTuple):
    """A call that took long."""

    at_ms: int  # wall time of its end
    method: str
    duration_ms: int
    topic: str  # "" if the method does not know it
    group: str
    client_id: str
    code: str
    parts: CallParts | None  # None: unknown


@final
class SlowCalls:
    """A ring of the calls that took at least `slow_call_ms`."""

    def __init__(self, slow_call_ms: int, wall_ms: Callable[[], int]) -> None:
        self.slow_call_ms = slow_call_ms
        self.count = 0  # since the start of the process
        self._wall_ms = wall_ms
        self._calls: deque[SlowCall] = deque(maxlen=SLOW_CALLS_MAX)

    def note(
        self,
        method: str,
        duration_ms: float,
        *,
        topic: str = "",
        group: str = "",
        client_id: str = "",
        code: str = "",
        parts: CallParts | None = None,
    ) -> None:
        """Keep a call that has ended now. The caller has compared its duration."""
        self.count += 1
        self._calls.append(
            SlowCall(
                self._wall_ms(), method, round(duration_ms), topic, group, client_id, code, parts
            )
        )

    def newest_first(self) -> Iterator[SlowCall]:
        """Yield the calls that are kept."""
        return reversed(self._calls)
