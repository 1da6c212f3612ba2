"""A copy of the bans for requests to the REST API, as new as the copy of the mode (ADR 0078).

All bans are read again after a change of the security items: a request is checked against each
range of addresses. If no broker group answers, the last known bans stay in force.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Final, final

import grpc
import structlog

from tidemill.common.errors import ServiceError
from tidemill.security.bans import BAN, BanTable

READ_WAIT_S: Final = 0.5  # then a request uses the last known bans: the home is slow or down

log = structlog.get_logger()


@final
class BanCopy:
    """All bans of the cluster, at most 10,000."""

    def __init__(
        self, read_all: Callable[[str], AsyncIterator[bytes]], find_version: Callable[[], int]
    ) -> None:
        """`read_all` yields the items of a kind.

        `find_version` returns the version of the newest table that the process has seen.
        """
        self._read_all = read_all
        self._find_version = find_version
        self._version = 0  # of the table whose bans were read
        self._items: dict[str, bytes] = {}
        self._is_failing = False
        self._reading: asyncio.Task[None] | None = None
        self.table = BanTable(lambda _kind, name: self._items.get(name), lambda _kind: self._items)

    async def refresh(self) -> None:
        """Read the bans if the items have changed. Requests at the same time share one read."""
        version = self._find_version()
        if version == self._version:
            return
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read(version), name="bans")
        # A cancelled request must not cancel the read, which others share.
        await asyncio.wait([self._reading], timeout=READ_WAIT_S)

    async def _read(self, version: int) -> None:
        items: dict[str, bytes] = {}
        try:
            async for encoded in self._read_all(BAN):
                items[json.loads(encoded)["name"]] = encoded
        except (ServiceError, grpc.aio.AioRpcError) as error:
            if not self._is_failing:
                log.warning("bans not read, the last known ones stay in force", reason=str(error))
            self._is_failing = True
            return
        self._is_failing = False
        self._items, self._version = items, version
        self.table.note_all_changed()
