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

    title: str
    rows: list[tuple[str, str]]
    unreachable: list[str]
    back: str


class _KeptResult(NamedTuple):
    user: str  # the user of the action; "": without a login
    result: Result
    kept_at_s: float


@final
class Results:
    """The newest results of this process, each for the user that performed the action."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _KeptResult] = OrderedDict()

    def keep(self, user: str, result: Result) -> str:
        """Keep a result, and return its id."""
        while len(self._kept) >= RESULTS_MAX:
            self._kept.popitem(last=False)
        key = secrets.token_urlsafe(16)
        self._kept[key] = _KeptResult(user, result, time.monotonic())
        return key

    def find(self, key: str, user: str) -> Result | None:
        """Return a result of this user; None if it is not known, or too old."""
        found = self._kept.get(key)
        is_known = found is not None and found.user == user
        if found is None or not is_known or time.monotonic() - found.kept_at_s > RESULT_S_MAX:
            return None
        return found.result
