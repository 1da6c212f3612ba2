"""Checks of many items after changes, some in each turn of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Generic, TypeVar, final

from tidemill.common.slices import TURN_NS

T = TypeVar("T")


@final
class ChangeChecks(Generic[T]):
    """The checks of all items of an owner after each change.

    A change during a pass over the items causes one more pass behind it. So changes without a pause
    delay the check of no item, and each item is checked within two passes after a change.
    """

    def __init__(self, items: Collection[T], check: Callable[[T], None], *, a_turn: int) -> None:
        """`items` are those of the owner, which adds and removes them.

        A turn of the loop checks at most `a_turn` of them, and begins no check after 2 ms.
        """
        self._items = items
        self._check = check
        self._a_turn = a_turn
        self._unchecked: list[T] = []  # of the present pass; at most one place for each item
        self._is_due = False  # whether another pass follows
        self._is_scheduled = False

    def check_soon(self) -> None:
        """Check all items after a change. It costs the same for any number of items."""
        if not self._items:
            return
        self._is_due = True
        if not self._is_scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._is_scheduled = bool(self._unchecked) or self._is_due
        if self._is_scheduled:
            asyncio.get_running_loop().call_soon(self._check_some)

    def _check_some(self) -> None:
        if not self._unchecked:
            self._is_due = False
            self._unchecked = list(self._items)
        turn_ends_ns = time.monotonic_ns() + TURN_NS
        try:
            for _ in range(self._a_turn):
                if not self._unchecked or time.monotonic_ns() >= turn_ends_ns:
                    break
                item = self._unchecked.pop()
                if item in self._items:
                    self._check(item)
        finally:
            # An unexpected error in one check does not keep the other items from theirs.
            self._schedule()
