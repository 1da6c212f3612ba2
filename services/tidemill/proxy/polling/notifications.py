"""One notification per broker for all polls of a pair.

    quiet ──ask──> asked ──hint──> hinted ──a poll has popped there──> quiet
      ^              ├── ended, failed, was wrong ──> later ──┐
      └──────────────┴────────────────────────────────────────┘   down: none of these

Invariant: no hint is lost while a poll waits. If a hint is needed, the broker has been asked, has
hinted, will be asked at a known time, or is down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeAlias, final

from tidemill.proxy.polling.poll import Broker, PairT

if TYPE_CHECKING:
    from tidemill.common.errors import ServiceError
    from tidemill.proxy.polling.level_order import HintLevels

# Delay after a wrong hint: a random part of it, doubled each time in a row. Two proxies that lose
# against a third one then ask at different times. A broker with many wrong hints is asked once per
# second.
MISS_MS: Final = 50
MISS_MAX_MS: Final = 800
FAILURE_MS: Final = 200  # delay after a failed notification, doubled each time in a row
FAILURE_MAX_MS: Final = 2_000
# After this time a hint counts as right: the message was there.
HINT_MS: Final = 100
# A notification that ends empty so long before its deadline comes from a draining broker.
EARLY_MS: Final = 500
# Time after which a repeated notification counts as parked, so the broker serves again.
PARKED_MS: Final = 1_000
# Time that the answer of a notification may take if a message is ready.
ANSWER_MS: Final = 100
_DOUBLINGS_MAX: Final = 6  # of each delay; the bounds are reached before


class NotificationStart(NamedTuple, Generic[PairT]):
    """Action: send a notification to a broker, with its poll duration."""

    watch: HintWatch[PairT]
    number: int
    poll_ms: int
    level_min: int = 0  # lower levels of a PRIORITY topic do not count


class NotificationStop(NamedTuple, Generic[PairT]):
    """Action: cancel a notification, because no poll waits for it."""

    watch: HintWatch[PairT]
    number: int


NotificationAction: TypeAlias = NotificationStart[PairT] | NotificationStop[PairT]


@final
class HintWatch(Generic[PairT]):
    """The hints of one broker for the polls of one pair."""

    __slots__ = (
        "_asked_at_ms",
        "_failures",
        "_misses",
        "_number",
        "_random",
        "_until_ms",
        "broker",
        "error",
        "hint_count",
        "hinted_at_ms",
        "is_down",
        "is_judged",
        "is_unsure",
        "is_wanted",
        "level_min",
        "levels",
        "not_before_ms",
        "number",
        "pair",
    )

    def __init__(self, pair: PairT, broker: Broker, *, random: Callable[[], float]) -> None:
        self.pair = pair
        self.broker = broker
        self.is_down = False
        self.is_wanted = False
        self.number = 0  # of the notification in flight, or 0
        self.level_min = 0  # of the notification in flight
        self.hint_count = 0  # hinted messages without an assigned poll
        # Of a PRIORITY topic. If they are known, a hint stays until the next pop or notification,
        # and the notification in flight waits for a higher level.
        self.levels: HintLevels | None = None
        self.hinted_at_ms = 0
        self.is_unsure = False  # whether the scan behind the hint stopped early
        self.is_judged = False  # whether a poll has confirmed or refuted the hint
        self.not_before_ms = 0  # earliest time of the next notification
        self.error: ServiceError | None = None  # of the last failure
        self._number = 0
        self._asked_at_ms = 0
        self._until_ms = 0
        self._failures = 0
        self._misses = 0
        self._random = random

    # ------------------------------------------------------------ asking

    def ask(self, until_ms: int, now_ms: int) -> NotificationStart[PairT] | None:
        """Return a notification until `until_ms`, or None if none is needed or allowed now."""
        is_too_early = now_ms < self.not_before_ms or until_ms <= now_ms
        if not self._is_missing or is_too_early:
            return None
        self._number += 1
        self.number, self._asked_at_ms, self._until_ms = self._number, now_ms, until_ms
        self.level_min = self._wanted_level_min
        return NotificationStart(self, self.number, until_ms - now_ms, self.level_min)

    @property
    def _is_missing(self) -> bool:
        """Whether a notification is wanted and none is in flight."""
        is_known = self.hint_count and self.levels is None
        return self.is_wanted and not (self.number or is_known or self.is_down)

    @property
    def _wanted_level_min(self) -> int:
        """The lowest level that changes what is known; 0 if no message is known."""
        return self.levels.highest + 1 if self.hint_count and self.levels is not None else 0

    def stop_too_high(self) -> NotificationStop[PairT] | None:
        """Cancel the notification in flight if it waits for a higher level than is wanted now."""
        return self.stop() if self.level_min > self._wanted_level_min else None

    def stop(self) -> NotificationStop[PairT] | None:
        """Cancel the notification in flight."""
        number, self.number, self.level_min = self.number, 0, 0
        return NotificationStop(self, number) if number else None

    def due_ms(self) -> int | None:
        """Return the time of the next notification; None if one is in flight or none is needed."""
        return self.not_before_ms if self._is_missing else None

    # ------------------------------------------------------------ results

    def answered(
        self,
        number: int,
        count: int,
        now_ms: int,
        *,
        is_unsure: bool,
        levels: HintLevels | None = None,
    ) -> bool:
        """Apply an answer. Return False if it belongs to a cancelled notification."""
        if number != self.number:
            return False
        level_min, self.number, self.level_min, self.error = self.level_min, 0, 0, None
        if count and level_min and (levels is None or levels.highest < level_min):
            # The broker does not wait for levels. Without a delay it would be asked all the time.
            self._hold_off(now_ms)
        elif count:
            self._failures = 0
            self.hint_count, self.hinted_at_ms, self.is_unsure = count, now_ms, is_unsure
            self.levels, self.is_judged = levels, False
        elif now_ms < self._until_ms - EARLY_MS:
            self._hold_off(now_ms)
        else:
            self._failures = 0
        return True

    def failed(self, number: int, error: ServiceError, now_ms: int) -> bool:
        """Apply a rejection. Return False if it belongs to a cancelled notification."""
        if number != self.number:
            return False
        self.number = self.level_min = 0
        self.error = error  # A hint of levels stays.
        self._hold_off(now_ms)
        return True

    def take(self) -> None:
        """Assign a hint to a poll."""
        assert self.hint_count, "only a hint is assigned"
        self.hint_count -= 1

    def hit(self, count: int) -> None:
        """Note that a poll found `count` messages besides the one of its hint."""
        self._misses = self._failures = 0
        self.error = None
        self.is_judged = True
        self.hint_count = max(self.hint_count - count, 0)

    def missed(self, now_ms: int) -> None:
        """Note that a poll found no message at the broker of a hint; the other hints expire, too.

        The hint was right if another poll found a message, or if the broker had not finished its
        scan. The next notification continues the scan.
        """
        self.hint_count = 0
        if self.is_judged or self.is_unsure or now_ms - self.hinted_at_ms > HINT_MS:
            return
        self.is_judged = True
        ceiling_ms = min(MISS_MS << min(self._misses, _DOUBLINGS_MAX), MISS_MAX_MS)
        self._misses += 1
        self.not_before_ms = now_ms + int(self._random() * ceiling_ms)

    def left(self, count: int, levels: HintLevels | None, now_ms: int) -> None:
        """Note the messages that a pop has left at the broker."""
        self._misses = self._failures = 0
        self.error = None
        self.hint_count, self.levels, self.hinted_at_ms = count, levels, now_ms
        self.is_unsure, self.is_judged = False, True

    def pop_failed(self, error: ServiceError, now_ms: int) -> None:
        """Note that the broker rejects the pair."""
        self.error = error
        self.hint_count = 0
        self._hold_off(now_ms)

    def _hold_off(self, now_ms: int) -> None:
        delay_ms = min(FAILURE_MS << min(self._failures, _DOUBLINGS_MAX), FAILURE_MAX_MS)
        self._failures += 1
        self.not_before_ms = now_ms + delay_ms

    # ------------------------------------------------------------ state

    def lost(self) -> NotificationStop[PairT] | None:
        """Note that the broker is unreachable."""
        self.is_down = True
        self.hint_count = 0
        return self.stop()

    def reconnected(self) -> None:
        """Note that the broker is reachable again; it may be asked at once."""
        self.is_down = False
        self.not_before_ms = self._failures = self._misses = 0
        self.error = None

    @property
    def known_level(self) -> int:
        """The highest level that is known to be ready; 0 if none is."""
        return self.levels.highest if self.hint_count and self.levels is not None else 0

    def is_covered(self, now_ms: int) -> bool:
        """Whether the broker would have reported a ready message."""
        is_awake = self.number and not self.level_min
        return bool(is_awake) and now_ms - self._asked_at_ms >= ANSWER_MS

    def is_failing(self, now_ms: int) -> bool:
        """Whether the broker rejects requests."""
        has_parked = self.number and now_ms - self._asked_at_ms >= PARKED_MS
        return self.error is not None and not has_parked
