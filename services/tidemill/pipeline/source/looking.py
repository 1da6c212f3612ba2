"""Looks at a cluster that take back what an earlier one told.

A queue or a log that ends before where it was read to, and a broker group that is not there, are
data loss where they stay so. For some seconds they may also be the word of a master that was
replaced, or of a proxy that has not heard of a broker group yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TypeVar

from tidemill.pipeline.client import Client
from tidemill.pipeline.pulling import log

V = TypeVar("V")


def look_until_settled(
    client: Client, look: Callable[[], V], taken_back: Callable[[V], Collection[object]], *,
    short_s: float,
) -> V:  # fmt: skip
    """Return a look that takes nothing back; after `short_s` it is the last one, whatever it is."""
    began_s, attempt = time.monotonic(), 0
    while True:
        view = look()
        found = taken_back(view)
        if not found or time.monotonic() - began_s >= short_s:
            return view
        attempt += 1
        if attempt == 1:
            # Of thousands of queues one is named.
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            log.warning(
                "%s%s: less is there than there was. It is looked at again for %.0f s",
                min(map(str, found)), more, short_s,
            )  # fmt: skip
        client.pause(attempt)
