"""A second engine that reads only the committed bytes of the first engine's log.

It has its own disk and applies each record once. After every round both engines must have the same
state. The comparison omits state that depends on an engine's own clock or retention: slots that
wait only for their deadline or for a sweep, the position of a filter, deleted items that are not
forgotten yet, and queues below the first engine's minimum. After a restart, the first engine may
know only older statements than the second, and then it states them once more than necessary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.settled_ranges import ranges_of
from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.layout import record, timer_entry
from tidemill.broker.engine.layout.dedup import KeyRow
from tidemill.broker.engine.layout.durable_mark import NO_BOOT_ID
from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.engine.layout.transaction import TransactionState
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.pop.delivery_table import FLAGS_STORED, UNPROVEN, DeliveryTable
from tidemill.broker.engine.pop.linked_lists import NIL
from tidemill.broker.engine.pop.progress import PopProgress
from tidemill.broker.engine.replica.known_end import KnownEnd
from tidemill.broker.engine.replica.opening import FreshIdentity, open_replica_engine
from tidemill.broker.engine.replica.replica_engine import ReplicaEngine
from tidemill.broker.engine.replica.replica_files import ReplicaFiles
from tidemill.broker.engine.replication.messages import Data
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.broker.engine.store.message_index import PAIR_SIZE
from tidemill.broker.engine.timer.status import TimerState
from tidemill.broker.engine.timer.table import PAGE_ENTRIES

FRAME_BYTES = 1_000
DEEP_EVERY = 16  # comparisons between two deep ones, which walk over all state


def _ends_segment(frame: Data) -> bool:
    """Return whether a frame has a pad. The engine writes a pad with the next round."""
    return frame.end == frame.segment_start + frame.segment_bytes


class Follower:
    """The second engine with its position in the log."""

    def __init__(self, config: EngineConfig) -> None:
        self.disk = FaultyDisk(Random(0))
        # Its secret is unused, because the first engine has founded the store.
        fresh = FreshIdentity(store_uuid=bytes(16), secret=b"")
        self._log, _ = open_replica_engine(self.disk, config, now_ms=0, fresh=fresh)
        self.engine = self._log.engine
        self._comparisons = 0

    @property
    def _seen_to(self) -> int:
        return self.engine.log.log_end

    def _log_of(self, master: Engine, now_ms: int) -> ReplicaEngine:
        files = ReplicaFiles(master.disk, bytes(16), KnownEnd(self.disk, NO_BOOT_ID))
        return ReplicaEngine(master, files, b"", now_ms)

    def feed(self, master: Engine, now_ms: int) -> None:
        """Apply the bytes that were committed since the last call."""
        source, target = self._log_of(master, now_ms), self._log
        if not target.log_end:
            target.follow_state_floor(source.state_floor, master.log.committed_offset)
        while target.log_end < master.log.committed_offset:
            frame = source.frame_at(target.log_end, FRAME_BYTES)
            assert frame is not None, "what is committed is written"
            if frame.end > master.log.committed_offset and not _ends_segment(frame):
                frame = source.frame_at(target.log_end, 1)
                assert frame is not None, "as before"
            target.append(frame)
        log_offset, files = self.engine.log.begin_sync()
        for file in files:
            file.sync()
        self.engine.log.note_synced(log_offset)
        target.now_ms = now_ms
        target.confirm(target.log_end)
        for _ in target.apply_slices():
            pass

    def take_over(self, now_ms: int) -> Engine:
        """Make the second engine the master, without replicas."""
        self._log.now_ms = now_ms
        self._log.begin_epoch(self.engine.log.epoch + 1)
        self.engine.log.has_replicas = False
        self.engine.log.note_synced(self.engine.log.durable_offset)
        return self.engine

    def compare(self, master: Engine, latest_ms: int, *, has_restarted: bool) -> None:
        """Compare all state of both engines; `latest_ms` is the latest time in either of them."""
        self._comparisons += 1
        follower = self.engine
        seen_to, committed = follower.log.log_end, master.log.committed_offset
        # If the end of a segment has no room for a pad, the follower has read all of it.
        assert 0 <= seen_to - committed < record.PAD.size, f"{seen_to}, committed {committed}"
        assert _catalog(follower) == _catalog(master)
        _compare_queues(master, follower)
        _compare_letters(master, follower)
        _compare_pops(master, follower, latest_ms, has_restarted=has_restarted)
        _compare_timers(master, follower)
        assert _open_halves(follower) == _open_halves(master)
        keys_ms = master.key_tables.clock.now_ms
        assert _known_keys(follower, keys_ms) == _known_keys(master, keys_ms)
        if not has_restarted:
            frontiers = [one.timers.index.frontier_ms for one in (follower, master)]
            # The last FRONTIER record may be before the state floor. No pending timer needs it.
            is_copy = follower.fold.state_from > 0
            assert frontiers[0] == frontiers[1] or (is_copy and frontiers[0] < frontiers[1])
        if self._comparisons % DEEP_EVERY == 0:
            self.compare_deeply(master)

    def _has_seen_all(self, committed_offset: int) -> bool:
        """Return whether the second engine is at the end, except for a gap too small for a pad."""
        rest = self._seen_to - committed_offset
        is_behind_a_segment = any(one.end == self._seen_to for one in self.engine.log.segments)
        return rest == 0 or (is_behind_a_segment and 0 < rest < record.PAD.size)

    def compare_deeply(self, master: Engine) -> None:
        """Compare all state that needs a full walk, and walk the follower's own chains."""
        low = master.log.min_offset
        found, known = _pairs(self.engine, low), _pairs(master, low)
        # Each engine has packs of its own, which lack dead messages before the state floor.
        state_floor = max(master.log.state_floor, self.engine.log.state_floor)
        lost = {pair for pair in known - found if pair[1] >= state_floor}
        assert not lost, "index entries that no record makes"
        # The oldest segment may be half retired: its entries are deleted before its file.
        oldest_end = max(master.log.segments[0].end, state_floor)
        assert all(log_offset < oldest_end for _, log_offset in found - known)
        _check_links(self.engine)


