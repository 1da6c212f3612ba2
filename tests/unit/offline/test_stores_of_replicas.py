"""Check, copy and mend of a replica's store."""

from __future__ import annotations

from collections.abc import Generator
from random import Random
from typing import TypeVar

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.worlds.engine_group import Group, Node
from tests.support.worlds.engine_world import ENTROPY, SMALL
from tidemill.broker.engine.layout import truncate_intent
from tidemill.broker.engine.layout.truncate_intent import LogCut
from tidemill.broker.engine.recovery import open_engine
from tidemill.broker.engine.replica.replica_files import FOLDER, INTENT
from tidemill.broker.engine.store.segment import segment_name
from tidemill.broker.offline.check import CheckReport, check
from tidemill.broker.offline.copy import copy
from tidemill.broker.offline.findings import Damage
from tidemill.broker.offline.mend import UNCONFIRMED, mend

T = TypeVar("T")


def run(steps: Generator[object, None, T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            value: T = end.value
            return value


def stopped_replica() -> Node:
    group = Group()
    group.elect(0, 0, 1, 2)
    group.send(*(f"m{n}" for n in range(10)), size=3_000)
    group.settle(3_000)  # it has noted how far its log is durable
    group.kill(2)
    return group.nodes[2]


def findings(report: CheckReport) -> list[tuple[Damage, str, bool]]:
    return [(one.damage, one.file, one.stops_start) for one in report.findings]


def intend_to_cut(node: Node, log_offset: int) -> None:
    file = node.disk.open(INTENT, create=True)
    file.write_at(
        0,
        [
            truncate_intent.encode(
                LogCut(log_offset, epoch=1, size_bytes=1, records=1, confirmed_bytes=0)
            )
        ],
    )
    file.sync()
    node.disk.folder(FOLDER).sync()


def test_a_check_finds_nothing_in_a_young_replica() -> None:
    report = run(check(stopped_replica().disk))
    assert report.is_sound, "it has no checkpoint yet"


@pytest.mark.parametrize(
    ("names", "stops_start"),
    [
        (["replica/state.a"], False),
        (["replica/state.a", "replica/state.b"], True),
        (["replica/store"], True),
        (["replica/durable.a"], False),
    ],
)
def test_a_check_finds_damage_to_the_files_of_a_replica(
    names: list[str], stops_start: bool
) -> None:
    disk = stopped_replica().disk
    for name in names:
        disk.damage(name, 20)
    report = run(check(disk))
    assert findings(report) == [(Damage.REPLICA, name, stops_start) for name in names]


def test_a_range_that_a_start_will_cut_is_not_damage_and_not_copied() -> None:
    node = stopped_replica()
    cut = run(check(node.disk)).log_end
    body = node.log.engine.log.segments[0]
    first = next(iter(node.log.engine.log.walk_between(0, cut)))
    end = first.log_offset + 100
    found = list(node.log.engine.log.walk_between(0, cut))
    at = found[len(found) // 2].log_offset
    assert 0 < end < at < body.end
    intend_to_cut(node, at)
    node.disk.damage(segment_name(0), at + 100)
    report = run(check(node.disk))
    assert findings(report) == []
    assert report.log_end == at
    target = FaultyDisk(Random(9))
    assert run(copy(node.disk, target)).log_end == at
    engine, opened = open_engine(target, SMALL, now_ms=1_000_000, entropy=ENTROPY)
    assert opened.cut_bytes == 0
    engine.close()


def test_a_mend_of_a_replica_takes_only_confirmed_records() -> None:
    node = stopped_replica()
    backup = FaultyDisk(Random(9))
    run(copy(node.disk, backup))
    found = list(node.log.engine.log.walk_between(0, node.log.log_end))
    at = found[-2].log_offset
    node.disk.damage(segment_name(0), at + 100)
    report = run(mend(node.disk, backup, is_dry=False))
    assert len(report.left) == 1
    assert UNCONFIRMED in report.left[0]
    node.disk.damage(segment_name(0), at + 100)  # as it was
    node.start()
    node.log.confirm(node.log.log_end)
    node.log.save_epoch_seen(node.log.epoch_seen)  # and that
    node.kill()
    node.disk.damage(segment_name(0), at + 100)
    report = run(mend(node.disk, backup, is_dry=False))
    assert report.left == []
    assert run(check(node.disk)).is_sound
