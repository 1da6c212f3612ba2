"""Commands that repeat until they are done or until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable


def watch(look: Callable[[], bool], period_s: float) -> None:
    """Call `look` every `period_s` while it returns True."""
    while look():
        time.sleep(period_s)
