"""The memory of dedup keys that topics without a share have left, counted in bounded turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, final

from tidemill.broker.engine.dedup.key_table import KEY_BYTES
from tidemill.broker.engine.dedup.tables import KeyTables
from tidemill.broker.engine.layout.numbers import TopicId

COUNTED_BYTES: Final = 48 << 10  # taken by new keys between two counts: fewer than the tables below
COUNTED_TABLES: Final = 1_000  # of one count, about a millisecond


class CountedTable(NamedTuple):
    """The memory of a topic, as of the last count of its table."""

    used_bytes: int  # of a topic with a share: at least the share
    share_bytes: int  # 0: it has no share
    table_bytes: int  # of its keys


NOT_COUNTED: Final = CountedTable(0, 0, 0)


@final
class KeyMemory:
    """The memory of all dedup keys, and the rest for topics without a share.

    A count looks only at the tables that have changed since the last one.
    """

    def __init__(
        self, tables: KeyTables, memory_bytes: int, *, on_forgotten: Callable[[TopicId], None]
    ) -> None:
        """`on_forgotten` gets each topic whose table is deleted, at its next count."""
        self._on_forgotten = on_forgotten
        self.memory_bytes = memory_bytes
        # For new keys until the next count. Each takes `KEY_BYTES`.
        self.rest_bytes = 0
        self._tables = tables
        self._granted_bytes = 0  # the rest as of the last count
        self._uncounted_bytes = 0  # of keys taken since all tables were counted
        self._counted: dict[TopicId, CountedTable] = {}
        self._used_bytes = 0
        self._share_bytes = 0
        self._table_bytes = 0
        self._full_at_ms = -1  # by the clock of keys: the last count has found no memory

    def has_room(self) -> bool:
        """Take the memory of a new key; return whether there is some.

        If there is none, it is not counted again in this round.
        """
        if self.rest_bytes < KEY_BYTES and self._full_at_ms != self._tables.clock.now_ms:
            self.count_some()
        if self.rest_bytes < KEY_BYTES:
            return False
        self.rest_bytes -= KEY_BYTES
        return True

    def bound_of(self, topic_id: TopicId) -> int:
        """Return the bound of the memory for the keys of a topic."""
        self.count_all()
        own = self._counted.get(topic_id, NOT_COUNTED)
        return self.bound_of_share(own.share_bytes) if own.share_bytes else self._shared_bound

    def bound_of_share(self, share_bytes: int) -> int:
        """Return the memory that a topic with a share may use.

        If `dedup_memory_bytes` became lower than the sum of the shares, all shares shrink alike.
        """
        if self._share_bytes <= self.memory_bytes:
            return share_bytes
        return share_bytes * self.memory_bytes // self._share_bytes

    def has_room_in_share(self, share_bytes: int, table_bytes: int) -> bool:
        """Whether a topic with a share may take another key."""
        if table_bytes + KEY_BYTES > self.bound_of_share(share_bytes):
            return False
        if self._tables.has_new_share:
            self.count_some()
        if self._used_bytes <= self.memory_bytes:
            return True
        # The other topics use a part of this share until their windows are over.
        self.count_some()
        return self._table_bytes + KEY_BYTES <= self.memory_bytes

    @property
    def share_bytes(self) -> int:
        """The sum of the shares, as of the last count."""
        return self._share_bytes

    @property
    def _shared_bound(self) -> int:
        return max(self.memory_bytes - self._share_bytes, 0)

    def shared(self) -> tuple[int, int]:
        """Return the memory that topics use beside the shares, and its bound.

        It includes the keys of a topic that uses more than its share.
        """
        self.count_all()
        return self._used_bytes - self._share_bytes, self._shared_bound

    def count_all(self) -> None:
        """Count all tables that have changed."""
        while self._tables.changed:
            self.count_some()

    def count_some(self) -> None:
        """Count some tables that have changed, and the rest."""
        changed = self._tables.changed
        for _ in range(min(len(changed), COUNTED_TABLES)):
            self._count_table(changed.pop())
        self._uncounted_bytes += self._granted_bytes - self.rest_bytes
        if not changed:
            self._uncounted_bytes = 0
            self._tables.has_new_share = False
        # Between two counts, a key counts as `KEY_BYTES`, and an index may grow by more.
        left_bytes = self.memory_bytes - self._used_bytes - self._uncounted_bytes
        self.rest_bytes = self._granted_bytes = min(left_bytes, COUNTED_BYTES)
        if self.rest_bytes < KEY_BYTES:
            self._full_at_ms = self._tables.clock.now_ms

    def _count_table(self, topic_id: TopicId) -> None:
        table, policy = self._tables.tables.get(topic_id), self._tables.policy_of(topic_id)
        before = self._counted.pop(topic_id, NOT_COUNTED)
        now = NOT_COUNTED
        if table is not None:
            share_bytes = (0 if policy is None else policy.memory_bytes) or 0
            # After a share is lowered, the table is larger until its windows are over.
            used_bytes = max(share_bytes, table.memory_bytes)
            now = CountedTable(used_bytes, share_bytes, table.memory_bytes)
            self._counted[topic_id] = now
        else:
            self._on_forgotten(topic_id)
        self._used_bytes += now.used_bytes - before.used_bytes
        self._share_bytes += now.share_bytes - before.share_bytes
        self._table_bytes += now.table_bytes - before.table_bytes
