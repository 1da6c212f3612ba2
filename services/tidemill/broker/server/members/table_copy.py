"""The table of security items that the home sends in pages over one stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, final

from tidemill.broker.engine.metadata.security_items import decode_security_item, is_deletion, key_of
from tidemill.common.errors import BadRequest

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.metadata.security_items import ItemKey
    from tidemill.broker.server.round.turn import Turn
    from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

ITEMS_A_SLICE: Final = 32  # decoded in a millisecond, if each has 2 KB


@final
class TableCopy:
    """The pages received so far, until the table is whole."""

    def __init__(self) -> None:
        self.items: dict[ItemKey, bytes] = {}
        self.version = 0
        self.is_whole = False  # it waits to replace the own table
        self._is_receiving = False

    def apply(self, config: pb.ConfigUpdate, engine: Engine, turn: Turn) -> Iterator[None]:
        """Take the security items of an update: a page, or changes after the last page.

        Raises BadRequest.
        """
        if config.is_complete:
            self.items, self.version, self.is_whole = {}, 0, False
            # A home below feature level 3 sends neither of these.
            self._is_receiving = config.security_follows or config.is_security_complete
        if not self._is_receiving:
            version = config.security_version if config.HasField("security_version") else None
            yield from engine.security.follow(config.security_items, version, turn.now_ms)
            return
        for n, encoded in enumerate(config.security_items, 1):
            self._add(encoded)
            if n % ITEMS_A_SLICE == 0:
                yield
        if config.is_security_complete:
            self.version = config.security_version
            self.is_whole, self._is_receiving = True, False

    def _add(self, encoded: bytes) -> None:
        try:
            item = decode_security_item(encoded)
        except ValueError as error:
            raise BadRequest(f"the home sent an unreadable security item: {error}") from error
        if is_deletion(item):
            # A change while the pages were sent.
            self.items.pop(key_of(item), None)
        else:
            self.items[key_of(item)] = encoded
