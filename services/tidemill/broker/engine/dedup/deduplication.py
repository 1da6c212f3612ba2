"""The decision about each send with a dedup key: store it, answer as for the first, or replace.

The owner decides in its one order. The answer of a repeat leaves with its round, so never before
the first message is committed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, NamedTuple, final

from tidemill.broker.engine.dedup.config import DedupConfig
from tidemill.broker.engine.dedup.first_messages import FirstMessage, FirstMessages
from tidemill.broker.engine.dedup.key_memory import KeyMemory
from tidemill.broker.engine.dedup.key_table import BLOCKS_A_SWEEP, KEY_BYTES, KeyTable
from tidemill.broker.engine.dedup.tables import SWEPT_A_SLICE, KeyTables
from tidemill.broker.engine.layout.dedup import (
    HASH_SIZE,
    KEY_BYTES_MAX,
    NO_PIN,
    DedupKey,
    KeyRow,
    pin_of_half,
)
from tidemill.broker.engine.layout.numbers import HalfId, TimerId, TopicId
from tidemill.broker.engine.metadata.catalog import Catalog, Topic
from tidemill.broker.engine.metadata.dedup_policy import DedupKeySource, DedupMode, DedupPolicy
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.common.errors import (
    Conflict,
    IllegalPropertyKey,
    KeyOwnerChanged,
    MessageCorrupted,
    Overloaded,
)
from tidemill.message import stored_message
from tidemill.message.dedup_key import KeyFields, check_key, owner_of_key, read_fields

SWEEP_PERIOD_MS: Final = 1_000
SWEPT_KEYS_MIN: Final = 20  # of a table whose blocks take the rest of a slice
# In looks at a table, of about a microsecond each.
SWEPT_KEY_COST: Final = 4  # of the removal of a key
SWEPT_BLOCK_COST: Final = 50  # of the look at a block
_TYPE_AT: Final = stored_message.MESSAGE_TYPE_AT
_TRANSACTION: Final = stored_message.TYPE_TRANSACTION
_MESSAGE_ID, _PROPERTY = DedupKeySource.MESSAGE_ID, DedupKeySource.PROPERTY
_REPLACE: Final = DedupMode.REPLACE
_OF_MESSAGE_ID: Final = 0x8000  # in the scope of a key, beside the size of the message group
# Makes a named tuple without a call of Python code: every keyed send makes two.
_tuple = tuple.__new__


class RepeatedSend(Exception):
    """The message repeats a dedup key: nothing is stored, and the first answer counts.

    A frame of sends gets it as a value, which takes less time.
    """

    def __init__(self, first: FirstMessage, *, is_mismatch: bool) -> None:
        self.first = first
        self.is_mismatch = is_mismatch  # the first message has another body

    def __str__(self) -> str:
        # Only if it is needed: a send has no time for it.
        return f"the dedup key is that of the message {self.first.message_id!r}"


class KeyLookup(NamedTuple):
    """The answer of an old owner about a key. Without the other two, the key is unknown."""

    repeat: RepeatedSend | None = None
    is_replaceable: bool = False  # a message with this key replaces a pending one


class KeyedSend(NamedTuple):
    """A message that is stored with its dedup key."""

    key: DedupKey
    replaced: TimerId | None = None  # the pending timer whose message it replaces
    due_max_ms: int | None = None  # of a delayed message in mode `replace`, by the firing clock


@final
class Deduplication:
    """The dedup keys of one broker group, as its owner decides about them."""

    def __init__(
        self,
        tables: KeyTables,
        firsts: FirstMessages,
        catalog: Catalog,
        log: CommitLog,
        config: DedupConfig,
    ) -> None:
        self.tables = tables
        self._firsts = firsts
        self._catalog = catalog
        self._log = log
        self.memory = KeyMemory(tables, config.memory_bytes, on_forgotten=self._forget_counts)
        self._hashers: dict[TopicId, blake2b] = {}
        self._sweep_at_ms = 0  # by the clock of keys
        self._sweeping: list[TopicId] = []
        # Counts of this process, by topic id and by a word.
        self.hits: Counter[tuple[TopicId, str]] = Counter()  # "committed", "in_flight"
        self.rejected: Counter[tuple[TopicId, str]] = Counter()  # "memory", "version"
        self.replaced: Counter[TopicId] = Counter()
        self.mismatches: Counter[TopicId] = Counter()
        self.lookups: Counter[str] = Counter()  # "known", "unknown"

    def note_time(self, now_ms: int, monotonic_ms: int) -> None:
        """Note the time of a round, before its commands."""
        self.tables.clock.read(now_ms, monotonic_ms)

    def take_over(self) -> None:
        """Begin to decide: the catalog and the tables are complete."""
        self.tables.settle()
        self.tables.clock.restart()
        self.memory.count_all()

    def _forget_counts(self, topic_id: TopicId) -> None:
        """Forget the counts of a topic without deduplication."""
        for kind in ("committed", "in_flight"):
            self.hits.pop((topic_id, kind), None)
        for reason in ("memory", "version"):
            self.rejected.pop((topic_id, reason), None)
        self.replaced.pop(topic_id, None)
        self.mismatches.pop(topic_id, None)
        self._hashers.pop(topic_id, None)

    # ------------------------------------------------------------ sends

    def has_known_key(self, topic_id: TopicId, blob: bytes) -> bool:
        """Whether a message has a dedup key that is not free."""
        policy = self.tables.policy_of(topic_id) if topic_id in self.tables.tables else None
        if policy is None:
            return False
        try:
            fields = read_fields(blob)
            key = _key_of(policy, fields)
        except (ValueError, IllegalPropertyKey):
            return False  # `admit` rejects it.
        if key is None:
            return False
        hash_ = self.hash_of(topic_id, fields.message_group, *key)
        return self.find_known(topic_id, policy, hash_) is not None

    def admit(
        self, topic: Topic, blob: bytes, *, firing_ms: int, key_version: int = 0
    ) -> DedupKey | KeyedSend | RepeatedSend | None:
        """Return the key with which a message is stored; None if it has none.

        `key_version` is the version of the list with which the sender has looked up the key at its
        old owner, where it is unknown. It is one flat function because every keyed send calls it.

        Raises Overloaded, KeyOwnerChanged, IllegalPropertyKey, MessageCorrupted.
        """
        policy = topic.dedup
        assert policy is not None, "the topic has a table"
        try:
            fields = read_fields(blob)
        except ValueError as error:
            raise MessageCorrupted(f"the message is not well-formed: {error}") from None
        message_id, group, key, body_crc = fields
        is_message_id = key is None or policy.key_from is _MESSAGE_ID
        if key is None or is_message_id:
            if policy.key_from is _PROPERTY:
                return None
            key = message_id
        else:
            check_key(key)
        topic_id, tables = topic.id, self.tables
        table, now_ms = tables.tables[topic_id], tables.clock.now_ms
        hash_ = self.hash_of(topic_id, group, key, is_message_id)
        row = table.find(hash_)
        if row is not None and row.pin > 0:
            row = self._without_stale_pin(row, policy)
        due_max_ms = None
        if policy.mode is _REPLACE:
            assert policy.max_wait_ms is not None, "checked with the mode"
            due_max_ms = firing_ms + policy.max_wait_ms
        taken_at_ms, replaced = now_ms, None
        if row is None or not table.is_known(row, now_ms=now_ms, window_ms=policy.window_ms):
            if not group:
                self._check_owner(topic, key, key_version)
            if row is not None:
                pass  # Its row has room for the new message.
            elif policy.memory_bytes is None and self.memory.rest_bytes >= KEY_BYTES:
                self.memory.rest_bytes -= KEY_BYTES
            else:
                self._check_memory(topic, policy, table)
        else:
            if row.pin <= 0 or due_max_ms is None or blob[_TYPE_AT] == _TRANSACTION:
                return self._repeated(topic_id, row, body_crc, message_id.decode())
            self.replaced[topic_id] += 1
            # `maxWaitMs` counts from the first schedule.
            taken_at_ms, replaced = row.taken_at_ms, TimerId(row.pin - 1)
            due_max_ms += taken_at_ms - now_ms
        if len(key) > KEY_BYTES_MAX:
            key = key[:KEY_BYTES_MAX]  # of a message id; the hash covers all of it
        taken = _tuple(DedupKey, (hash_, body_crc, taken_at_ms, key))
        return taken if due_max_ms is None else KeyedSend(taken, replaced, due_max_ms)

    def take(self, topic: Topic, blob: bytes) -> DedupKey | None:
        """Return the key of a message that is recovered; None if it has none.

        Raises Conflict if another message has the key, and Overloaded without memory for the key.
        """
        if topic.dedup is None:
            return None
        try:
            fields = read_fields(blob)
            found = _key_of(topic.dedup, fields)
        except (ValueError, IllegalPropertyKey):
            return None  # Only intact properties are left, or the setting has changed.
        if found is None:
            return None
        key, is_message_id = found
        group = fields.message_group
        lists = (topic.placement.groups, topic.placement.before or topic.placement.groups)
        own_name = self._catalog.broker_name
        if not group and any(self._owner_of(one, key) != own_name for one in lists):
            return None  # Another owner may have stored another message with it.
        hash_ = self.hash_of(topic.id, group, key, is_message_id)
        if self.find_known(topic.id, topic.dedup, hash_) is not None:
            raise Conflict(
                f"another message of topic {topic.name} has the dedup key of this one; cancel that"
                f" message if it is delayed, else free the key:"
                f" tidemill dedup-key delete {topic.name} {key.decode()}"
            )
        table = self.tables.tables[topic.id]
        if table.find(hash_) is None:
            self._check_memory(topic, topic.dedup, table)
        return DedupKey(hash_, fields.body_crc, self.tables.clock.now_ms, key[:KEY_BYTES_MAX])

    def look_up(
        self, topic: Topic, key: bytes, body_crc: int, *, version: int, is_message_id: bool = False
    ) -> KeyLookup:
        """Look up a key without a message group for a proxy that has the list `version`.

        A key that is unknown here is never taken here by this list, because the new owner may take
        it from now on. Raises KeyOwnerChanged if the list here has another version.
        """
        policy = self._checked_policy(topic, version)
        hash_ = self.hash_of(topic.id, b"", key, is_message_id)
        row = self.find_known(topic.id, policy, hash_)
        self.lookups["unknown" if row is None else "known"] += 1
        if row is None:
            return KeyLookup()
        if row.pin > 0 and policy.mode is _REPLACE:
            return KeyLookup(is_replaceable=True)
        return KeyLookup(self._repeated(topic.id, row, body_crc, ""))

    def look_up_message(self, topic: Topic, blob: bytes, *, version: int) -> bool:
        """Whether the key of a message is known here; else as `look_up`."""
        self._checked_policy(topic, version)
        is_known = self.has_known_key(topic.id, blob)
        self.lookups["known" if is_known else "unknown"] += 1
        return is_known

    def share_warning(self, topic: Topic) -> str:
        """Return a warning if the share of a topic has memory that others use; "": it has none."""
        if topic.dedup is None or topic.dedup.memory_bytes is None:
            return ""
        used_bytes, bound_bytes = self.memory.shared()
        if used_bytes <= bound_bytes and bound_bytes >= KEY_BYTES:
            return ""
        return (
            f"topics without a share have {bound_bytes} of {self.memory.memory_bytes} bytes"
            f" (dedup_memory_bytes) for dedup keys; with keys above other shares, they use"
            f" {used_bytes}; messages with new keys of these topics are rejected until that is less"
        )

    def _checked_policy(self, topic: Topic, version: int) -> DedupPolicy:
        """Return the deduplication of a topic. Raises KeyOwnerChanged for another list."""
        if topic.dedup is None or topic.placement.version != version:
            raise KeyOwnerChanged(
                f"the list of key owners of topic {topic.name} has version"
                f" {topic.placement.version} at {self._catalog.broker_name}, not {version}; send"
                f" the message again"
            )
        return topic.dedup

    def due_max_ms(self, topic: Topic, half_id: HalfId, firing_ms: int) -> int | None:
        """Return the latest due time of an open half message; None if it has no limit.

        `maxWaitMs` counts from the send of the half message. A due time in the past means now.
        """
        if topic.dedup is None or topic.dedup.max_wait_ms is None:
            return None
        row = self.tables.tables[topic.id].find_pinned(pin_of_half(half_id))
        if row is None:
            return None
        waited_ms = self.tables.clock.now_ms - row.taken_at_ms
        return firing_ms + max(topic.dedup.max_wait_ms - waited_ms, 1)

    def find_known(self, topic_id: TopicId, policy: DedupPolicy, hash_: bytes) -> KeyRow | None:
        """Return the row of a key that is not free."""
        table, now_ms = self.tables.tables[topic_id], self.tables.clock.now_ms
        row = table.find(hash_)
        row = None if row is None else self._without_stale_pin(row, policy)
        if row is None or not table.is_known(row, now_ms=now_ms, window_ms=policy.window_ms):
            return None
        return row

    def _without_stale_pin(self, row: KeyRow, policy: DedupPolicy) -> KeyRow | None:
        """Return a row as the end of its timer leaves it, if only the record of that is lost."""
        if not self._firsts.is_pin_stale(row):
            return row
        return None if policy.mode is _REPLACE else row._replace(pin=NO_PIN)

    def hash_of(
        self, topic_id: TopicId, message_group: bytes, key: bytes, is_message_id: bool
    ) -> bytes:
        """Return the hash of a key, with its scope.

        A message id and a property with the same text are two keys. Otherwise a message whose
        property is the id of another message would not be stored.
        """
        hasher = self._hashers.get(topic_id) or self._hasher_of(topic_id)
        hasher = hasher.copy()
        scope = len(message_group) | (_OF_MESSAGE_ID if is_message_id else 0)
        hasher.update(scope.to_bytes(2, "big") + message_group + key)
        return hasher.digest()

    def _hasher_of(self, topic_id: TopicId) -> blake2b:
        """Return the keyed hash over the id of a topic, for copies."""
        secret = self._catalog.handle_secret
        hasher = blake2b(key=secret, digest_size=HASH_SIZE, person=b"dedup key")
        hasher.update(topic_id.to_bytes(4, "big"))
        self._hashers[topic_id] = hasher
        return hasher

    def _owner_of(self, groups: Sequence[str], key: bytes) -> str:
        """Return the owner of a key without a message group by a list of owners."""
        if groups:
            return groups[0] if len(groups) == 1 else owner_of_key(key, groups)
        home = self._catalog.membership.home
        return self._catalog.broker_name if home is None else home.name

    def _check_owner(self, topic: Topic, key: bytes, key_version: int) -> None:
        """Raise KeyOwnerChanged unless this broker group may take a key that it does not know.

        The sender does not know the deduplication of the topic yet, or has an old list.
        """
        placement, own_name = topic.placement, self._catalog.broker_name
        owner = self._owner_of(placement.groups, key)
        if owner != own_name:
            self.rejected[topic.id, "version"] += 1
            raise KeyOwnerChanged(
                f"the broker group {owner} owns the dedup key of this message, and the sender does"
                f" not know that yet; send it again"
            )
        if placement.before and (
            key_version != placement.version
            # A lookup has brought the list, and the home may have changed `keyFrom` before it. Then
            # the proof is about another key.
            or topic.version < placement.version
        ):
            old_owner = self._owner_of(placement.before, key)
            if old_owner != own_name:
                self.rejected[topic.id, "version"] += 1
                raise KeyOwnerChanged(
                    f"the broker group {old_owner} owned the dedup key of this message and may know"
                    f" it, and the sender has not looked it up there with list {placement.version},"
                    f" or {own_name} has not received this list from the home; send it again"
                )

    def _repeated(
        self, topic_id: TopicId, row: KeyRow, body_crc: int, message_id: str
    ) -> RepeatedSend:
        """Count a repeat; `message_id` is its own."""
        is_committed = row.log_offset < self._log.committed_offset
        self.hits[topic_id, "committed" if is_committed else "in_flight"] += 1
        is_mismatch = body_crc != row.body_crc
        if is_mismatch:
            self.mismatches[topic_id] += 1
        first = self._firsts.find(row) or FirstMessage(message_id, 0, 0, 0)
        return RepeatedSend(first, is_mismatch=is_mismatch)

    def _check_memory(self, topic: Topic, policy: DedupPolicy, table: KeyTable) -> None:
        """Raise Overloaded if a topic has no memory for another key."""
        share, memory = policy.memory_bytes, self.memory
        if share is None:
            has_room = memory.has_room()
        else:
            has_room = memory.has_room_in_share(share, table.memory_bytes)
        if not has_room:
            self.rejected[topic.id, "memory"] += 1
            raise _overloaded(topic.name, share, memory)

    # ------------------------------------------------------------ keys that are over

    def next_due_ms(self, now_ms: int) -> int | None:
        """Return the wall time of the next sweep; None: there is no key."""
        if not self.tables.may_have_rows and not self._sweeping:
            return None
        clock = self.tables.clock
        return now_ms if self._sweeping else now_ms + max(self._sweep_at_ms - clock.now_ms, 0)

    def sweep(self) -> bool:
        """Remove some keys that are over, if that is due; return whether more is due."""
        tables, now_ms = self.tables.tables, self.tables.clock.now_ms
        if not self._sweeping:
            if now_ms < self._sweep_at_ms:
                return False
            self._sweeping = list(tables)
            self._sweep_at_ms = now_ms + SWEEP_PERIOD_MS
            self.tables.may_have_rows = False
            self.memory.count_some()
        left = SWEPT_A_SLICE
        while self._sweeping and left > 0:
            left -= 1
            topic_id = self._sweeping[-1]
            table, policy = tables.get(topic_id), self.tables.policy_of(topic_id)
            if table is not None and policy is not None and len(table):
                self.tables.may_have_rows = True
                over_ms = now_ms - policy.window_ms
                if table.is_sweep_due(over_ms):
                    left -= SWEPT_BLOCK_COST * min(table.block_count(), BLOCKS_A_SWEEP)
                    self.tables.changed.add(table.topic_id)
                    limit = max(left // SWEPT_KEY_COST, SWEPT_KEYS_MIN)
                    left -= SWEPT_KEY_COST * table.sweep(over_ms=over_ms, limit=limit)
                    if table.end_sweep() is None:
                        return True
            self._sweeping.pop()
        return bool(self._sweeping)


def _overloaded(topic: str, share: int | None, memory: KeyMemory) -> Overloaded:
    """Return the error for a new key of a topic without memory for it."""
    if share is None:
        return Overloaded(
            f"the dedup keys of topics without a share use all of their memory, so topic {topic}"
            f" takes no new key: of {memory.memory_bytes} bytes (dedup_memory_bytes), topics with a"
            f" share have {memory.share_bytes}; shorten windowMs of a topic without a share, lower"
            f" a share, raise dedup_memory_bytes, or send later"
        )
    return Overloaded(
        f"the dedup keys of topic {topic} use all of their {memory.bound_of_share(share)} bytes, or"
        f" other topics use a part of them; its share (memoryBytes) is {share} of"
        f" {memory.memory_bytes} bytes (dedup_memory_bytes); shorten windowMs, raise the share or"
        f" dedup_memory_bytes, or send later"
    )


def _key_of(policy: DedupPolicy, fields: KeyFields) -> tuple[bytes, bool] | None:
    """Return the key of a message and whether it is the message id; None if it is not checked.

    Raises IllegalPropertyKey.
    """
    key_from = policy.key_from
    if fields.key is not None and key_from is not _MESSAGE_ID:
        return check_key(fields.key), False
    return None if key_from is _PROPERTY else (fields.message_id, True)
