"""A bit flips in the directory of a pack after its first check, without a restart.

A position from such a directory belongs to another record. The records themselves are intact: they
are found once the directory is derived, they are not overwritten by a mending, and no walk passes
over them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from tests.support.worlds.engine_group import Group, Node
from tests.support.worlds.engine_world import SMALL, derive_directories
from tests.unit.engine.test_packs_in_groups import pack_node, purge
from tidemill.broker.engine.layout.numbers import LogOffset, QueueId, TopicId
from tidemill.broker.engine.layout.pack import EXTENT
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.damaged_ranges import AGAIN_MS
from tidemill.broker.engine.store.pack import Window
from tidemill.broker.engine.store.segment import CorruptStore, Hole
from tidemill.common.errors import Repairing

LOW, COUNT = 50, 240
BITS = [0, 2, 5, 7]  # of the lowest byte of the position of the last extent


class Packed(NamedTuple):
    """Two replicas, and the live messages in the packs of the master."""

    group: Group
    live: list[int]

    @property
    def master(self) -> Node:
        return self.group.nodes[0]

    @property
    def log(self) -> CommitLog:
        return self.master.engine.log

    def flip(self, bit: int) -> None:
        """Flip a bit in the directory of the last pack, after another pack was read."""
        [*_, last] = [one for one in self.log.segments if one.pack is not None]
        assert last.pack is not None
        header = last.pack.header
        at = header.records_end + EXTENT.size * (header.extent_count - 1)
        self.master.disk.damage(last.name, at + 7, bits=1 << bit)
        self.log.reader._window = Window(None, [0], [0])

    def intact(self) -> list[int]:
        """Return the live messages that can be read."""
        log = self.group.nodes[0].engine.log
        found = []
        for offset in self.live:
            try:
                log.read(LogOffset(offset))
                log.verify(LogOffset(offset))
            except CorruptStore:
                continue
            found.append(offset)
        return found

    def derive(self) -> None:
        """Derive the directory, after one look-up per message."""
        self.intact()
        assert derive_directories(self.master.engine) == 1

    def walked(self) -> list[int]:
        log = self.log
        walk = log.walk_between(0, log.log_end)
        return [int(one.log_offset) for one in walk if not isinstance(one, Hole)]


def packed() -> Packed:
    group = Group(2, config=replace(SMALL, segment_bytes=64 << 10, checkpoint_log_bytes=64 << 10))
    group.records_proposals = True
    group.elect(0)
    group.set_members(0, 1)
    for n in range(COUNT):
        group.send(f"m{n}", size=1_000)
    group.settle()
    master = group.nodes[0]
    purge(group, LOW)
    assert pack_node(group, master) >= 1
    log = master.engine.log
    queue = master.engine.catalog.queues[TopicId(1), QueueId(0)]
    offsets = [int(queue.entry(n)[0]) for n in range(LOW, COUNT)]
    live = [each for each in offsets if log.segment_of(LogOffset(each)).pack is not None]
    found = Packed(group, live)
    assert live
    assert found.intact() == live
    return found


@pytest.mark.parametrize("bit", BITS)
def test_each_message_is_read(bit: int) -> None:
    world = packed()
    world.flip(bit)
    world.derive()
    assert world.intact() == world.live


@pytest.mark.parametrize("bit", BITS)
def test_a_walk_misses_no_record(bit: int) -> None:
    """Readers of events and of pipelines walk past damage."""
    world = packed()
    before = world.walked()
    world.flip(bit)
    damage = world.log.damage
    found = world.walked()
    if found != before:
        with pytest.raises(Repairing):
            damage.check_directories()
    world.derive()
    assert world.walked() == before


@pytest.mark.parametrize("bit", BITS)
def test_a_mending_destroys_no_record(bit: int) -> None:
    world = packed()
    world.flip(bit)
    world.log.damage.has_replicas = True
    for offset in world.live:
        world.log.damage.request(LogOffset(offset))
    world.group.mend(0)
    world.derive()
    world.group.now_ms += AGAIN_MS
    world.group.mend(0)
    assert not world.log.damage.has_requests
    assert world.intact() == world.live
    world.group.kill(1)
    world.group.kill(0)
    world.group.restart(0)
    world.derive()
    assert world.intact() == world.live
