"""A copy of the security items of one kind, as new as the copy of the mode (ADR 0078).

All of them are read again after a change of the security items. If no broker group answers, the
last known ones stay in force.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, final

import grpc
import structlog

from tidemill.common.errors import ServiceError
from tidemill.security.item_counts import ItemCounts

ITEMS_A_TURN: Final = 200  # of the event loop: a millisecond to decode them
READ_WAIT_S: Final = 0.5  # then a request uses the last known items: the home is slow or down

log = structlog.get_logger()


@final
class ItemCopy:
    """The needed items of one kind, at most 10,000."""

    def __init__(
        self,
        kind: str,
        read_all: Callable[[str], AsyncIterator[bytes]],
        find_version: Callable[[], int],
        needs: Callable[[dict[str, Any]], bool] = lambda _item: True,
    ) -> None:
        """`read_all` yields the items of a kind. Those that `needs` does not want are left out.

        `find_version` returns the version of the newest table that the process has seen.
        """
        self.items: dict[str, bytes] = {}  # by name
        self.counts = ItemCounts()  # of the items
        self.on_change: Callable[[], None] = lambda: None
        self._kind = kind
        self._read_all = read_all
        self._find_version = find_version
        self._needs = needs
        self._version = 0  # of the table whose items were read
        self._is_failing = False
        self._reading: asyncio.Task[None] | None = None

    @property
    def is_known(self) -> bool:
        """Whether the items have been read, or there are none."""
        return self._version != 0 or self._find_version() == 0

    async def refresh(self) -> None:
        """Read the items if they have changed. Requests at the same time share one read."""
        version = self._find_version()
        if version == self._version:
            return
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read(version), name=f"{self._kind} items")
        # A cancelled request must not cancel the read, which others share.
        await asyncio.wait([self._reading], timeout=READ_WAIT_S)

    async def _read(self, version: int) -> None:
        items: dict[str, bytes] = {}
        counts, read_count = ItemCounts(), 0
        try:
            async for encoded in self._read_all(self._kind):
                read_count += 1
                item = json.loads(encoded)
                if self._needs(item):
                    name = item["name"]
                    if name not in items:
                        counts.add(self._kind, name)
                    items[name] = encoded
                if read_count % ITEMS_A_TURN == 0:
                    await asyncio.sleep(0)
        except (ServiceError, grpc.aio.AioRpcError) as error:
            if not self._is_failing:
                log.warning(
                    "security items not read, the last known ones stay in force",
                    kind=self._kind,
                    reason=str(error),
                )
            self._is_failing = True
            return
        self._is_failing = False
        self.items, self.counts, self._version = items, counts, version
        self.on_change()
