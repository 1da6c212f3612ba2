"""Results of actions, for the page after a change. The audit log has them for longer."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from typing import Final, NamedTuple, final

RESULTS_MAX: Final = 1_000
RESULT_S_MAX: Final = 600.0


class Result(NamedTuple):
    """The result of one action."""

    user: str  # the user of the action; "": without a login
    title: str
    rows: list[tuple[str, str]]
    unreachable: list[str]
    back: str
    is_once: bool  # shown only once, because it has a secret
    kept_at_s: float


@final
class Results:
    """The newest results of this process, each for the user that performed the action."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Result] = OrderedDict()

    def keep(
        self,
        *,
        user: str,
        title: str,
        rows: list[tuple[str, str]],
        unreachable: list[str],
        back: str,
        is_once: bool = False,
    ) -> str:
        """Keep a result, and return its id."""
        while len(self._kept) >= RESULTS_MAX:
            self._kept.popitem(last=False)
        key = secrets.token_urlsafe(16)
        self._kept[key] = Result(user, title, rows, unreachable, back, is_once, time.monotonic())
        return key

    def find(self, key: str, user: str) -> Result | None:
        """Return a result of this user; None if it is not known, or too old."""
        found = self._kept.get(key)
        if found is None or found.user != user or time.monotonic() - found.kept_at_s > RESULT_S_MAX:
            return None
        if found.is_once:
            del self._kept[key]
        return found
