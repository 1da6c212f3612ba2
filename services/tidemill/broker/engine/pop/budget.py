"""The size limit of one pop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

# Bytes of records in one pop, unless the first record is larger. Without it, 32 messages of 4 MiB
# make a reply of 128 MiB, which a proxy holds in one piece until a slow client has read it.
POP_BYTES_MAX: Final = 16 << 20
# A larger record travels alone. A client that cannot receive it then fails without the messages
# beside it, which would otherwise use up their attempts too.
ALONE_BYTES: Final = 1 << 20


@final
class PopBudget:
    """The messages and bytes that a pop may still take from a queue."""

    __slots__ = ("_bytes_left", "_is_untouched", "is_alone", "messages_left", "taken_bytes")

    def __init__(self, messages_left: int, *, taken_bytes: int, is_untouched: bool) -> None:
        self.messages_left = messages_left
        self.taken_bytes = 0
        self._bytes_left = POP_BYTES_MAX - taken_bytes
        self._is_untouched = is_untouched  # the first message always fits
        self.is_alone = False  # whether the only message of the pop was taken

    def take(self, size_bytes: int) -> bool:
        """Take a message. Return False if it does not fit."""
        is_first = self._is_untouched and not self.taken_bytes
        fits = size_bytes <= min(self._bytes_left, ALONE_BYTES)
        if not self.messages_left or not (fits or is_first):
            return False
        self.messages_left -= 1
        if size_bytes > ALONE_BYTES:
            self.messages_left, self.is_alone = 0, True
        self.taken_bytes += size_bytes
        self._bytes_left -= size_bytes
        return True

    def take_first(self, sizes_bytes: Sequence[int]) -> int:
        """Take messages from the front as far as they fit. Return their number."""
        total_bytes, count = sum(sizes_bytes), len(sizes_bytes)
        if total_bytes <= min(self._bytes_left, ALONE_BYTES) and count <= self.messages_left:
            self.messages_left -= count
            self.taken_bytes += total_bytes
            self._bytes_left -= total_bytes
            return count
        for n, size_bytes in enumerate(sizes_bytes):
            if not self.take(size_bytes):
                return n
        return count
