"""Users, roles, tokens, quotas, bans and the security mode: a part of the catalog (ADR 0071).

An item has a kind, a name and a version. This module does not read the rest of it. The whole table
has one version: the number of its changes at the home. The version of an item is the version of the
table after the change that put the item.

A deleted item leaves nothing but the version of the table. In STATE and snapshots, an item
`securityVersion` states this version. A follower also records it after a copy of the table.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias, cast, final

from tidemill.broker.engine.layout.config import encode_item

SECURITY_LEVEL: Final = 3  # feature level of the configuration items
MODE: Final = "security"  # kind of the only item without a name
# Largest number of items of each kind with names.
COUNTS_MAX: Final[dict[str, int]] = {
    "user": 10_000,
    "role": 1_000,
    "token": 10_000,
    "quota": 10_000,
    "ban": 10_000,
}
DELETIONS: Final[dict[str, str]] = {
    "deleteUser": "user",
    "deleteRole": "role",
    "deleteToken": "token",
    "deleteQuota": "quota",
    "deleteBan": "ban",
}
DELETION_OF: Final[dict[str, str]] = {kind: op for op, kind in DELETIONS.items()}
VERSION_OP: Final = "securityVersion"
SECURITY_OPS: Final = frozenset({MODE, VERSION_OP, *COUNTS_MAX, *DELETIONS})
ITEM_PREFIX: Final = "security "  # of the keys of these items in the catalog

ItemKey: TypeAlias = tuple[str, str]  # kind and name; the mode has no name
MODE_KEY: Final[ItemKey] = (MODE, "")


class ItemPage(NamedTuple):
    """A part of the items of one kind, in the order of their names."""

    items: list[bytes]
    has_more: bool


@final
class SecurityItems:
    """Security items by kind and name, and the version of the table."""

    def __init__(self) -> None:
        self._items: dict[ItemKey, bytes] = {}
        self._names: dict[str, list[str]] = {kind: [] for kind in (MODE, *COUNTS_MAX)}  # ascending
        self.version = 0
        self.size_bytes = 0  # of all items

    @property
    def items(self) -> Mapping[ItemKey, bytes]:
        """All items, encoded."""
        return self._items

    def find(self, key: ItemKey) -> bytes | None:
        """Return an encoded item; None if it does not exist."""
        return self._items.get(key)

    def count(self, kind: str) -> int:
        """Return the number of items of a kind."""
        return len(self._names[kind])

    def names(self, kind: str) -> list[str]:
        """Return the names of all items of a kind, ascending."""
        return self._names[kind][:]

    def page(self, kind: str, after_name: str | None, *, limit: int, bytes_max: int) -> ItemPage:
        """Return items after a name (None: from the first), at least one if there is one."""
        names, found, size = self._names[kind], list[bytes](), 0
        first = 0 if after_name is None else bisect_right(names, after_name)
        for name in names[first : first + limit]:
            item = self._items[kind, name]
            size += len(item)
            if found and size > bytes_max:
                break
            found.append(item)
        return ItemPage(found, first + len(found) < len(names))

    # ------------------------------------------------------------ fold

    def apply(self, item: dict[str, Any]) -> bool:
        """Apply an item or a deletion; return whether an item changed."""
        if item["op"] == VERSION_OP:
            return False
        key = key_of(item)
        return self._delete(key) if is_deletion(item) else self._put(key, encode_item(item))

    def _put(self, key: ItemKey, encoded: bytes) -> bool:
        known = self._items.get(key)
        if known == encoded:
            return False
        if known is None:
            insort(self._names[key[0]], key[1])
        self.size_bytes += len(encoded) - len(known or b"")
        self._items[key] = encoded
        return True

    def _delete(self, key: ItemKey) -> bool:
        known = self._items.pop(key, None)
        if known is None:
            return False
        names = self._names[key[0]]
        del names[bisect_left(names, key[1])]
        self.size_bytes -= len(known)
        return True


def key_of(item: dict[str, Any]) -> ItemKey:
    """Return the kind and name of an item or of a deletion."""
    op = item["op"]
    return DELETIONS.get(op, op), item.get("name", "")


def is_deletion(item: dict[str, Any]) -> bool:
    """Return whether this is the deletion of an item."""
    return item["op"] in DELETIONS or item[item["op"]] is None


def catalog_key(key: ItemKey) -> str:
    """Return the key of an item in the catalog."""
    return f"{ITEM_PREFIX}{key[0]} {key[1]}"


def parse_key(key: str) -> ItemKey:
    """Return the kind and name of a key in the catalog."""
    kind, _, name = key.removeprefix(ITEM_PREFIX).partition(" ")
    return kind, name


def version_item(version: int) -> dict[str, Any]:
    """Return the configuration item that states the version of the table."""
    return {"op": VERSION_OP, "version": version}


def deletion_item(key: ItemKey, version: int) -> dict[str, Any]:
    """Return the configuration item that deletes an item."""
    if key[0] == MODE:
        # Only a follower deletes the mode, if its home was restored from a backup without one.
        return {"op": MODE, "security": None, "version": version}
    return {"op": DELETION_OF[key[0]], "name": key[1], "version": version}


def decode_security_item(encoded: bytes) -> dict[str, Any]:
    """Decode an item or a deletion that another broker has sent. Raises ValueError."""
    item = json.loads(encoded)
    op = item.get("op") if isinstance(item, dict) else None
    is_known = isinstance(op, str) and op in SECURITY_OPS and op != VERSION_OP
    if not is_known or not isinstance(item.get("version"), int):
        raise ValueError("not a security item")
    if op not in DELETIONS and op not in item:
        raise ValueError(f"an item of kind {op} without content")
    return cast("dict[str, Any]", item)
