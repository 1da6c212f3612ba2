"""The end of the keys from before an open spread, at a broker group that may know them (ADR 0091).

The list of a spread is a fence: from its record on, this broker group takes only keys that it owns
by this list. The record has its time, so a restart changes nothing. The older keys are over when
one window has passed since then, and no timer and no open half message keeps one of them. If the
record turns the deduplication off, it removes all keys, so they are over at once.
"""

from __future__ import annotations

from typing import Final, final

from tidemill.broker.engine.dedup.key_table import BLOCKS_A_SWEEP, KeyTable
from tidemill.broker.engine.dedup.tables import KeyTables
from tidemill.broker.engine.layout.numbers import TopicId
from tidemill.broker.engine.metadata.catalog import Catalog

LOOK_PERIOD_MS: Final = 1_000
TOPICS_A_LOOK: Final = 200  # under a millisecond
NO_BLOCK: Final = -1


@final
class OldKeys:
    """The open spreads of one broker group, and the end of the older keys of each here."""

    def __init__(self, catalog: Catalog, tables: KeyTables) -> None:
        self._catalog = catalog
        self._tables = tables
        self._ended: dict[TopicId, int] = {}  # versions
        self.looks = 0  # that have begun
        self._look_at_ms = 0
        self._looking: list[TopicId] = []
        # The next block of the first topic in `_looking`: from the last one on, as rows move from
        # there into gaps before it.
        self._next_block: int | None = None

    def take_over(self) -> None:
        """Begin to decide: another process may have recorded other lists."""
        self._ended, self._looking = {}, []

    @property
    def open_count(self) -> int:
        """The number of open spreads."""
        return len(self._tables.open_spreads)

    def has_ended(self, topic_id: TopicId, version: int) -> bool:
        """Whether the keys from before the list `version` are over here."""
        return self._ended.get(topic_id) == version

    def take_ended(self, limit: int) -> list[tuple[TopicId, int]]:
        """Return some topics without older keys, with their versions; all in turn."""
        some = list(self._ended.items())[:limit]
        for topic_id, version in some:
            del self._ended[topic_id]
            self._ended[topic_id] = version
        return some

    def next_due_ms(self, now_ms: int) -> int | None:
        """Return the wall time of the next look; None: no spread is open."""
        if self._looking:
            return now_ms
        if not self._tables.open_spreads and not self._ended:
            return None
        return now_ms + max(self._look_at_ms - self._tables.clock.now_ms, 0)

    def look(self) -> bool:
        """Look at some open spreads, if that is due; return whether more are due."""
        opened, now_ms = self._tables.open_spreads, self._tables.clock.now_ms
        if not self._looking:
            if now_ms < self._look_at_ms or not (opened or self._ended):
                return False
            self._look_at_ms = now_ms + LOOK_PERIOD_MS
            self.looks += 1
            for topic_id in [id_ for id_ in self._ended if id_ not in opened]:
                del self._ended[topic_id]
            self._looking, self._next_block = list(opened), None
        for _ in range(TOPICS_A_LOOK):
            if not self._looking:
                break
            has_looked_at_blocks = self._next_block is not None
            if self._look_at(self._looking[-1], now_ms):
                self._looking.pop()
                self._next_block = None
            if has_looked_at_blocks or self._next_block is not None:
                break  # Blocks take as long as many topics.
        return bool(self._looking)

    def _look_at(self, topic_id: TopicId, now_ms: int) -> bool:
        """Look at the older keys of a topic; return whether that is done."""
        topic = self._catalog.topics.get(topic_id)
        if topic is None:
            return True
        version, fenced_at_ms = topic.placement.version, topic.placement.fenced_at_ms
        if self._ended.get(topic_id) != version:
            self._ended.pop(topic_id, None)
        if topic.dedup is None:
            self._ended[topic_id] = version
            return True
        table = self._tables.tables[topic_id]
        if topic_id in self._ended or now_ms < fenced_at_ms + topic.dedup.window_ms:
            return True
        if table.pinned_count:
            if self._next_block is None:
                self._next_block = table.block_count() - 1
            if self._find_old_pin(table, fenced_at_ms):
                return True  # The next look begins again.
            if self._next_block != NO_BLOCK:
                return False
        self._ended[topic_id] = version
        return True

    def _find_old_pin(self, table: KeyTable, fenced_at_ms: int) -> bool:
        """Whether some of the next blocks have a pinned key from before the fence."""
        assert self._next_block is not None, "the caller has set it"
        for _ in range(BLOCKS_A_SWEEP):
            if self._next_block == NO_BLOCK:
                break
            number = self._next_block
            self._next_block -= 1
            if number < table.block_count() and table.has_old_pin(number, fenced_at_ms):
                return True
        return False
