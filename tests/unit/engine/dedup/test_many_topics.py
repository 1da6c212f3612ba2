"""Dedup keys of many topics: each event and each sweep looks at few tables (ADR 0087)."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from tests.support.worlds.dedup_world import WINDOW_MS, DedupWorld
from tidemill.broker.engine.dedup.deduplication import (
    SWEPT_BLOCK_COST,
    SWEPT_KEY_COST,
    SWEPT_KEYS_MIN,
)
from tidemill.broker.engine.dedup.key_memory import COUNTED_TABLES
from tidemill.broker.engine.dedup.key_table import KEY_BYTES, KeyTable
from tidemill.broker.engine.dedup.tables import SWEPT_A_SLICE
from tidemill.broker.engine.layout.dedup import NO_PIN, KeyRow, pin_of_timer
from tidemill.broker.engine.layout.numbers import LogOffset, TimerId, TopicId
from tidemill.broker.engine.metadata.dedup_policy import DedupMode
from tidemill.common.errors import Overloaded

TOPICS = 3_000
HASH = b"\x01" * 16


@pytest.fixture
def world() -> DedupWorld:
    """A world whose topics have a key each."""
    world = DedupWorld()
    world.turn_on()
    world.note_round()
    topic, tables = world.engine.catalog.topics[world.topic()], world.engine.key_tables
    for n in range(TOPICS):
        id_ = TopicId(1_000_000 + n)
        world.engine.catalog.topics[id_] = replace(topic, id=id_, name=f"t{n}")
        tables.tables[id_] = KeyTable(id_)
        row = KeyRow(HASH, LogOffset(100 + n), tables.clock.now_ms, 0, NO_PIN)
        tables.apply_stated([(id_, row)])
    return world


def sweep(world: DedupWorld) -> int:
    """Sweep once; return the number of slices."""
    slices = 1
    while world.engine.deduplication.sweep():
        slices += 1
    return slices


def test_a_sweep_passes_topics_without_a_key_that_is_over(world: DedupWorld) -> None:
    assert sweep(world) <= 5
    assert world.engine.key_tables.key_count == TOPICS


def test_a_slice_of_a_sweep_looks_at_few_tables_with_keys_that_are_over(world: DedupWorld) -> None:
    world.now_ms += WINDOW_MS
    world.note_round()
    assert 100 < sweep(world) < 300
    assert world.engine.key_tables.key_count == 0
    world.now_ms += 1_000
    world.note_round()
    sweep(world)
    assert world.engine.deduplication.next_due_ms(world.now_ms) is None


def test_a_count_of_the_memory_looks_only_at_changed_tables(world: DedupWorld) -> None:
    memory, tables = world.engine.deduplication.memory, world.engine.key_tables
    assert len(tables.changed) > TOPICS
    memory.count_some()
    assert len(tables.changed) > TOPICS - COUNTED_TABLES - 2
    memory.count_all()
    assert memory.shared() == (tables.memory_bytes, memory.memory_bytes)
    world.store("a", key="k")
    assert len(tables.changed) == 1
    memory.count_some()
    assert memory.shared() == (tables.memory_bytes, memory.memory_bytes)


def test_the_memory_of_uncounted_keys_is_not_given_twice(world: DedupWorld) -> None:
    memory, tables = world.engine.deduplication.memory, world.engine.key_tables
    memory.memory_bytes = tables.memory_bytes + 100 * KEY_BYTES
    memory.count_all()
    stored = 0
    with contextlib.suppress(Overloaded):
        for n in range(1_000):
            # More tables change than a count looks at, so none is complete.
            tables.changed.update(tables.tables)
            world.now_ms += 1
            world.store(f"m{n}", key=f"k{n}")
            stored += 1
    assert 0 < stored <= 100
    memory.count_all()
    assert memory.shared()[0] <= memory.memory_bytes


def test_a_deleted_topic_and_a_share_count_at_once() -> None:
    world = DedupWorld()
    world.turn_on()
    world.turn_on(topic="other", memory_bytes=1 << 20)
    world.store("a", key="k")
    memory = world.engine.deduplication.memory
    bound = memory.memory_bytes - (1 << 20)
    own = world.engine.key_tables.tables[world.topic()]
    assert memory.shared() == (own.memory_bytes, bound)
    assert memory.bound_of(world.engine.catalog.topic_ids["other"]) == 1 << 20
    world.engine.administration.delete_topic("orders", world.now_ms)
    world.engine.administration.delete_topic("other", world.now_ms)
    assert memory.shared() == (0, memory.memory_bytes)


def test_the_end_of_a_timer_changes_its_own_topic_only() -> None:
    world = DedupWorld()
    world.turn_on()
    world.turn_on(topic="other")
    tables, pin = world.engine.key_tables, pin_of_timer(7)
    ids = world.topic(), world.engine.catalog.topic_ids["other"]
    for id_ in ids:
        tables.apply_stated([(id_, KeyRow(HASH, LogOffset(100), 5, 0, pin))])
    tables.apply_timer_end(TimerId(7), ids[1])
    assert [tables.tables[id_].pinned_count for id_ in ids] == [1, 0]
    tables.apply_timer_end(TimerId(7), 0)
    assert [tables.tables[id_].pinned_count for id_ in ids] == [0, 0]


def test_a_key_that_its_timer_kept_after_its_window_is_swept() -> None:
    world = DedupWorld()
    world.turn_on()
    world.store("a", key="k", due_at_ms=world.now_ms + 2 * WINDOW_MS)
    world.advance(WINDOW_MS)
    world.run_due()
    world.store("b", key="later")
    world.advance(WINDOW_MS - 1_000)
    world.run_due()
    assert world.engine.key_tables.key_count == 2
    world.advance(1_000)
    world.advance(1_000)
    world.run_due()
    assert world.engine.key_tables.key_count == 0


def test_keys_from_a_snapshot_are_swept() -> None:
    world = DedupWorld()
    world.turn_on()
    world.store("a", key="k")
    world.checkpoint()
    world.restart()
    world.advance(WINDOW_MS)
    world.run_due()
    assert world.engine.key_tables.key_count == 0


@pytest.mark.parametrize("is_deleted", [True, False])
def test_the_counts_of_a_topic_end_with_its_deduplication(is_deleted: bool) -> None:
    world = DedupWorld()
    world.turn_on(mode=DedupMode.REPLACE, max_wait_ms=60_000)
    due_at_ms = world.now_ms + 30_000
    for text in "ab":
        world.store(text, key="later", due_at_ms=due_at_ms)
    world.store("c", key="k")
    world.repeat("d", key="k")
    deduplication = world.engine.deduplication
    deduplication.rejected[world.topic(), "memory"] += 1
    counts = (
        deduplication.hits,
        deduplication.mismatches,
        deduplication.rejected,
        deduplication.replaced,
    )
    assert all(counts)
    if is_deleted:
        world.engine.administration.delete_topic("orders", world.now_ms)
    else:
        world.turn_off()
    deduplication.memory.count_all()
    assert not any(counts)


def test_a_slice_of_the_sweep_removes_a_bounded_number_of_keys() -> None:
    world = DedupWorld()
    topics = [f"t{n}" for n in range(3)]
    # The first table leaves some of a slice for the second one.
    count = (SWEPT_A_SLICE - 2 * SWEPT_BLOCK_COST) // SWEPT_KEY_COST
    for topic in topics:
        world.turn_on(topic=topic, window_ms=1_000)
        for n in range(count):
            world.store("a", key=f"k{n}", topic=topic, is_ended=False)
    world.commit()
    world.now_ms += 3_000
    world.note_round()
    removed, is_due = [], True
    while is_due:
        before = world.engine.key_tables.key_count
        is_due = world.engine.deduplication.sweep()
        removed.append(before - world.engine.key_tables.key_count)
    assert sum(removed) == count * len(topics)
    assert max(removed) <= SWEPT_A_SLICE // SWEPT_KEY_COST + SWEPT_KEYS_MIN
