"""Ages of messages in broker groups: a replica that copied the log becomes the master."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.worlds.engine_group import Group
from tests.support.worlds.engine_world import SMALL
from tests.unit.engine.test_packs_in_groups import lose, master_of
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.engine.metadata.topic_retention import RetentionChange

MINUTE_MS = 60_000
CONFIG = replace(SMALL, segment_bytes=64 << 10, checkpoint_log_bytes=64 << 10)


def elapse(group: Group, minutes: float) -> None:
    """Let time pass in steps of half a minute; the clocks of the nodes are right."""
    for _ in range(int(minutes * 2)):
        group.now_ms += 30_000 - 400
        group.settle(400)
        for node in group.nodes:
            while node.is_up:
                files = node.engine.background.step(
                    group.now_ms, firing_ms=group.now_ms, monotonic_ms=group.now_ms + 7
                )
                if files is None:
                    break
                for file in files:
                    file.sync()
                if node is master_of(group):
                    node.engine.write(group.now_ms)
                group.settle(50)


@pytest.mark.parametrize("begins_empty", [False, True])
def test_a_message_dies_in_time_after_a_failover_to_a_replica_that_copied_it(
    begins_empty: bool,
) -> None:
    group = Group(3, config=CONFIG)
    group.records_proposals = True
    group.elect(0)
    group.set_members(0, 1, 2)
    if begins_empty:
        lose(group, 2)
    administration = group.nodes[0].engine.administration
    kept = RetentionChange(ms=60 * MINUTE_MS)
    administration.put_topic(
        "orders", type_=TopicType.NORMAL, queues=1, retention=kept, now_ms=group.now_ms
    )
    elapse(group, 2)
    sent_ms = group.now_ms
    group.send("a", "b")
    elapse(group, 50)
    if begins_empty:
        group.nodes[2].disk = FaultyDisk(Random(7))
        group.restart(2)
        group.settle(2_000)
        group.set_members(0, 1, 2)
    elapse(group, 2)
    lose(group, 0)
    group.elect(2, 1, 2)
    group.settle(1_000)
    engine = group.nodes[2].engine
    queue = engine.catalog.queue(engine.catalog.topic_ids["orders"], QueueId(0))
    while queue.min_offset < 2 and group.now_ms < sent_ms + 200 * MINUTE_MS:
        elapse(group, 0.5)
    assert 60 <= (group.now_ms - sent_ms) / MINUTE_MS <= 65
