"""What clients do wrong, for whoever reads the log: a line a minute of each kind, no more."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final, NamedTuple, final

import structlog

from tidemill.transport.http2.limits import Limit

log = structlog.get_logger()

PERIOD_S: Final = 60.0  # between two lines of one kind


class _Told(NamedTuple):
    told_at_s: float
    untold_count: int


@final
class MisuseLog:
    """Kinds of misuse, and when each was told last. Kinds are few: limits and reasons of ours."""

    def __init__(self) -> None:
        self.hits: Counter[Limit] = Counter()  # overstepped limits
        self.failures: Counter[str] = Counter()  # connections that broke the protocol, by how
        self.unheard_answers = 0  # of which nobody hears whether they were read: too many wait
        self._told: dict[str, _Told] = {}

    def fail(self, kind: str, *, peer: str, reason: str) -> None:
        """Count a connection that ended by a fault of its client's, and tell of it."""
        self.failures[kind] += 1
        self.note(kind, peer=peer, reason=reason)

    def refuse(self, limit: Limit, *, peer: str, reason: str) -> None:
        """Count an overstepped limit, and tell of it."""
        self.hits[limit] += 1
        self.note(limit, peer=peer, reason=reason)

    def note(
        self, kind: str, *, peer: str, reason: str, event: str = "clients were refused"
    ) -> None:
        """Tell of it, with how many there were since the last line; or count it for the next."""
        now_s = time.monotonic()
        told = self._told.get(kind)
        if told is not None and now_s - told.told_at_s < PERIOD_S:
            self._told[kind] = told._replace(untold_count=told.untold_count + 1)
            return
        count = 1 + (told.untold_count if told is not None else 0)
        self._told[kind] = _Told(now_s, 0)
        log.warning(event, kind=kind, count=count, last_peer=peer, reason=reason)
