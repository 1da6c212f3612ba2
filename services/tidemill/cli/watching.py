"""Looking again and again, until there is nothing more to see or Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable


def watch(look: Callable[[], bool], period_s: float) -> None:
    """Call `look` every `period_s` while it says that there is more to see."""
    try:
        while look():
            time.sleep(period_s)
    except KeyboardInterrupt:
        # That is how somebody says that it is enough, and nothing was wrong.
        return
