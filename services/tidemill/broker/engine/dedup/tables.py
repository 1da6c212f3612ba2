"""The tables of dedup keys of all topics, as the fold of the log (ADR 0087).

    state of a key  event                           next state
    free            KEYED, a plain message          known
    free            KEYED beside SCHEDULE           pending: pinned by its timer
    free            KEYED beside HALF               open: pinned by its half message
    pending         KEYED with the same timer       pending, with the new message (mode `replace`)
    pending         the timer is cancelled          free
    pending         the timer is settled            known; free in mode `replace`
    open            rolled back, or expired         free
    open            committed                       known, or pending with a future due time
    any             STATE with the row              that of the row
    any             freed by an operator            free
    known           the end of its window           free

The end of a window has no record: `is_known` compares times, and sweeps remove rows. A KEYED record
also follows any other state: the deciding broker has seen the end of the window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

from tidemill.broker.engine.dedup.clock import DedupClock
from tidemill.broker.engine.dedup.key_table import KeyTable
from tidemill.broker.engine.layout import dedup
from tidemill.broker.engine.layout.dedup import FREED, NO_PIN, DedupKey, KeyRow
from tidemill.broker.engine.layout.numbers import HalfId, LogOffset, TimerId, TopicId
from tidemill.broker.engine.metadata.catalog import Catalog, Topic
from tidemill.broker.engine.metadata.dedup_policy import DedupMode, DedupPolicy

# Of a follower and a replay: after so many keys, as many rows twice over are looked at.
FOLLOWED_KEYS: Final = 512
SWEPT_A_SLICE: Final = 1_000  # looks at tables, about 1 ms of CPU time
ROWS_A_SLICE: Final = 512
# Of a topic's item, by the clock of keys: when it was recorded, and the last time whose keys are
# free, because their window was over before it became longer.
KEYS_CHANGED_AT: Final = "keysAtMs"
KEYS_OVER_UNTIL: Final = "keysOverUntilMs"
# Makes a named tuple without a call of Python code: every keyed send makes one.
_tuple = tuple.__new__


@final
class KeyTables:
    """The dedup keys of one broker group."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        # Topics with deduplication. In a replay, the record of a topic may come later.
        self.tables: dict[TopicId, KeyTable] = {}
        self.clock = DedupClock()
        self._followed_count = 0
        # Rows before the first log offset are stated at the second one or behind it.
        self.stated_before: tuple[int, int] = 0, 0
        self.may_have_rows = False  # a sweep that finds none resets it
        # Topics whose keys move to other owners, or are forgotten by all owners.
        self.open_spreads: dict[TopicId, None] = {}
        self.changed: set[TopicId] = set()  # since the last count of the memory
        self.has_new_share = False  # a share may have changed since all tables were counted

    @property
    def memory_bytes(self) -> int:
        """The memory of all tables."""
        return sum([table.memory_bytes for table in self.tables.values()])

    @property
    def key_count(self) -> int:
        """The number of rows."""
        return sum([len(table) for table in self.tables.values()])

    def policy_of(self, topic_id: TopicId) -> DedupPolicy | None:
        """Return the deduplication of a topic; None if it is off."""
        topic = self._catalog.topics.get(topic_id)
        return None if topic is None else topic.dedup

    # ------------------------------------------------------------ fold

    def apply_key(
        self,
        topic_id: TopicId,
        key: DedupKey,
        log_offset: LogOffset,
        stored_at_ms: int,
        *,
        pin: int = NO_PIN,
        is_replacement: bool = False,
    ) -> None:
        """Apply a MESSAGE record with a dedup key.

        A message that replaces a pending one repeats the time of the first schedule.
        """
        table = self.tables.get(topic_id)
        if table is None:
            # The replay began after the record of the topic, which is stated again later.
            table = self.tables[topic_id] = KeyTable(topic_id)
        self.may_have_rows = True
        self.changed.add(topic_id)
        hash_, body_crc, taken_at_ms, _ = key
        if not is_replacement:
            self.clock.note(taken_at_ms, stored_at_ms)
        table.put(_tuple(KeyRow, (hash_, log_offset, taken_at_ms, body_crc, pin)))

    def apply_new_key(
        self, topic_id: TopicId, key: DedupKey, log_offset: LogOffset, stored_at_ms: int
    ) -> None:
        """Apply a plain message with a dedup key that was looked up just now.

        Does the same as `apply_key`, but faster: nearly all sends with keys are such messages.
        """
        hash_, body_crc, taken_at_ms, _ = key
        self.clock.note(taken_at_ms, stored_at_ms)
        self.may_have_rows = True
        self.changed.add(topic_id)
        self.tables[topic_id].put_new(hash_, log_offset, taken_at_ms, body_crc)

    def apply_stated(self, rows: Sequence[tuple[TopicId, KeyRow]]) -> None:
        """Apply a STATE record: rows that are stated again, or freed by an operator."""
        self.may_have_rows = True
        for topic_id, row in rows:
            self.changed.add(topic_id)
            table = self.tables.get(topic_id)
            if row.log_offset == FREED:
                if table is not None:
                    table.remove(row.hash)
                continue
            if table is None:
                table = self.tables[topic_id] = KeyTable(topic_id)
            self.clock.begin_after(row.taken_at_ms - 1)
            table.put(row)

    def apply_timer_cancel(self, timer_id: TimerId, topic_id: int) -> None:
        """Apply the cancel of a timer: its key is free. Topic 0 is unknown."""
        self._unpin(dedup.pin_of_timer(timer_id), topic_id, is_free=lambda _: True)

    def apply_timer_end(self, timer_id: TimerId, topic_id: int) -> None:
        """Apply the delivery of a timer, or its dead letter. Topic 0 is unknown."""
        self._unpin(dedup.pin_of_timer(timer_id), topic_id, is_free=self._is_replacing)

    def apply_half_end(
        self, half_id: HalfId, topic_id: int, *, is_committed: bool, timer: TimerId | None
    ) -> None:
        """Apply the end of an open half message; `timer` if it waits for its due time.

        Topic 0 is unknown.
        """
        pin = NO_PIN if timer is None else dedup.pin_of_timer(timer)
        found = dedup.pin_of_half(half_id)
        self._unpin(found, topic_id, is_free=lambda _: not is_committed, pin=pin)

    def _is_replacing(self, topic_id: TopicId) -> bool:
        policy = self.policy_of(topic_id)
        return policy is not None and policy.mode is DedupMode.REPLACE

    def _unpin(
        self, found: int, of_topic: int, *, is_free: Callable[[TopicId], bool], pin: int = NO_PIN
    ) -> None:
        """Change or remove the pin of a row, or free its key."""
        own = self.tables.get(TopicId(of_topic))
        if of_topic and own is None:
            return
        for table in self.tables.values() if own is None else (own,):
            if table.pinned_count and (row := table.find_pinned(found)) is not None:
                self.changed.add(table.topic_id)
                if is_free(table.topic_id):
                    table.remove(row.hash)
                else:
                    table.put(row._replace(pin=pin))
                return

    def with_times(self, item: dict[str, Any]) -> dict[str, Any]:
        """Return the item of a topic with the times that its keys need, before it is recorded.

        A replay may begin with this record, so it does not depend on the one before.
        """
        values = item["topic"].get("dedup")
        if values is None:
            return item
        topic_id, now_ms = item["topic"]["id"], self.clock.now_ms
        table, old = self.tables.get(topic_id), self.policy_of(topic_id)
        over_until_ms = 0 if table is None else table.over_until_ms
        if old is not None and old.window_ms < values["window_ms"]:
            # A longer window does not apply to keys that are free already.
            over_until_ms = max(over_until_ms, now_ms - old.window_ms)
        times = {KEYS_CHANGED_AT: now_ms, KEYS_OVER_UNTIL: over_until_ms}
        placement = item["topic"].get("placement", {})
        if "before" in placement:
            placement["fenced_at_ms"] = self._fenced_at_ms(topic_id, placement)
        return {**item, **{name: time_ms for name, time_ms in times.items() if time_ms}}

    def _fenced_at_ms(self, topic_id: TopicId, placement: dict[str, Any]) -> int:
        """Return when the list of an open spread was recorded first."""
        topic = self._catalog.topics.get(topic_id)
        if topic is not None and topic.placement.before:
            known = topic.placement
            if (known.version, list(known.groups)) == (placement["version"], placement["groups"]):
                return known.fenced_at_ms
        return self.clock.now_ms

    def apply_topic(self, topic: Topic, item: dict[str, Any], stored_at_ms: int) -> None:
        """Apply the record of a topic, whose item has times by the clock of keys."""
        self.open_spreads.pop(topic.id, None)
        self.changed.add(topic.id)
        self.has_new_share = True
        if topic.placement.before:
            self.open_spreads[topic.id] = None
        if topic.dedup is None:
            self.tables.pop(topic.id, None)
            return
        table = self.tables.get(topic.id)
        if table is None:
            table = self.tables[topic.id] = KeyTable(topic.id)
        table.over_until_ms = max(table.over_until_ms, item.get(KEYS_OVER_UNTIL, 0))
        if KEYS_CHANGED_AT in item:
            self.clock.note(item[KEYS_CHANGED_AT], stored_at_ms)
        self.clock.begin_after(table.over_until_ms)

    def forget_topic(self, topic_id: TopicId) -> None:
        """Forget the keys of a deleted topic."""
        self.tables.pop(topic_id, None)
        self.open_spreads.pop(topic_id, None)
        self.changed.add(topic_id)

    def settle(self) -> None:
        """Keep tables only of topics with deduplication: the catalog is complete."""
        topics = self._catalog.topics
        self.open_spreads = {id_: None for id_, one in topics.items() if one.placement.before}
        for topic_id in [id_ for id_ in self.tables if self.policy_of(id_) is None]:
            del self.tables[topic_id]
        for topic in self._catalog.topics.values():
            if topic.dedup is not None and topic.id not in self.tables:
                self.tables[topic.id] = KeyTable(topic.id)
        self.changed.update(self.tables)

    # ------------------------------------------------------------ keys that are over

    def follow(self) -> None:
        """Note a key that another process has taken; now and then, remove some that are over.

        The newest time in the log decides which keys are over.
        """
        self._followed_count += 1
        if self._followed_count % FOLLOWED_KEYS == 0:
            for topic_id, table in self.tables.items():
                policy = self.policy_of(topic_id)
                over_ms = self.clock.known_ms - (0 if policy is None else policy.window_ms)
                if policy is not None and table.is_sweep_due(over_ms):
                    self.changed.add(topic_id)
                    table.sweep(over_ms=over_ms, limit=2 * FOLLOWED_KEYS)
                    table.end_sweep()

    # ------------------------------------------------------------ the state floor

    def known_rows(self, topic_id: TopicId, *, low: int, end: int) -> Iterator[list[KeyRow]]:
        """Yield the rows of known keys with messages from log offset `low` on and before `end`.

        Between two lists, keys may be taken, freed and moved. So rows are found by their hashes,
        which are gathered first. No row is yielded twice.
        """
        table = self.tables.get(topic_id)
        if table is None:
            return
        hashes: list[bytes] = []
        # From the end on: rows move from there into gaps before it.
        for number in range(table.block_count() - 1, -1, -1):
            if number < table.block_count():
                rows = table.rows_of(number)
                offsets = dedup.log_offsets(rows)
                hashes += [h.tobytes() for h in rows["hash"][(offsets >= low) & (offsets < end)]]
            yield []
        for first in range(0, len(hashes), ROWS_A_SLICE):
            if self.tables.get(topic_id) is not table:
                return
            policy = self.policy_of(topic_id)
            found = [table.find(hash_) for hash_ in hashes[first : first + ROWS_A_SLICE]]
            yield [
                row
                for row in found
                if row is not None
                and policy is not None
                and row.log_offset < end
                and table.is_known(row, now_ms=self.clock.now_ms, window_ms=policy.window_ms)
            ]

    # ------------------------------------------------------------ snapshots

    @property
    def size_bytes(self) -> int:
        """The size of the rows in a snapshot."""
        return self.key_count * dedup.ROW_SIZE

    def freeze(self) -> Iterator[bytes]:
        """Return the sections of a snapshot, as of this call, even if they are read later."""
        frozen = [
            (table.topic_id, table.over_until_ms, rows)
            for table in self.tables.values()
            for rows in table.freeze() or [bytearray()]
        ]
        lead_ms = self.clock.lead_ms
        return (
            dedup.encode_section(topic_id, over_until_ms, lead_ms, rows)
            for topic_id, over_until_ms, rows in frozen
        )

    @property
    def section_count(self) -> int:
        """The number of sections of a snapshot."""
        return sum([table.block_count() or 1 for table in self.tables.values()])

    def load(self, encoded: memoryview | bytes) -> None:
        """Add a section of a snapshot; `end_load` follows the last one."""
        section = dedup.decode_section(encoded)
        table = self.tables.get(section.topic_id)
        if table is None:
            table = self.tables[section.topic_id] = KeyTable(section.topic_id)
        table.over_until_ms = section.over_until_ms
        self.clock.lead_ms = section.clock_lead_ms
        table.load(section.rows)

    def end_load(self) -> None:
        """Build the indexes of all loaded rows."""
        self.may_have_rows = True
        for table in self.tables.values():
            table.end_load()
            # Otherwise new keys might be over at once, if the wall clock was set back.
            self.clock.begin_after(max(table.over_until_ms, (table.newest_ms() or 0) - 1))
        self.settle()
