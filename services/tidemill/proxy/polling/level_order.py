"""The order of the brokers of a PRIORITY topic: the highest known level first (ADR 0089).

Each pop belongs to one of two accounts, so the factor counts each message once.

- If the broker with the highest level also has the oldest message of a lower level, the broker
  applies the factor of the consumer group, with its own credit.
- Otherwise the pop is strict: it takes the highest levels. Each message adds 100 - factor to the
  credit of the proxy, because an older message of a lower level waits at another broker.

If the credit of the proxy pays for a whole answer, the pop is fair: it takes the oldest messages of
the lower levels at the broker that has the oldest one. Each costs the factor. With factor 0, every
pop goes to the broker with the oldest message.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, NamedTuple, Protocol, TypeVar, final

FACTOR_MAX: Final = 100  # strict: low levels can starve
NO_LEVEL: Final = -1
FAIR: Final = 0  # factor of a fair pop: the oldest messages of the lower levels
# Bound of the credit and of the debt: it pays for two full answers.
CREDIT_MAX: Final = 64 * FACTOR_MAX


class HintLevels(NamedTuple):
    """The highest level with a ready message, and the ages of the oldest ones at a broker.

    Times are Unix times in ms.
    """

    highest: int
    oldest_at_ms: int  # 0: unknown, and so older than any other
    oldest_lower_at_ms: int  # of the levels below the highest one; 0: there is no such message


class LevelChoice(NamedTuple):
    """The choice of a broker for one pop."""

    factor: int | None  # of this pop: FACTOR_MAX, FAIR, or None for that of the group
    highest: int  # the highest known level
    # The highest level of the other brokers. NO_LEVEL after a fair choice, which takes a lower
    # level on purpose.
    other_level: int
    reserved: int  # credit


class HintedBroker(Protocol):
    """A broker with ready messages."""

    levels: HintLevels | None  # None: unknown, so it counts as level 0
    hint_count: int  # of the ready messages, up to a limit


_HintedT = TypeVar("_HintedT", bound=HintedBroker)
_UNKNOWN: Final = HintLevels(0, 0, 0)


@final
class LevelOrder:
    """The order of the brokers for one topic and consumer group."""

    __slots__ = ("_credit", "_turn", "factor")

    def __init__(self) -> None:
        self.factor = FACTOR_MAX
        self._credit = 0
        self._turn = 0

    def choose(
        self, hinted: Collection[_HintedT], max_messages: int
    ) -> tuple[_HintedT, LevelChoice]:
        """Return the next broker, and how to pop up to `max_messages` there."""
        factor, highest = self.factor, max(_levels(one).highest for one in hinted)
        ages = {one: _age(_levels(one), highest, factor) for one in hinted}
        known = [age for age in ages.values() if age is not None]
        oldest_at_ms = min(known) if known and factor < FACTOR_MAX else None
        if oldest_at_ms is not None:
            oldest = next(one for one, age in ages.items() if age == oldest_at_ms)
            cost = factor * min(oldest.hint_count, max_messages)
            if self._credit >= cost:
                # With factor 0 the broker does the same without a factor of the pop.
                return oldest, LevelChoice(FAIR if factor else None, highest, NO_LEVEL, cost)
        best = [one for one in hinted if _levels(one).highest == highest]
        self._turn += 1
        chosen = best[self._turn % len(best)]
        others = [_levels(one).highest for one in hinted if one is not chosen]
        of_broker = oldest_at_ms is None or ages[chosen] == oldest_at_ms
        own_factor = None if of_broker else FACTOR_MAX
        return chosen, LevelChoice(own_factor, highest, max(others, default=NO_LEVEL), 0)

    def begin(self, choice: LevelChoice) -> None:
        """Begin a pop: reserve its credit, so that other pops cannot spend it."""
        self._add(-choice.reserved)

    def end(self, choice: LevelChoice, levels: Mapping[int, int]) -> None:
        """End a pop: account for its messages by level."""
        self._add(choice.reserved)
        if choice.factor is None or self.factor == FACTOR_MAX:
            return
        low = sum(count for level, count in levels.items() if level < choice.highest)
        high = sum(levels.values()) - low
        self._add(high * (FACTOR_MAX - self.factor) - low * self.factor)

    def _add(self, credit: int) -> None:
        self._credit = max(-CREDIT_MAX, min(self._credit + credit, CREDIT_MAX))


def _levels(broker: HintedBroker) -> HintLevels:
    return _UNKNOWN if broker.levels is None else broker.levels


def _age(levels: HintLevels, highest: int, factor: int) -> int | None:
    """Return the store time of the oldest message that a fair choice may take; None: none."""
    if levels.highest < highest or not factor:
        return levels.oldest_at_ms
    return levels.oldest_lower_at_ms or None
