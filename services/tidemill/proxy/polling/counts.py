"""Counters of polls by topic and consumer group; `metrics.py` of the proxy exports them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, final

from tidemill.common.histogram import Histogram

if TYPE_CHECKING:
    from tidemill.proxy.polling.mode import WaitModeName
    from tidemill.proxy.polling.pair import PairKey

# Waits of polls, in milliseconds, up to the longest poll.
WAIT_BUCKETS_MS: Final = (
    1,
    5,
    10,
    20,
    50,
    100,
    200,
    500,
    1_000,
    2_000,
    5_000,
    10_000,
    20_000,
    60_000,
)


@final
class PollCounts:
    """Counters by (topic, group) and further labels."""

    def __init__(self) -> None:
        self.long_polls: Counter[tuple[str, ...]] = Counter()  # mode
        self.receives: Counter[tuple[str, ...]] = Counter()  # mode, outcome
        self.first_hits: Counter[tuple[str, ...]] = Counter()
        self.notifications: Counter[tuple[str, ...]] = Counter()  # whether it had messages
        self.notification_failures: Counter[tuple[str, ...]] = Counter()
        self.coalesced: Counter[tuple[str, ...]] = Counter()
        self.notified_pops: Counter[tuple[str, ...]] = Counter()  # hit or miss
        self.false_empties: Counter[tuple[str, ...]] = Counter()
        # Of PRIORITY topics: receives of a lower level than a hint of another broker had named.
        self.inversions: Counter[tuple[str, ...]] = Counter()
        self.switches: Counter[str] = Counter()  # the new mode
        self.inflight: Counter[str] = Counter()  # mode
        self.waits: Histogram[tuple[str, str]] = Histogram(WAIT_BUCKETS_MS)  # mode, outcome

    def began(self, topic: str, group: str, mode: WaitModeName, *, is_long: bool) -> None:
        """Count a receive that begins. The series of a new pair start at zero."""
        if (topic, group) not in self.first_hits:
            for counter in (
                self.first_hits,
                self.notification_failures,
                self.coalesced,
                self.false_empties,
            ):
                counter[topic, group] = 0
            for is_hit in ("hit", "miss"):
                self.notified_pops[topic, group, is_hit] = 0
            for has_message in ("true", "false"):
                self.notifications[topic, group, has_message] = 0
        if is_long:
            self.long_polls[topic, group, mode] += 1
            self.inflight[mode] += 1

    def ended(
        self,
        topic: str,
        group: str,
        mode: WaitModeName,
        outcome: str,
        waited_ms: int,
        *,
        is_long: bool,
    ) -> None:
        """Count a receive that has ended."""
        self.receives[topic, group, mode, outcome] += 1
        if outcome == "first_pop":
            self.first_hits[topic, group] += 1
        if is_long:
            self.inflight[mode] -= 1
            self.waits.observe((mode, outcome), waited_ms)

    def notified(self, key: PairKey, *, has_message: bool) -> None:
        """Count the answer of a notification."""
        self.notifications[key.topic, key.group, "true" if has_message else "false"] += 1

    def followed(self, key: PairKey, *, is_hit: bool) -> None:
        """Count a pop at the broker of a hint."""
        self.notified_pops[key.topic, key.group, "hit" if is_hit else "miss"] += 1
