"""Looks at a cluster of which a part gives no answer, or that take back what an earlier one told.

A queue or a log that ends before where it was read to, and a broker group that is not there, are
data loss where they stay so. For some seconds they may also be the word of a master that was
replaced, or of a proxy that has not heard of a broker group yet.
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
    """Since when broker groups give no answer to a stream, which waits for them for a while."""

    def __init__(
        self, fail_after_ms: int, *, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._fail_after_ms, self._monotonic_s = fail_after_ms, monotonic_s
        self._since_s: dict[str, float] = {}

    def note(self, unreachable: Collection[str]) -> None:
        """Take in who gives no answer now. Raises NoAnswer for who has given none for long."""
        now_s = self._monotonic_s()
        self._since_s = {broker: self._since_s.get(broker, now_s) for broker in unreachable}
        for broker, since_s in self._since_s.items():
            if (now_s - since_s) * 1000 > self._fail_after_ms:
                raise NoAnswer(f"{broker} has been away for {now_s - since_s:.0f} s: failAfterMs")


def repeat_until_settled(
    client: ClusterClient,
    look: Callable[[], V],
    short_queues: Callable[[V], Collection[object]],
    *,
    short_s: float,
) -> V:
    """Return a look that takes nothing back; after `short_s` it is the last one, whatever it is."""
    began_s, attempt = time.monotonic(), 0
    while True:
        view = look()
        found = short_queues(view)
        if not found or time.monotonic() - began_s >= short_s:
            return view
        attempt += 1
        if attempt == 1:
            # Of thousands of queues one is named.
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            log.warning(
                "%s%s: less is there than there was. It is looked at again for %.0f s",
                min(map(str, found)),
                more,
                short_s,
            )
        client.pause(attempt)
