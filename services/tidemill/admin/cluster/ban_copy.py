"""A copy of the bans for requests to the REST API (ADR 0078)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import final

from tidemill.admin.cluster.item_copy import ItemCopy
from tidemill.security.bans import BAN, BanTable


@final
class BanCopy:
    """All bans of the cluster. A request is checked against each range of addresses."""

    def __init__(
        self, read_all: Callable[[str], AsyncIterator[bytes]], find_version: Callable[[], int]
    ) -> None:
        """Read the bans with `read_all` after a change of the version."""
        copy = ItemCopy(BAN, read_all, find_version)
        self.table = BanTable(lambda _kind, name: copy.items.get(name), lambda: copy.counts)
        copy.on_change = self.table.note_all_changed
        self.refresh = copy.refresh