def _known_keys(engine: Engine, now_ms: int) -> list[tuple[int, KeyRow]]:
    """Return the dedup keys that are known at a time; each engine removes the others later."""
    tables = engine.key_tables
    found = []
    for topic_id, table in tables.tables.items():
        policy = tables.policy_of(topic_id)
        for row in table.walk():
            window_ms = policy.window_ms if policy else 0
            if policy and table.is_known(row, now_ms=now_ms, window_ms=window_ms):
                found.append((topic_id, row))
    return sorted(found)


def _open_halves(engine: Engine) -> list[tuple[int, ...]]:
    # Each engine forgets results in its own time.
    return [
        row
        for rows in engine.transaction_table.walk()
        for row in rows.tolist()
        if row[-1] == TransactionState.HALF
    ]


def _catalog(engine: Engine) -> dict[str, Any]:
    # Each engine forgets the state of a deleted group or topic in its own slices.
    catalog, is_alive = engine.catalog, engine.catalog.is_alive
    return {
        "topics": {id_: topic for id_, topic in catalog.topics.items() if is_alive(id_)},
        "groups": catalog.groups,
        "names": {name: id_ for name, id_ in catalog.topic_ids.items() if is_alive(id_)},
        "group names": catalog.group_ids,
        "retry": {of: id_ for of, id_ in catalog.retry_topic_ids.items() if is_alive(id_)},
        "open": set(catalog.open_queues),
        "name": (catalog.broker_name, catalog.handle_secret),
        "next": catalog.next_id,
        "handles": catalog.ended_handles.of_group,
        "security": (catalog.security.version, catalog.security.items),
        "audit": list(catalog.audit.newest_first()),
        "operations": list(catalog.operations.by_id.values()),
        "pulled": {
            key: offset for key, offset in catalog.pull_offsets.all.items() if is_alive(key[1])
        },
    }


