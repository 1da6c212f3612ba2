"""What one broker is asked for all polls of a pair: one notification, whoever waits.

    quiet ──ask──> asked ──hint──> hinted ──its polls have been there──> quiet
      ^              ├── ended, failed, turned out wrong ──> later ──┐
      └──────────────┴──────────────────────────────────────────────┘   down: none of it

A hint is never lost while somebody waits: whenever one is wanted, the broker is asked, has hinted,
will be asked at a known time, or is down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, final

if TYPE_CHECKING:
    from tidemill.common.errors import ServiceError
    from tidemill.proxy.polling.pair import Pair
    from tidemill.proxy.polling.poll import Broker

# After a hint that was wrong: a random part of it, twice as much each time in a row. Two proxies
# that lose against a third come apart, and a broker that is wrong for long is asked once a second.
MISS_MS: Final = 50
MISS_MAX_MS: Final = 800
FAILURE_MS: Final = 200  # after one that failed, twice as much each time in a row
FAILURE_MAX_MS: Final = 2_000
# A hint is judged no longer: the message was there.
HINT_MS: Final = 100
# One that ends empty this much before its time was answered by a broker that drains.
EARLY_MS: Final = 500
# How long one that is asked again may take to fail again: who has parked is well.
PARKED_MS: Final = 1_000
# How long the answer may be under way of one that need not park: it was just asked.
ANSWER_MS: Final = 100
_DOUBLINGS_MAX: Final = 6  # of either; the bounds are reached before


class Ask(NamedTuple):
    """Ask a broker for a hint, which may take so long."""

    watch: Watch
    number: int
    poll_ms: int


class StopAsking(NamedTuple):
    """Nobody waits for a notification any more."""

    watch: Watch
    number: int


AskAction: TypeAlias = Ask | StopAsking


@final
class Watch:
    """One broker, as the polls of one pair see it."""

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
        "not_before_ms",
        "number",
        "pair",
    )

    def __init__(self, pair: Pair, broker: Broker, *, random: Callable[[], float]) -> None:
        self.pair = pair
        self.broker = broker
        self.is_down = False
        self.is_wanted = False
        self.number = 0  # of the notification that is out; 0: none is
        self.hint_count = 0  # of messages that it has told of, and nobody was sent to yet
        self.hinted_at_ms = 0
        self.is_unsure = False  # the hint
        self.is_judged = False  # A poll that has followed it has told whether it was right.
        self.not_before_ms = 0  # it is asked again
        self.error: ServiceError | None = None  # of what failed last
        self._number = 0
        self._asked_at_ms = 0
        self._until_ms = 0
        self._failures = 0
        self._misses = 0
        self._random = random

    # ------------------------------------------------------------ asking

    def ask(self, until_ms: int, now_ms: int) -> Ask | None:
        """Ask, if it is wanted and has not hinted, up to `until_ms`; not before it may be asked."""
        is_asked = self.number or self.hint_count or self.is_down
        if not self.is_wanted or is_asked or now_ms < self.not_before_ms or until_ms <= now_ms:
            return None
        self._number += 1
        self.number, self._asked_at_ms, self._until_ms = self._number, now_ms, until_ms
        return Ask(self, self.number, until_ms - now_ms)

    def stop(self) -> StopAsking | None:
        """Take back what is asked."""
        number, self.number = self.number, 0
        return StopAsking(self, number) if number else None

    def due_ms(self) -> int | None:
        """Return when it is to be asked again; None: it is asked, or not wanted."""
        if not self.is_wanted or self.number or self.hint_count or self.is_down:
            return None
        return self.not_before_ms

    # ------------------------------------------------------------ what comes of it

    def answered(self, number: int, count: int, now_ms: int, *, is_unsure: bool) -> bool:
        """Take an answer; False: it is of one that nobody waits for."""
        if number != self.number:
            return False
        self.number, self.error = 0, None
        if count:
            self._failures = 0
            self.hint_count, self.hinted_at_ms, self.is_unsure = count, now_ms, is_unsure
            self.is_judged = False
        elif now_ms < self._until_ms - EARLY_MS:
            self._hold_off(now_ms)
        else:
            self._failures = 0
        return True

    def failed(self, number: int, error: ServiceError, now_ms: int) -> bool:
        """Take a refusal; False: it is of one that nobody waits for."""
        if number != self.number:
            return False
        self.number = 0
        self.pop_failed(error, now_ms)
        return True

    def take(self) -> None:
        """Send a poll there."""
        assert self.hint_count, "a poll is sent where a hint points"
        self.hint_count -= 1

    def hit(self, count: int) -> None:
        """Know that a poll has found so many messages there, beside one that it was sent for."""
        self._misses = self._failures = 0
        self.error = None
        self.is_judged = True
        self.hint_count = max(self.hint_count - count, 0)

    def missed(self, now_ms: int) -> None:
        """Know that a poll was sent there in vain: what else was told of is gone too.

        Where another one has found something it was no fault of the hint; nor where the look of the
        broker had not come to an end, which it does by being asked again.
        """
        self.hint_count = 0
        if self.is_judged or self.is_unsure or now_ms - self.hinted_at_ms > HINT_MS:
            return
        self.is_judged = True
        ceiling_ms = min(MISS_MS << min(self._misses, _DOUBLINGS_MAX), MISS_MAX_MS)
        self._misses += 1
        self.not_before_ms = now_ms + int(self._random() * ceiling_ms)

    def pop_failed(self, error: ServiceError, now_ms: int) -> None:
        """Know that the broker has refused to serve the pair."""
        self.error = error
        self.hint_count = 0
        self._hold_off(now_ms)

    def _hold_off(self, now_ms: int) -> None:
        delay_ms = min(FAILURE_MS << min(self._failures, _DOUBLINGS_MAX), FAILURE_MAX_MS)
        self._failures += 1
        self.not_before_ms = now_ms + delay_ms

    # ------------------------------------------------------------ how it is

    def lost(self) -> StopAsking | None:
        """Know that the broker cannot be reached."""
        self.is_down = True
        self.hint_count = 0
        return self.stop()

    def back(self) -> None:
        """Know that it can be reached again: it may be asked at once."""
        self.is_down = False
        self.not_before_ms = self._failures = self._misses = 0
        self.error = None

    def is_covered(self, now_ms: int) -> bool:
        """Whether the broker would have told of a message that is there already."""
        return bool(self.number) and now_ms - self._asked_at_ms >= ANSWER_MS

    def is_failing(self, now_ms: int) -> bool:
        """Whether the broker refuses."""
        has_parked = self.number and now_ms - self._asked_at_ms >= PARKED_MS
        return self.error is not None and not has_parked
