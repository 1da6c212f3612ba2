"""The changed pages of a buffer, and the pages that a flush still has to write.

A flush writes the state of one moment, slice by slice, while the owner changes pages. A page that
changes before the flush has written it is copied first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import final


@final
class DirtyPages:
    """The changed pages of one buffer."""

    __slots__ = ("_frozen", "_read", "dirty")

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read  # returns the current bytes of a page
        self.dirty: set[int] = set()
        # Pages of the current flush. A page that changed since has its bytes from before.
        self._frozen: dict[int, bytes | None] = {}

    def touch(self, page: int) -> None:
        """Record that `page` is about to change."""
        if self._frozen and self._frozen.get(page, b"") is None:
            self._frozen[page] = self._read(page)
        self.dirty.add(page)

    def is_unwritten(self, page: int) -> bool:
        """Return whether the page has bytes that are not in the file."""
        return page in self.dirty or page in self._frozen

    def freeze(self) -> None:
        """Begin a flush of the pages that are dirty now."""
        assert not self._frozen, "one flush at a time"
        self._frozen = dict.fromkeys(sorted(self.dirty))
        self.dirty = set()

    def frozen(self) -> Iterator[tuple[int, bytes]]:
        """Yield each page of the flush with its bytes. The caller writes it before the next one."""
        while self._frozen:
            page = next(iter(self._frozen))
            data = self._frozen[page]
            yield page, self._read(page) if data is None else data
            del self._frozen[page]
