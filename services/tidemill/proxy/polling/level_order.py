"""The order of the brokers of a PRIORITY topic: the highest known level first (ADR 0089).

A strict choice takes the broker with the highest level. If it passes a ready message of a lower
level, it adds 100 - factor to a credit. A fair choice costs the factor, and takes the broker with
the oldest known message of a lower level. With factor 0 it takes the oldest one of all levels.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple, Protocol, TypeVar, final

FACTOR_MAX: Final = 100  # strict: low levels can starve
NO_LEVEL: Final = -1


class HintLevels(NamedTuple):
    """The highest level with a ready message, and the ages of the oldest ones at a broker.

    Times are Unix times in ms.
    """

    highest: int
    oldest_at_ms: int  # 0: unknown, and so older than any other
    oldest_lower_at_ms: int  # of the levels below the highest one; 0: there is no such message


class HintedBroker(Protocol):
    """A broker with ready messages."""

    levels: HintLevels | None  # None: unknown, so it counts as level 0


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

    def choose(self, hinted: Collection[_HintedT]) -> tuple[_HintedT, int]:
        """Return the next broker, and the highest level of the others.

        That level is NO_LEVEL after a fair choice, which takes a lower level on purpose.
        """
        highest = max(_levels(one).highest for one in hinted)
        ages = {one: _age(_levels(one), highest, self.factor) for one in hinted}
        lower = [one for one in hinted if ages[one] is not None]
        if self.factor < FACTOR_MAX and lower:
            if self._credit >= self.factor:
                self._credit -= self.factor
                return min(lower, key=lambda one: ages[one] or 0), NO_LEVEL
            self._credit += FACTOR_MAX - self.factor
        best = [one for one in hinted if _levels(one).highest == highest]
        self._turn += 1
        chosen = best[self._turn % len(best)]
        others = [_levels(one).highest for one in hinted if one is not chosen]
        return chosen, max(others, default=NO_LEVEL)


def _levels(broker: HintedBroker) -> HintLevels:
    return _UNKNOWN if broker.levels is None else broker.levels


def _age(levels: HintLevels, highest: int, factor: int) -> int | None:
    """Return the store time of the oldest message that a fair choice may take; None: none."""
    if levels.highest < highest or not factor:
        return levels.oldest_at_ms
    return levels.oldest_lower_at_ms or None