def _compare_letters(master: Engine, follower: Engine) -> None:
    # Each engine forgets those that retention has removed in its own time.
    engines = master, follower
    topic_ids = {id_ for one in engines for id_ in one.catalog.settled_letters.topic_ids}
    for topic_id in filter(master.catalog.is_alive, topic_ids):
        low = max(one.catalog.queue(topic_id, QueueId(0)).min_offset for one in engines)
        known, found = (
            [
                one._replace(begin=max(one.begin, low))
                for one in ranges_of(engine.catalog.settled_letters, topic_id)
                if one.end > low
            ]
            for engine in engines
        )
        assert found == known, f"the settled dead letters of topic {topic_id}"


def _compare_queues(master: Engine, follower: Engine) -> None:
    known, found = _queues(master.catalog), _queues(follower.catalog)
    assert found.keys() == known.keys()
    for key, queue in known.items():
        other = found[key]
        assert other.max_offset == queue.max_offset, f"the end of queue {key}"
        assert other.stated_at >= queue.stated_at, f"queue {key} is stated"
        if queue.min_offset < queue.max_offset:
            begin = max(queue.min_offset, queue.max_offset - 64)
            count = queue.max_offset - begin
            assert other.entries(begin, count) == queue.entries(begin, count), f"queue {key}"


def _queues(catalog: Catalog) -> dict[tuple[TopicId, QueueId], ConsumeQueue]:
    return {key: queue for key, queue in catalog.queues.items() if catalog.is_alive(key[0])}


def _compare_pops(master: Engine, follower: Engine, latest_ms: int, *, has_restarted: bool) -> None:
    known, found = dict(_progress(master, master)), dict(_progress(follower, master))
    ahead = {
        key: (known[key][0], *found[key][1:])
        for key in known.keys() & found.keys()
        # A snapshot contains the position of a filter; records do not.
        if has_restarted and known[key][0] > found[key][0]
    }
    if has_restarted:
        found = {**found, **ahead}
        known = {key: value for key, value in known.items() if key in found or value[1:6] != EMPTY}
    assert found == known
    assert _deliveries(follower, latest_ms) == _deliveries(master, latest_ms)
    _compare_statements(master.state.table, follower.state.table)


def _compare_statements(known: DeliveryTable, found: DeliveryTable) -> None:
    """Compare the records that state a slot, if both engines have the same delivery in it."""
    for slot in known.in_use(0, min(len(known.ids), len(found.ids))).tolist():
        if found.ids[slot] == known.ids[slot]:
            assert found.stated_at[slot] >= known.stated_at[slot], f"slot {slot} is stated"


EMPTY: tuple[object, ...] = (0, 0, [], NIL, None)


def _progress(engine: Engine, master: Engine) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    for key, one in engine.state.progress.items():
        if engine.state.is_deleted(one):
            continue  # Each engine forgets it in its own slices.
        slots = engine.state.deliveries_of(one)
        assert one.in_flight == sum(engine.state.table.live[s].bit_count() for s in slots)
        state = (
            one.pop_offset,
            one.void_before,
            one.in_flight,
            slots,
            one.oldest,
            _ordered(one, master.catalog.queues[one.topic_id, key[2]].min_offset),
        )
        if state != (0, *EMPTY):
            yield key, (*state, one.named_topic_id)


def _ordered(progress: PopProgress, low: int) -> tuple[object, ...] | None:
    ordered = progress.ordered
    if ordered is None:
        return None
    pending = {offset: count for offset, count in ordered.pending.items() if offset >= low}
    is_new = not pending and not ordered.attempt_id and ordered.batch_id < 0
    return None if is_new else (pending, ordered.attempt_id, ordered.batch_id)


