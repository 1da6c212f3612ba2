"""The history of a broker group: its lifecycle events, read from the log in slices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from tidemill.broker.engine.events.event import EventQuery
from tidemill.broker.engine.events.lookup import EventLookup
from tidemill.broker.engine.events.reader import EventRead
from tidemill.broker.engine.events.record_starts import RecordStarts
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.tally import Tally
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.transaction.table import TransactionTable
from tidemill.message import stored_message


@final
class EventHistory:
    """The lifecycle events, and what all reads of them share."""

    def __init__(
        self,
        catalog: Catalog,
        store: MessageStore,
        timers: TimerIndex,
        transactions: TransactionTable,
        tally: Tally,
    ) -> None:
        self._store = store
        self._tally = tally
        self.lookup = EventLookup(catalog, store, timers, transactions, tally)
        self.record_starts = RecordStarts(store.log, tally)

    def read(
        self,
        query: EventQuery,
        *,
        from_position: int,
        from_index: int = 0,
        until_position: int = 0,
        log_bytes_max: int,
        events_max: int,
    ) -> EventRead:
        """Begin to read the events of the committed log."""
        return EventRead(
            self._store.log,
            self.lookup,
            self._tally,
            query,
            from_position=from_position,
            from_index=from_index,
            until_position=until_position,
            log_bytes_max=log_bytes_max,
            events_max=events_max,
        )

    def find_records(self, message_id: str) -> Iterator[list[LogOffset]]:
        """Yield the offsets of possible records of a message, in bounded slices."""
        return self._store.index.find(stored_message.key_hash("id", message_id))
