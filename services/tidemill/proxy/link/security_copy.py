"""The security items of a broker group: the fold of its configuration updates.

A whole table arrives in pages. Until the last page, the items from before stay, so that calls are
checked against the last known rights and not against a part of the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, final

from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

ItemKey: TypeAlias = tuple[str, str]  # kind and name; the security mode has no name

_DELETE = "delete"  # prefix of the operation of a deletion: deleteUser


@final
class SecurityCopy:
    """Encoded security items by kind and name, as of the last update; the link is its writer."""

    def __init__(self) -> None:
        self.items: dict[ItemKey, bytes] = {}
        self.version = 0  # of the table of this broker group
        self.is_complete = False  # whether a whole table has arrived since the store is known
        # Called with kind and name after each change of an item.
        self.on_change: Callable[[str, str], None] = lambda _kind, _name: None
        # While a whole table arrives: the keys seen so far, and the items that differ.
        self._seen: set[ItemKey] | None = None
        self._staged: dict[ItemKey, bytes] = {}

    def apply(self, update: link_pb2.ConfigUpdate) -> None:
        """Fold one update."""
        if update.is_complete:
            self._seen, self._staged = set(), {}
            if not update.security_follows:
                # There are no items, or the broker is below feature level 3.
                self._finish(update.security_version)
        if self._seen is not None:
            self._stage(update.security_items)
            if update.is_security_complete:
                self._finish(update.security_version)
            return
        for encoded in update.security_items:
            key, is_deletion = _read(encoded)
            if is_deletion:
                self._delete(key)
            else:
                self._put(key, encoded)
        if update.HasField("security_version"):
            self.version = update.security_version

    def reset(self) -> None:
        """Forget the table of a store that was replaced by another one."""
        for key in list(self.items):
            self._delete(key)
        self.version, self.is_complete = 0, False

    def _stage(self, items: Iterable[bytes]) -> None:
        assert self._seen is not None, "a whole table arrives"
        for encoded in items:
            key, is_deletion = _read(encoded)
            if is_deletion:
                # A change while the pages were sent.
                self._seen.discard(key)
                self._staged.pop(key, None)
                continue
            self._seen.add(key)
            if self.items.get(key) == encoded:
                self._staged.pop(key, None)
            else:
                self._staged[key] = encoded

    def _finish(self, version: int) -> None:
        """Take over the whole table that has arrived."""
        assert self._seen is not None, "a whole table has arrived"
        seen, staged = self._seen, self._staged
        gone = [key for key in self.items if key not in seen]
        self._seen, self._staged = None, {}
        self.version, self.is_complete = version, True
        for key in gone:
            self._delete(key)
        for key, encoded in staged.items():
            self._put(key, encoded)

    def _put(self, key: ItemKey, encoded: bytes) -> None:
        self.items[key] = encoded
        self.on_change(*key)

    def _delete(self, key: ItemKey) -> None:
        if self.items.pop(key, None) is not None:
            self.on_change(*key)


def _read(encoded: bytes) -> tuple[ItemKey, bool]:
    """Return the key of an item, and whether it is a deletion."""
    item: dict[str, Any] = json.loads(encoded)
    op: str = item["op"]
    name: str = item.get("name", "")
    if op.startswith(_DELETE):
        return (op.removeprefix(_DELETE).lower(), name), True
    return (op, name), item[op] is None
