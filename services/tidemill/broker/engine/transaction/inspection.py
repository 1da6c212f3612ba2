"""The fields of transactions for operators, and the search for a page of them.

The table has no message, so the fields of a message are read from the log: from the first record
of the half message, and from the newest record of the transaction. Retention may have freed the
first one. The newest record of a rolled-back transaction has no message.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple, final

import numpy as np

from tidemill.broker.engine.layout import message
from tidemill.broker.engine.layout.message import FLAG_HALF
from tidemill.broker.engine.layout.numbers import HalfId, LogOffset, TopicId
from tidemill.broker.engine.layout.record import RecordKind
from tidemill.broker.engine.layout.transaction import TransactionRow, TransactionState
from tidemill.broker.engine.message_store import MessageDamaged, MessageStore
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.sorted_search import is_among
from tidemill.broker.engine.store.segment import Record
from tidemill.broker.engine.transaction.table import TransactionTable
from tidemill.common.errors import BadRequest
from tidemill.message import stored_message
from tidemill.message.client_key import UNKNOWN_CLIENT, ClientKey

PAGE_SIZE_MAX: Final = 1_000
DESCRIBED_A_STEP: Final = 64  # transactions, each with up to two records
BYTES_A_STEP: Final = 1 << 20  # of the messages that are read


class TransactionStatus(NamedTuple):
    """One transaction, for operators."""

    half_id: HalfId
    state: TransactionState
    topic_id: TopicId
    topic: str  # "" if it is unknown
    is_topic_deleted: bool
    time_ms: int  # of the next check, or of the end
    checks: int
    checks_max: int
    # By the clock of the broker; by that of the producer if the first record is freed. 0: unknown.
    sent_at_ms: int
    is_sent_exact: bool  # the first record tells the time
    message_id: str  # "" if it is unknown
    client: ClientKey
    size: int  # bytes of the message; 0: unknown


class TransactionQuery(NamedTuple):
    """A page of transactions, in the order of their half ids."""

    states: frozenset[TransactionState]
    page_size: int
    topic_id: TopicId | None = None  # None: of all topics
    topic: str = ""  # the name of this topic
    sent_before_ms: int | None = None  # None: at any time
    after: int = -1  # only larger half ids


@final
class TransactionInspection:
    """Describes the transactions of one broker group."""

    def __init__(self, table: TransactionTable, store: MessageStore, catalog: Catalog) -> None:
        self.table = table
        self._store = store
        self._catalog = catalog

    def describe(self, row: TransactionRow) -> TransactionStatus:
        """Return the fields of a row of the table, with those of its message if it is readable."""
        newest = self._read(row.log_offset)
        first_at = LogOffset(row.half_id)
        first = newest if row.log_offset == first_at else self._read(first_at)
        if first is not None and not first.header.flags & FLAG_HALF:
            first = None
        readable = newest or first
        topic = self._catalog.topic_name(row.topic_id)
        is_deleted = row.topic_id not in self._catalog.topics
        if row.state == TransactionState.EXPIRED and newest is not None:
            topic = message.decode_outcome(newest.body).origin
            # After a replay from the state floor on, only the dead letter names the topic.
            if not row.topic_id:
                is_deleted = self._catalog.find_topic(topic) is None
        client, sent_at_ms = UNKNOWN_CLIENT, 0
        half_record = first or (newest if row.state == TransactionState.HALF else None)
        if half_record is not None:
            half = message.decode_half(half_record.body)
            client = ClientKey(half.client_id, half.owner)
        if first is not None:
            sent_at_ms = first.header.stored_at_ms
        elif readable is not None:
            sent_at_ms = stored_message.decode_head(readable.tail).born_at_ms
        return TransactionStatus(
            row.half_id,
            TransactionState(row.state),
            row.topic_id,
            topic,
            is_deleted,
            row.time_ms,
            row.checks,
            row.checks_max,
            sent_at_ms,
            first is not None,
            "" if readable is None else stored_message.message_id_of(readable.tail),
            client,
            0 if readable is None else len(readable.tail),
        )

    def _read(self, log_offset: LogOffset) -> Record | None:
        """Return a record with an intact message; None if there is none."""
        try:
            found = self._store.record(log_offset)
            if found.header.kind != RecordKind.MESSAGE:
                return None
            stored_message.decode_head(found.tail)
        except (MessageDamaged, LookupError, ValueError):
            return None
        return found


@final
class TransactionSearch:
    """A search in progress: call `step` until it returns False, then read `found`."""

    def __init__(self, inspection: TransactionInspection, query: TransactionQuery) -> None:
        if not 1 <= query.page_size <= PAGE_SIZE_MAX:
            raise BadRequest(f"the page size {query.page_size} is not from 1 to {PAGE_SIZE_MAX}")
        self._inspection = inspection
        self._query = query
        self._walk = inspection.table.walk(query.after)
        self._matches: deque[int] = deque()
        self.found: list[TransactionStatus] = []
        self.has_more = False  # whether there may be another page

    def step(self) -> bool:
        """Do one slice: look at a block of the table, or read some records. False: it is done."""
        if not self._matches:
            rows = next(self._walk, None)
            if rows is None:
                return False
            self._matches.extend(self._matching(rows))
            return True
        size = 0
        for _ in range(min(DESCRIBED_A_STEP, len(self._matches))):
            row = self._inspection.table.find(self._matches.popleft())
            if row is None or row.state not in self._query.states:
                continue  # It has changed since the look at its block.
            if len(self.found) == self._query.page_size:
                self.has_more = True
                return False
            status = self._inspection.describe(row)
            size += status.size
            if self._query.topic_id is not None and status.topic != self._query.topic:
                continue
            before_ms = self._query.sent_before_ms
            if before_ms is None or status.sent_at_ms < before_ms:
                self.found.append(status)
            elif status.is_sent_exact:
                return False  # All later ones were sent later.
            if size >= BYTES_A_STEP:
                break
        return True

    def _matching(self, rows: np.ndarray) -> list[int]:
        is_match = is_among(np.array(sorted(self._query.states)), rows["state"])
        if self._query.topic_id is not None:
            # The message of an expired transaction may be the only one to name its topic.
            is_match &= (rows["topic_id"] == self._query.topic_id) | (rows["topic_id"] == 0)
        return [int(half_id) for half_id in rows["half_id"][is_match].tolist()]