def _deliveries(engine: Engine, latest_ms: int) -> dict[int, tuple[Any, ...]]:
    """Return the contents of each slot, without slots that only wait for their deadline."""
    table, found = engine.state.table, {}
    for slot in table.in_use(0, len(table.ids)).tolist():
        owner = engine.state.owners[table.owners[slot]]
        is_kept = table.superseded[slot] and table.visible_at_ms[slot] > latest_ms
        # Each engine drops kept deliveries of ended handles in its own slices.
        handles = engine.catalog.ended_handles
        is_kept = is_kept and not handles.have_ended(owner.group_id, table.ids[slot])
        if not engine.state.is_void(owner, table.ids[slot]) and (table.live[slot] or is_kept):
            found[slot] = (
                table.ids[slot],
                owner.group_id,
                owner.topic_id,
                owner.queue.queue_id,
                table.starts[slot],
                table.counts[slot],
                table.flags[slot] & FLAGS_STORED | table.handover[slot] & UNPROVEN,
                table.visible_at_ms[slot],
                table.popped_at_ms[slot],
                table.live[slot],
                table.superseded[slot],
                table.gaps.get(slot),
                table.client_of(slot),
            )
    return found


def _compare_timers(master: Engine, follower: Engine) -> None:
    index, other = master.timers.index, follower.timers.index
    # A copy of a log knows no timer that ended before the state floor.
    floor = follower.fold.state_from
    assert other.next_id == index.next_id or (floor and other.next_id < index.next_id)
    assert other.pending_count == index.pending_count
    assert other.pinned_bytes == index.pinned_bytes
    if index.gathered_due_ms is not None:
        return  # The first engine gathers several rounds before it updates its table.
    known, found = dict(index.table.page_batches()), dict(other.table.page_batches())
    for first_id in known.keys() | found.keys():
        _compare_entries(
            first_id, known.get(first_id, NO_TIMERS), found.get(first_id, NO_TIMERS), floor
        )
    for name in ("pending", "pins", "file_live"):
        assert +getattr(other.counts, name) == +getattr(index.counts, name), name


NO_TIMERS = np.zeros(PAGE_ENTRIES, timer_entry.DTYPE)


def _compare_entries(first_id: int, known: np.ndarray, found: np.ndarray, floor: int) -> None:
    """Compare a page of each table by columns, which is fast."""
    state, other = known["state"], found["state"]
    differs = state != other
    # Engines do not move ended timers, and retention may have removed their messages.
    for place in ("due", "log_offset", "size"):
        differs |= (state == TimerState.PENDING) & (known[place] != found[place])
    if not differs.any():
        return
    # The second engine may still know timers that the first has forgotten, but both must know all
    # pending timers.
    is_allowed = (state == TimerState.FORGOTTEN) & (other != 0)
    is_allowed |= (state == 0) & (other != TimerState.PENDING)
    is_ended = (state != TimerState.PENDING) & (known["log_offset"] < floor)
    is_allowed |= is_ended & (other == 0)
    wrong = np.flatnonzero(differs & ~is_allowed)
    assert not len(wrong), f"timers {(first_id + wrong).tolist()}: {known[wrong]} {found[wrong]}"


def _pairs(engine: Engine, low: int) -> Counter[tuple[int, int]]:
    index = engine.store.index
    pairs = Counter(zip(index.hashes, index.offsets, strict=True))
    for file in index.files:
        for number, row in enumerate(file.rows()):
            data = file.block(number, row.items * PAIR_SIZE)
            hashes = np.frombuffer(data, ">u8", row.items).tolist()
            offsets = np.frombuffer(data, ">i8", row.items, row.items * 8).tolist()
            pairs.update(zip(hashes, offsets, strict=True))
    return Counter({pair: count for pair, count in pairs.items() if pair[1] >= low})


def _check_links(engine: Engine) -> None:
    """Check that every pending timer is in the chain of a slot behind the hand."""
    index = engine.timers.index
    linked: set[tuple[int, int]] = set()
    for slot_s in index.links.wheel.filled(
        index.links.hand_s + 1, index.links.hand_s + index.links.wheel.slot_count
    ):
        linked.update((found.timer_id, found.due_at_ms) for found in index.links.chain(slot_s))
    for first_id, rows in index.table.page_batches():
        for at in np.flatnonzero(rows["state"] == TimerState.PENDING).tolist():
            assert (first_id + at, int(rows[at]["due"])) in linked, f"timer {first_id + at}"
