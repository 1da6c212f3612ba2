"""One lost page of a pack with the last records and the begin of the directory.

The directory is derived from the heads of the records. A message with its head in the page counts
as damaged, so that another replica can mend it, and not as freed.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.support.worlds.engine_world import World, derive_directories
from tests.support.worlds.packed_worlds import (
    drop_dead_entries,
    finish,
    floors,
    move_floor,
    pack_all,
    small_world,
)
from tests.unit.engine.test_dead_entries import pairs_of
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.record import RecordKind
from tidemill.broker.engine.store.segment import CorruptStore, RecordFreed
from tidemill.broker.engine.upkeep import dead_entries, packing

PAGE = 4_096


class LostPage(NamedTuple):
    """A world with a pack that has lost a page, and its live messages by log offset."""

    world: World
    live: set[int]
    lost: set[int]  # of them, the messages with their head in the page


@pytest.fixture(autouse=True)
def _small_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (packing, dead_entries):
        monkeypatch.setattr(module, "FREED_BYTES_MIN", 1)


def lost_page() -> LostPage:
    world = small_world(files_merged=100, event_retention_ms=60_000)
    for n in range(600):
        world.send(f"gone {n}", topic="gone", size=700)
        if n % 10 == 0:
            world.send(f"kept {n}", topic="kept", size=500)
            world.checkpoint()
    world.purge("gone")
    world.checkpoint()
    move_floor(world, floors(world)[-1])
    pack_all(world)
    log = world.engine.log
    for segment in log.segments:
        if segment.pack is None or segment.pack.header.floor < segment.pack.header.end:
            continue
        live = {
            int(one.log_offset)
            for one in log.reader.walk(segment, segment.start)
            if one.header.kind == RecordKind.MESSAGE
        }
        records_end = segment.pack.header.records_end
        page = records_end // PAGE * PAGE
        lost = {offset for offset in live if log.reader.position(segment, offset) >= page}
        if lost and records_end % PAGE:
            world.disk.zero(segment.name, page, PAGE)
            world.restart()
            return LostPage(world, live, lost)
    raise AssertionError("no pack has a live message in its last page")


def state_of(world: World, offset: int) -> str:
    log = world.engine.log
    try:
        log.read(LogOffset(offset))
        log.verify(LogOffset(offset))
    except RecordFreed:
        return "freed"
    except CorruptStore:
        return "damaged"
    return "intact"


def test_a_message_in_a_lost_page_is_damaged_and_not_freed() -> None:
    world, live, lost = lost_page()
    states = {offset: state_of(world, offset) for offset in live}
    assert {states[offset] for offset in lost} == {"damaged"}
    assert "freed" not in states.values()


def test_no_index_pair_of_a_message_in_a_lost_page_is_dropped() -> None:
    world, _, lost = lost_page()
    assert lost <= {offset for offset, _ in pairs_of(world)}
    drop_dead_entries(world.engine)
    derive_directories(world.engine)
    drop_dead_entries(world.engine)
    finish(world.engine.merges._merge_index(world.engine.store.index.files))
    assert lost <= {offset for offset, _ in pairs_of(world)}
