"""Which pages of a buffer changed, and what a flush that is under way still has to write.

A flush writes the state of one moment, slice by slice, while the owner goes on changing pages: a
page that changes before it was written is copied first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import final


@final
class DirtyPages:
    """The changed pages of one buffer."""

    __slots__ = ("_frozen", "_read", "dirty")

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read  # a page's bytes as they are now
        self.dirty: set[int] = set()
        # Pages of the flush under way, each with its bytes of that moment once it changed since.
        self._frozen: dict[int, bytes | None] = {}

    def touch(self, page: int) -> None:
        """Note that `page` is about to change."""
        if self._frozen and self._frozen.get(page, b"") is None:
            self._frozen[page] = self._read(page)
        self.dirty.add(page)

    def is_held(self, page: int) -> bool:
        """Return whether the page's bytes in memory are the only ones."""
        return page in self.dirty or page in self._frozen

    def freeze(self) -> None:
        """Begin a flush: what is dirty now is what it writes."""
        assert not self._frozen, "one flush at a time"
        self._frozen = dict.fromkeys(sorted(self.dirty))
        self.dirty = set()

    def frozen(self) -> Iterator[tuple[int, bytes]]:
        """Yield each page of the flush with its bytes; one that is yielded is done with."""
        while self._frozen:
            page = next(iter(self._frozen))
            data = self._frozen[page]
            yield page, self._read(page) if data is None else data
            del self._frozen[page]
