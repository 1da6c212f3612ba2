"""Counts and log lines about misuse by clients: one line per minute and kind."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final, NamedTuple, final

import structlog

from tidemill.transport.http2.limits import Limit

log = structlog.get_logger()

KINDS_MAX: Final = 1_024  # kinds and peers; beyond it the oldest one is forgotten
PERIOD_S: Final = 60.0  # between two lines of one kind


class _LastReport(NamedTuple):
    logged_at_s: float
    suppressed_count: int  # since then


@final
class MisuseLog:
    """The counters of misuse, and the last log line of each kind."""

    def __init__(self) -> None:
        self.hits: Counter[Limit] = Counter()  # exceeded limits
        self.failures: Counter[str] = Counter()  # connections that broke the protocol, by error
        self.unconfirmed_count = 0  # responses without a read confirmation, because too many waited
        self._reports: dict[str, _LastReport] = {}

    def report_failure(
        self, kind: str, *, peer: str, reason: str, is_per_peer: bool = False
    ) -> None:
        """Count and report a connection that ended because of an error of its client.

        `is_per_peer`: one line a minute for each peer, because each has to be reconfigured.
        """
        self.failures[kind] += 1
        self.report(f"{kind} of {peer}" if is_per_peer else kind, peer=peer, reason=reason)

    def report_refusal(self, limit: Limit, *, peer: str, reason: str) -> None:
        """Count and report an exceeded limit."""
        self.hits[limit] += 1
        self.report(limit, peer=peer, reason=reason)

    def report(
        self,
        kind: str,
        *,
        peer: str,
        reason: str,
        event: str = "clients were refused",
        **fields: object,
    ) -> None:
        """Log the event with the number since the last line, or count it for the next line."""
        now_s = time.monotonic()
        last = self._reports.get(kind)
        if last is not None and now_s - last.logged_at_s < PERIOD_S:
            self._reports[kind] = last._replace(suppressed_count=last.suppressed_count + 1)
            return
        count = 1 + (last.suppressed_count if last is not None else 0)
        if last is None and len(self._reports) >= KINDS_MAX:
            del self._reports[next(iter(self._reports))]
        self._reports[kind] = _LastReport(now_s, 0)
        log.warning(event, kind=kind, count=count, last_peer=peer, reason=reason, **fields)
