"""Unreachable broker groups, and cluster states that contradict an earlier state.

A queue or log that ends before its read position, and a missing broker group, are data loss if they
stay so. For some seconds, a replaced master or a proxy without news of a broker group may report
the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TypeVar, final

from tidemill_pipeline.client import ClusterClient
from tidemill_pipeline.errors import NoAnswer
from tidemill_pipeline.pulling import log

V = TypeVar("V")


@final
class OutageTimer:
    """Outages of broker groups during a stream, which fails after a limit."""

    def __init__(
        self, fail_after_ms: int, *, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._fail_after_ms, self._monotonic_s = fail_after_ms, monotonic_s
        self._since_s: dict[str, float] = {}

    def note(self, unreachable: Collection[str]) -> None:
        """Record the unreachable broker groups. Raises NoAnswer for an outage over the limit."""
        now_s = self._monotonic_s()
        self._since_s = {broker: self._since_s.get(broker, now_s) for broker in unreachable}
        for broker, since_s in self._since_s.items():
            if (now_s - since_s) * 1000 > self._fail_after_ms:
                raise NoAnswer(
                    f"{broker} has been unreachable for {now_s - since_s:.0f} s, longer than"
                    f" failAfterMs = {self._fail_after_ms}"
                )


def repeat_until_settled(
    client: ClusterClient,
    look: Callable[[], V],
    short_queues: Callable[[V], Collection[object]],
    *,
    short_s: float,
) -> V:
    """Return a view without short queues. After `short_s`, return the last view as it is."""
    began_s, attempt = time.monotonic(), 0
    while True:
        view = look()
        short = short_queues(view)
        if not short or time.monotonic() - began_s >= short_s:
            return view
        attempt += 1
        if attempt == 1:
            # There may be thousands of queues, so name only one.
            more = f" and {len(short) - 1} more" if len(short) > 1 else ""
            log.warning(
                "%s%s: ends before its known end. The read retries for %.0f s",
                min(map(str, short)),
                more,
                short_s,
            )
        client.pause(attempt)
