"""Numbers of security items by kind and subject, counted while the items arrive (ADR 0078).

A name of a ban or a quota begins with the kind of its subject. To know whether there are bans of
addresses, nothing has to look at 10,000 names at once. Address bans also count by version and
length of the prefix, because a look-up tries each length.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, final

ADDRESS: Final = "address"  # kind of a subject
SLASH: Final = "%2F"  # between an address and the length of its prefix, in the name of a ban


@final
class ItemCounts:
    """The counts of a table of security items. The owner of the items calls `add` and `remove`."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()  # by kind of the items and subject
        self._kinds: Counter[str] = Counter()
        # Names with addresses by version and length of the prefix.
        self.lengths: dict[int, Counter[int]] = {4: Counter(), 6: Counter()}

    def count(self, kind: str, subject: str | None = None) -> int:
        """Return the number of items of a kind, optionally of one kind of subjects."""
        return self._kinds[kind] if subject is None else self._counts[kind, subject]

    def add(self, kind: str, name: str) -> None:
        """Count an item that was put, and was not there before."""
        self._change(kind, name, 1)

    def remove(self, kind: str, name: str) -> None:
        """Count an item that was deleted."""
        self._change(kind, name, -1)

    def _change(self, kind: str, name: str, change: int) -> None:
        self._kinds[kind] += change
        subject, _, value = name.partition(":")
        if not value:
            return  # Names of users and roles have no subject.
        self._counts[kind, subject] += change
        host, _, length = value.rpartition(SLASH)
        if subject != ADDRESS or not length.isdecimal():
            return
        lengths = self.lengths[6 if ":" in host else 4]
        lengths[int(length)] += change
        if not lengths[int(length)]:
            del lengths[int(length)]
