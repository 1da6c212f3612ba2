"""The audit log: one record per applied change, in the log of the broker group."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from random import Random
from typing import Any
from zlib import crc32

import pytest

from tests.support.audit_changes import (
    AUTHOR,
    change_of,
    delete_topic,
    put_topic,
    records_of,
    resources_of,
)
from tests.support.disk.faulty_disk import FaultyDisk, PowerCut
from tests.support.disk.offline_world import finish
from tests.support.worlds.engine_world import TOPIC, World
from tests.support.worlds.packed_worlds import (
    floors,
    forget_derived_files,
    move_floor,
    pack_all,
    small_world,
)
from tests.unit.broker.test_timer_requests import stored
from tidemill.broker.engine.layout.audit import AuditRow, decode_rows, encode_rows
from tidemill.broker.engine.layout.numbers import LogOffset, QueueId
from tidemill.broker.engine.layout.record import UnknownRecord
from tidemill.broker.engine.metadata import audit_log
from tidemill.broker.engine.metadata.audit_log import STATE_BYTES_MAX, AuditedChange, AuditLog
from tidemill.broker.engine.upkeep import checkpoint, restatement
from tidemill.broker.offline.check import check
from tidemill.broker.offline.copy import copy
from tidemill.common.errors import Conflict
from tidemill.message.resource_names import TIMER_TOPIC

# ---------------------------------------------------------------- one record per change


def test_a_change_has_one_record() -> None:
    world = World()
    put_topic(world, "orders", 4, before={}, after={"queues": 4})
    world.commit()
    assert records_of(world.engine) == [
        {
            "sequence": 1,
            "atMs": world.now_ms,
            **{name: text for name, text in AUTHOR.items() if text},
            "after": {"queues": 4},
            "result": "ok",
        }
    ]


def test_a_change_that_changes_nothing_has_no_record() -> None:
    world = World()
    for _ in range(2):
        put_topic(world, "orders", 4)
        world.commit()
    assert resources_of(world.engine) == ["Topic:orders"]


def test_a_rejected_change_has_no_record() -> None:
    world = World()
    put_topic(world, "orders", 4)
    with pytest.raises(Conflict):
        put_topic(world, "orders", 2)
    put_topic(world, "other")
    world.commit()
    assert resources_of(world.engine) == ["Topic:orders", "Topic:other"]


def test_changes_without_an_author_have_no_record() -> None:
    world = World()
    put_topic(world, "orders")
    with world.engine.fold.audited(None):
        world.topic("used")
    world.send("m", topic="used")
    world.commit()
    assert resources_of(world.engine) == ["Topic:orders"]


def test_below_level_3_there_are_no_records() -> None:
    world = World(feature_level=2)
    put_topic(world, "orders")
    world.commit()
    assert records_of(world.engine) == []
    world.engine.fold.record_audit(change_of("Replica:broker-0-1"), world.now_ms)
    assert records_of(world.engine) == []


def test_a_change_in_several_rounds_has_one_record() -> None:
    world = World()
    change = change_of("Topic:several")
    for number in range(3):
        with world.engine.fold.audited(change):
            world.topic(f"topic-{number}")
        world.commit()
    assert resources_of(world.engine) == ["Topic:several"]


def test_an_action_of_another_process_is_recorded() -> None:
    world = World()
    for result in ("begun", "failed"):
        change = change_of("Replica:broker-0-1", result=result, code=50_400, reason="too few")
        world.engine.fold.record_audit(change, world.now_ms)
        world.commit()
    world.restart()
    found = [(one["result"], one["code"], one["reason"]) for one in records_of(world.engine)]
    assert found == [("begun", 50_400, "too few"), ("failed", 50_400, "too few")]


def test_large_states_keep_their_first_fields() -> None:
    state = {"first": "a", "second": "x" * 3_000, "third": "x" * 3_000}
    encoded = AuditedChange(AUTHOR, before=state, after={"text": "x" * 9_000}).encode()
    fields = json.loads(encoded)
    assert fields["before"] == {"first": "a", "second": "x" * 3_000, "truncatedBytes": 6_036}
    assert fields["after"] == {"truncatedBytes": 9_011}
    for name in ("before", "after"):
        assert len(json.dumps(fields[name])) <= STATE_BYTES_MAX


def test_texts_are_cut() -> None:
    fields = json.loads(AuditedChange({"user": "u" * 9_000}, reason="r" * 9_000).encode())
    assert (len(fields["user"]), len(fields["reason"])) == (512, 512)


# ---------------------------------------------------------------- bounds


def rows_of(audit: AuditLog) -> list[int]:
    return [row.sequence for row in audit.newest_first()]


def test_the_oldest_records_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_log, "RECORDS_MAX", 3)
    audit = AuditLog()
    for sequence in range(1, 6):
        audit.add(AuditRow(sequence, 0, b"{}"), LogOffset(sequence))
    assert rows_of(audit) == [5, 4, 3]
    monkeypatch.setattr(audit_log, "BYTES_MAX", 2 * (21 + 2))
    audit.add(AuditRow(6, 0, b"{}"), LogOffset(6))
    assert rows_of(audit) == [6, 5]


def test_restated_records_join_later_ones_in_the_order_of_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(audit_log, "RECORDS_MAX", 4)
    audit = AuditLog()
    for sequence in (4, 5, 1, 2, 3):
        audit.add(AuditRow(sequence, 0, b"{}"), LogOffset(sequence))
    assert rows_of(audit) == [5, 4, 3, 2]
    assert audit.stated_before(4) == [2, 3]


def test_rows_keep_their_fields() -> None:
    rows = [AuditRow(1, 2, b'{"a":1}'), AuditRow(3, 4, b"{}", is_open=True)]
    assert decode_rows(encode_rows(rows)) == rows
    damaged = bytearray(encode_rows(rows))
    damaged[16] = 2
    with pytest.raises(UnknownRecord, match="audit row with flags 2"):
        decode_rows(bytes(damaged))


# ---------------------------------------------------------------- the log


@pytest.mark.parametrize("snapshot", [False, True])
def test_records_survive_starts_and_failovers(
    snapshot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "AUDIT_ROWS_A_SECTION", 4)
    world = World(is_followed=True)
    for number in range(10):
        put_topic(world, f"topic-{number}")
        world.commit()
    if snapshot:
        world.checkpoint()
    put_topic(world, "last")
    world.commit()
    before = records_of(world.engine)
    assert len(before) == 11
    for power_cut in (False, True):
        world.restart(power_cut=power_cut)
        assert bool(world.report.snapshot) == snapshot
        assert records_of(world.engine) == before
    world = World(is_followed=True)
    put_topic(world, "first")
    world.commit()
    world.fail_over()
    put_topic(world, "second")
    world.commit()
    assert resources_of(world.engine) == ["Topic:first", "Topic:second"]


def test_the_state_floor_keeps_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restatement, "AUDIT_BYTES_A_RECORD", 600)
    world = small_world()
    for number in range(8):
        put_topic(world, f"topic-{number}")
        world.commit()
    for _ in range(2):
        end = len(world.engine.log.segments) + 4
        while len(world.engine.log.segments) < end:
            world.send("gone", topic="gone", size=4_000)
        world.purge("gone")
        world.checkpoint()
        before = records_of(world.engine)
        move_floor(world, floors(world)[-1])
        pack_all(world)
        assert records_of(world.engine) == before
        forget_derived_files(world)
        world.open()
        assert records_of(world.engine) == before
        put_topic(world, "later")
        world.commit()
    assert len(records_of(world.engine)) == 9


def test_an_offline_check_and_a_copy_read_the_records() -> None:
    world = World()
    put_topic(world, "orders")
    world.commit()
    world.checkpoint()
    put_topic(world, "payments")
    world.commit()
    before = records_of(world.engine)
    world.disk = world.disk.after_kill()
    assert finish(check(world.disk, world.config.timer)).findings == []
    finish(copy(world.disk, target := FaultyDisk(Random(1))))
    assert records_of(World(target.after_kill()).engine) == before


# ---------------------------------------------------------------- a crash at every step


def changes_of(world: World) -> None:
    """Make changes, several in some rounds, with messages and acks between them."""
    for number in range(4):
        put_topic(world, f"a{number}")
        put_topic(world, f"b{number}")
        world.engine.commit(world.now_ms)
        world.send("m" * 300, topic=TOPIC)
        world.ack(*world.pop(1))
        delete_topic(world, f"a{number}")
        if number == 2:
            world.engine.commit(world.now_ms)
            world.checkpoint()
    world.engine.commit(world.now_ms)


def check_promise(world: World) -> None:
    """Check that each applied change has one record, and that no other change has one (S-15)."""
    expected: Counter[str] = Counter()
    applied = [one.name for one in world.engine.catalog.topics.values()]
    deleted = [one.name for one in world.engine.catalog.deleted_names.topics.values()]
    for name in applied + deleted:
        if name[0] in "ab":
            expected[f"Topic:{name}"] += 1 + (name in deleted)
    assert Counter(resources_of(world.engine)) == expected


@pytest.mark.parametrize("is_power_cut", [False, True])
def test_each_applied_change_has_one_record_after_a_crash_at_any_step(is_power_cut: bool) -> None:
    plain = World()
    changes_of(plain)
    check_promise(plain)
    begin = len(World().disk.operations)
    steps = len(plain.disk.operations)
    assert steps > begin + 20
    torn = 0
    for step in range(begin, steps):
        for seed in range(2 if is_power_cut else 1):
            world = World(FaultyDisk(Random(1_000 * step + seed)))
            world.disk.cut_at = step
            with pytest.raises(PowerCut):
                changes_of(world)
            world.restart(power_cut=is_power_cut)
            check_promise(world)
            torn += bool(world.report.cut_bytes)
            put_topic(world, "b9")
            world.commit()
            world.restart()
            check_promise(world)
    assert torn, "some rounds were torn"


def test_a_torn_send_of_the_first_delayed_message_has_no_record() -> None:
    """The hidden topic of timers is created with it, and stays."""

    def world_on(disk: FaultyDisk) -> World:
        world = World(disk)
        world.topic(TOPIC)
        world.commit()
        return world

    def send(world: World) -> None:
        topic = world.engine.catalog.find_topic(TOPIC)
        assert topic is not None
        due_at_ms = world.now_ms + 3_600_000
        blob = stored("m" * 3_000, due_at_ms=due_at_ms)
        with world.engine.fold.audited(change_of("Topic:send")):
            world.engine.commands.send(
                topic.id, QueueId(0), blob, crc32(blob), now_ms=world.now_ms, firing_ms=world.now_ms
            )
        world.engine.commit(world.now_ms)

    plain = world_on(FaultyDisk(Random(0)))
    begin = len(plain.disk.operations)
    send(plain)
    assert resources_of(plain.engine) == ["Topic:send"]
    for step in range(begin, len(plain.disk.operations)):
        for seed in range(30):
            world = world_on(FaultyDisk(Random(1_000 * step + seed)))
            world.disk.cut_at = step
            with suppress(PowerCut):
                send(world)
            world.restart(power_cut=True)
            timers = world.engine.catalog.find_topic(TIMER_TOPIC)
            queues = world.engine.catalog.queues
            is_sent = timers is not None and queues[timers.id, QueueId(0)].max_offset == 1
            assert len(resources_of(world.engine)) == is_sent, f"step {step}, seed {seed}"


def torn_world(**options: Any) -> World:
    """Return a world whose log ends with an audit record without its change."""
    world = World(**options)
    put_topic(world, "applied")
    world.commit()
    change = change_of("Topic:lost")
    with world.engine.fold.audited(change):
        world.engine.fold._record_audited(world.now_ms)
    world.engine.commit(world.now_ms)
    return world


def test_an_audit_record_at_the_end_of_a_life_is_dropped() -> None:
    world = torn_world()
    for _ in range(2):
        world.restart()
        assert resources_of(world.engine) == ["Topic:applied"]
    put_topic(world, "next")
    world.commit()
    world.restart()
    assert [(one["sequence"], one["resource"]) for one in records_of(world.engine)] == [
        (1, "Topic:applied"),
        (2, "Topic:next"),
    ]


def test_a_replica_with_a_snapshot_behind_an_open_record_drops_it() -> None:
    """The snapshot of a replica may be between an audit record and the next one."""
    world = torn_world()
    audit = world.engine.catalog.audit
    audit.is_open = True  # as at a replica that has not read the next record
    world.checkpoint()
    world.restart()
    assert world.report.snapshot
    assert resources_of(world.engine) == ["Topic:applied"]


def test_a_replica_that_takes_over_drops_an_open_record() -> None:
    """The master ended between the audit record and its change."""
    world = World(is_followed=True)
    put_topic(world, "applied")
    world.commit()
    with world.engine.fold.audited(change_of("Topic:lost")):
        world.engine.fold._record_audited(world.now_ms)
    world.commit()
    assert world.follower is not None
    assert world.follower.engine.catalog.audit.is_open
    world.fail_over()
    assert resources_of(world.engine) == ["Topic:applied"]
    put_topic(world, "next")
    world.commit()
    world.restart()
    assert resources_of(world.engine) == ["Topic:applied", "Topic:next"]


def test_a_replica_keeps_a_record_whose_change_follows() -> None:
    world = World(is_followed=True)
    put_topic(world, "applied")
    world.commit()
    assert world.follower is not None
    assert not world.follower.engine.catalog.audit.is_open
    world.fail_over()
    assert resources_of(world.engine) == ["Topic:applied"]
