"""The security items on one link: the whole table in pages, and then each change.

The pages are sent while the proxy reads them, so that a hundred proxies that connect at once do not
take a hundred tables of memory. A change in the meantime travels in a page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, final

from tidemill.broker.server.wire.security_frames import PAGE_BYTES, SecurityPages, changed_items
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.metadata.security_items import ItemKey, SecurityItems
    from tidemill.broker.server.link.pops import ReplyStream


@final
class SecurityStream:
    """The state of the security items on one link."""

    def __init__(self, stream: ReplyStream, send: Callable[[pb.ConfigUpdate], bool]) -> None:
        """`send` sends an update at once; it returns False if the link has ended."""
        self._stream = stream
        self._send = send
        self._pages: SecurityPages | None = None  # None: the proxy has the whole table
        self._may_send = asyncio.Event()

    def begin(self, table: SecurityItems, config: pb.ConfigUpdate) -> None:
        """Begin with the table of this moment, beside a complete configuration."""
        pages = SecurityPages(table)
        self._pages = pages if pages.announce(config) else None

    def begin_pages(self) -> None:
        """Let the pages follow: the complete configuration has been sent."""
        if self._pages is not None:
            self._may_send.set()

    def render(
        self, changes: Mapping[ItemKey, bytes], version: int | None
    ) -> list[pb.ConfigUpdate]:
        """Return the updates with committed changes; none if a page will have them."""
        if self._pages is not None:
            self._pages.hold(changes, version)
            return []
        return [changed_items(changes, version)]

    async def send_pages(self) -> None:
        """Send the pages as the proxy reads them; return after the last one."""
        await self._may_send.wait()
        while self._pages is not None:
            if self._stream.unsent_bytes >= PAGE_BYTES:
                await self._stream.wait_drained()
            # Invariant: from here to the send there is no await, so no change comes in between.
            page = self._pages.next_page()
            if page.is_security_complete:
                self._pages = None
            if not self._send(page):
                return
            await asyncio.sleep(0)
