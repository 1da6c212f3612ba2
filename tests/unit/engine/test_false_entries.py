"""False entries of a queue file: they never deliver a message of another queue.

Causes are a block that was rebuilt from a damaged log or from a wrong range, and a bit that flips
in a block after its verification.
"""

from __future__ import annotations

from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.disk.offline_world import finish
from tests.support.worlds.engine_world import GROUP, TOPIC, World
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.queue_entry import ENTRY, SIZE
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.broker.offline.copy import copy
from tidemill.broker.offline.mend import mend

SECRETS = "secrets"


def world_of_files(count: int) -> tuple[World, list[str]]:
    """Return a world with some queue files, and the messages that were sent."""
    world = World(FaultyDisk(Random(1)), files_merged=16)
    world.topic(SECRETS)
    sent: list[str] = []
    while len(world.engine.store.queue_files) < count:
        world.send(f"secret-{len(sent)}", topic=SECRETS, size=2_000)
        texts = [f"m{len(sent) + n}" for n in range(10)]
        world.send(*texts, size=2_000)
        sent += texts
        world.background()
    return world, sent


def queue_of(world: World) -> ConsumeQueue:
    topic = world.engine.catalog.find_topic(TOPIC)
    assert topic is not None
    return world.engine.catalog.queues_of(topic)[0]


def rot_entry(world: World, offset: int, log_offset: int) -> None:
    """Change the log offset in the entry of a message."""
    run = queue_of(world)._run_of(offset)
    at = run.file.row(run.block).position + (offset - run.first) * SIZE
    before, _, _ = ENTRY.unpack_from(world.disk.read(run.file.name) or b"", at)
    pairs = zip(before.to_bytes(8, "big"), log_offset.to_bytes(8, "big"), strict=True)
    for n, (old, new) in enumerate(pairs):
        if old != new:
            world.disk.damage(run.file.name, at + n, bits=old ^ new)


def drain(world: World) -> list[str]:
    found: list[str] = []
    while (more := world.bodies()) or world.engine.rebuilds.is_due:
        found += more
        world.background()
    return found


def test_an_entry_of_another_message_delivers_nothing() -> None:
    world, sent = world_of_files(1)
    secret = world.engine.catalog.find_topic(SECRETS)
    assert secret is not None
    stolen = world.engine.catalog.queues_of(secret)[0].entry(0)[0]
    world.engine.log.verify(stolen)
    queue_of(world).entry(0)  # Its block counts as intact from now on.
    rot_entry(world, 5, stolen)
    assert sorted(drain(world)) == sorted(sent)
    assert not world.engine.catalog.find_topic(f"%DLQ%{GROUP}")


def test_a_rebuild_does_not_trust_damaged_neighbours() -> None:
    world, sent = world_of_files(3)
    queue = queue_of(world)
    second = queue._run(1)
    queue.data(0, len(sent))  # All of it was intact at the verification.
    rot_entry(world, second.first, 1)
    first = queue._run(0)
    world.disk.damage(first.file.name, first.file.row(first.block).position + 3 * SIZE + 7)
    with pytest.raises(BlockFileDamaged):
        queue.check_entry(3)
    assert sorted(drain(world)) == sorted(sent)
    assert not world.engine.catalog.find_topic(f"%DLQ%{GROUP}")


def test_a_file_rebuilt_from_a_damaged_log_is_rebuilt_again_after_the_mending() -> None:
    world, sent = world_of_files(2)
    backup = FaultyDisk(Random(2))
    finish(copy(world.disk, backup))
    queue = queue_of(world)
    begin = queue.entry(20)[0]
    end = sum(queue.entry(29)[:2])
    name = world.disk.names("log")[0]
    content = world.disk.read(name) or b""
    for at in range(begin, end):
        if content[at]:
            world.disk.damage(name, at, bits=content[at])
    run = queue._run(0)
    world.disk.damage(run.file.name, run.file.row(run.block).position + 7)
    with pytest.raises(BlockFileDamaged):
        queue.check_entry(3)
    world.background()
    assert [entry[0] for entry in queue.entries(20, 10)] == [begin] * 10
    world.disk = world.disk.after_kill()
    report = finish(mend(world.disk, backup, is_dry=False))
    assert report.is_whole
    world.open()
    assert sorted(drain(world)) == sorted(sent)
