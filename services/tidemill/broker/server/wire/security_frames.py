"""The whole table of security items as pages, for proxies and members of the cluster.

Ten thousand users have 20 MB, too much for one message. The complete configuration comes first and
says that the items follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, final

from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.metadata.security_items import ItemKey, SecurityItems

PAGE_ITEMS: Final = 128  # a receiver reads so many in a millisecond
PAGE_BYTES: Final = 64 << 10  # of items; a page ends earlier, unless its first item is larger


@final
class SecurityPages:
    """The items of one moment that a receiver has not got yet, with later changes of them."""

    def __init__(self, table: SecurityItems) -> None:
        self._unsent = dict(table.items)
        self._version = table.version

    def announce(self, config: pb.ConfigUpdate) -> bool:
        """Tell the receiver of a complete configuration about the items; return if any follow."""
        if self._unsent:
            config.security_follows = True
            return True
        config.security_version = self._version
        config.is_security_complete = True
        return False

    def hold(self, changes: Mapping[ItemKey, bytes], version: int | None) -> None:
        """Add changes. They are sent instead of the unsent items with their keys."""
        self._unsent.update(changes)
        if version is not None:
            self._version = version

    def next_page(self) -> pb.ConfigUpdate:
        """Return the next page, the last one with `is_security_complete`."""
        page, size = pb.ConfigUpdate(), 0
        keys: list[ItemKey] = []
        for key, item in self._unsent.items():
            if len(keys) == PAGE_ITEMS or (size and size + len(item) > PAGE_BYTES):
                break
            keys.append(key)
            page.security_items.append(item)
            size += len(item)
        for key in keys:
            del self._unsent[key]
        if not self._unsent:
            page.security_version = self._version
            page.is_security_complete = True
        return page


def changed_items(changes: Mapping[ItemKey, bytes], version: int | None) -> pb.ConfigUpdate:
    """Render changes of security items."""
    update = pb.ConfigUpdate(security_items=changes.values())
    if version is not None:
        update.security_version = version
    return update
