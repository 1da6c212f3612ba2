"""The security items of a broker group: the fold of its configuration updates.

A whole table arrives in pages. Until the last page, the items from before stay, so that calls are
checked against the last known rights and not against a part of the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from sys import intern
from typing import Any, TypeAlias, final

from tidemill.security.item_counts import ItemCounts
from tidemill.security.listed_identities import ListedIdentities
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

ItemKey: TypeAlias = tuple[str, str]  # kind and name; the security mode has no name

_USER = "user"  # kind of items
_DELETE = "delete"  # prefix of the operation of a deletion: deleteUser


@final
class SecurityCopy:
    """Encoded security items by kind and name, as of the last update; the link is its writer."""

    def __init__(self) -> None:
        self.items: dict[ItemKey, bytes] = {}
        self.identities = ListedIdentities()  # of the users among the items
        self.counts = ItemCounts()  # of the items
        self.version = 0  # of the table of this broker group
        self.is_complete = False  # whether a whole table of the present store has arrived
        # Called with kind and name after each change of an item, and after a whole table.
        self.on_change: Callable[[str, str], None] = lambda _kind, _name: None
        self.on_table: Callable[[], None] = lambda: None
        # The parts that have arrived of a whole table; their counts; whether they differ from
        # `items`.
        self._next: dict[ItemKey, bytes] | None = None
        self._next_identities = ListedIdentities()
        self._next_counts = ItemCounts()
        self._is_different = False

    def apply(self, update: link_pb2.ConfigUpdate) -> None:
        """Fold one update."""
        if update.is_complete:
            self._next, self._next_identities = {}, ListedIdentities()
            self._next_counts, self._is_different = ItemCounts(), False
            if not update.security_follows:
                # There are no items, or the broker is below feature level 3.
                self._finish(update.security_version)
        if self._next is not None:
            changed = self._fold(
                self._next, self._next_identities, self._next_counts, update.security_items
            )
            self._is_different = self._is_different or bool(changed)
            if update.is_security_complete:
                self._finish(update.security_version)
            return
        for key in self._fold(self.items, self.identities, self.counts, update.security_items):
            self.on_change(*key)
        if update.HasField("security_version"):
            self.version = update.security_version

    def expect_table(self) -> None:
        """Wait for the table of another store; the items from before stay until it has arrived."""
        self.is_complete = False

    def _fold(
        self,
        items: dict[ItemKey, bytes],
        identities: ListedIdentities,
        counts: ItemCounts,
        changes: Iterable[bytes],
    ) -> list[ItemKey]:
        """Put and delete items; return the keys of those that differ from the present ones."""
        changed = []
        for encoded in changes:
            key, fields = _read(encoded)
            known = self.items.get(key)
            if key[0] == _USER:
                identities.put(key[1], fields or {})
            if fields is None:
                if items.pop(key, None) is not None:
                    counts.remove(*key)
            else:
                if key not in items:
                    counts.add(*key)
                items[key] = encoded if known != encoded else known  # One copy stays in memory.
            if items.get(key) != known:
                changed.append(key)
        return changed

    def _finish(self, version: int) -> None:
        """Take over the whole table that has arrived."""
        assert self._next is not None, "a whole table has arrived"
        # To compare the tables would take milliseconds.
        has_changed = self._is_different or len(self._next) != len(self.items)
        self.items, self._next = self._next, None
        self.identities, self.counts = self._next_identities, self._next_counts
        self.version, self.is_complete = version, True
        if has_changed:
            self.on_table()


def _read(encoded: bytes) -> tuple[ItemKey, dict[str, Any] | None]:
    """Return the key of an item, and its fields; None if it is a deletion."""
    item: dict[str, Any] = json.loads(encoded)
    op: str = item["op"]
    name: str = item.get("name", "")
    if op.startswith(_DELETE):
        return (op.removeprefix(_DELETE).lower(), name), None
    return (intern(op), name), item[op]
