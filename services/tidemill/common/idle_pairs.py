"""Pairs of topic and consumer group without change for an hour, which a scrape leaves out.

A cluster has many more pairs than pairs with messages: each consumer group that ever read a topic
is one, with about fifty series.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any, Final, final

IDLE_S: Final = 3600.0


@final
class IdlePairs:
    """The time of the last change of each pair, and of its last message.

    A pair comes back in the scrape that notes a change, with all that was counted meanwhile.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._counts: dict[Hashable, dict[object, object]] = {}
        self._changed_at_s: dict[Hashable, float] = {}
        self._idle: set[Hashable] = set()

    def __len__(self) -> int:
        """Return the number of idle pairs."""
        return len(self._idle)

    def __contains__(self, pair: Hashable) -> bool:
        """Return whether a pair was idle when it was noted last."""
        return pair in self._idle

    def note(self, pair: Hashable, metric: Hashable, counts: object) -> bool:
        """Note the counts of a metric of a pair; return whether the pair is idle."""
        known = self._counts.setdefault(pair, {})
        has_changed = known.get(metric) != counts
        if has_changed:
            known[metric] = counts
        return self._note(pair, is_busy=has_changed)

    def note_messages(self, pair: Hashable, count: int) -> bool:
        """Note how many messages a pair has, ready or in flight; return whether it is idle."""
        return self._note(pair, is_busy=count > 0)

    def forget_unless(self, is_known: Callable[[Any], bool]) -> None:
        """Remove deleted pairs."""
        for pair in [pair for pair in self._changed_at_s if not is_known(pair)]:
            self._counts.pop(pair, None)
            self._changed_at_s.pop(pair, None)
            self._idle.discard(pair)

    def _note(self, pair: Hashable, *, is_busy: bool) -> bool:
        now_s = self._now_s()
        if is_busy:
            self._changed_at_s[pair] = now_s
            self._idle.discard(pair)
        elif now_s - self._changed_at_s.setdefault(pair, now_s) >= IDLE_S:
            self._idle.add(pair)
        return pair in self._idle
