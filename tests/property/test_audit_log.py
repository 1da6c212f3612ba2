"""The audit log after random changes, starts, failovers, snapshots and floors, against a model."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.audit_changes import change_of, delete_topic, put_topic, resources_of
from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.disk.quiet import has_pending
from tests.support.seeds import seeds
from tests.support.worlds.engine_world import World
from tests.support.worlds.packed_worlds import (
    SEGMENT,
    floors,
    forget_derived_files,
    move_floor,
    pack_all,
)
from tidemill.broker.engine.metadata import audit_log

KEPT = 40  # records, so that old ones are dropped
STEPS = 120


class AuditedWorld:
    """A world with its model: the resources of all applied changes."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.world = World(
            FaultyDisk(Random(seed)),
            segment_bytes=SEGMENT,
            checkpoint_log_bytes=SEGMENT,
            is_followed=self.random.random() < 0.5,
        )
        self.model: list[str] = []
        self.topics: list[str] = []
        self.number = 0

    def change(self) -> None:
        """Change a topic, in a round of its own or together with the next commands."""
        world, random = self.world, self.random
        chance = random.random()
        if chance < 0.2:
            change = change_of("Replica:r", result="begun")
            world.engine.fold.record_audit(change, world.now_ms)
            self.model.append("Replica:r")
        elif chance < 0.4 and self.topics:
            name = self.topics.pop(random.randrange(len(self.topics)))
            delete_topic(world, name)
            self.model.append(f"Topic:{name}")
        elif chance < 0.5 and self.topics:
            put_topic(world, random.choice(self.topics))  # It changes nothing.
        else:
            self.number += 1
            name = f"topic-{self.number}"
            state = {"text": "x" * random.choice([10, 300, 3_000])}
            put_topic(world, name, after=state)
            self.topics.append(name)
            self.model.append(f"Topic:{name}")
        if random.random() < 0.7:
            self.commit()

    def commit(self) -> None:
        if has_pending(self.world.engine):
            self.world.commit()

    def fill(self) -> None:
        """Fill segments with dead messages."""
        self.commit()
        world = self.world
        for _ in range(self.random.randint(10, 40)):
            world.send("gone", topic="gone", size=4_000)
        world.purge("gone")
        world.checkpoint(self.maybe_change)

    def maybe_change(self) -> None:
        if self.random.random() < 0.2:
            self.change()
            self.commit()

    def move_floor(self) -> None:
        """Move the floor; changes go on between its steps."""
        self.commit()
        found = floors(self.world)
        if not found:
            return
        floor = self.random.choice(found)
        if self.random.random() < 0.5:
            move_floor(self.world, floor)
        else:
            for files in self.world.engine.retention.move_floor(floor, self.world.now_ms):
                for file in files:
                    file.sync()
                self.maybe_change()
                self.commit()
        if self.random.random() < 0.5:
            pack_all(self.world, between=self.maybe_change)

    def restart(self) -> None:
        self.commit()
        chance = self.random.random()
        if chance < 0.3 and self.world.follower is not None:
            self.world.fail_over()
        elif chance < 0.6:
            forget_derived_files(self.world)
            self.world.open()
        else:
            self.world.restart(power_cut=chance < 0.8)

    def step(self) -> None:
        act = self.random.choice(
            [*[self.change] * 5, self.fill, self.move_floor, self.move_floor, self.restart]
        )
        act()
        kept = resources_of(self.world.engine)
        assert kept == self.model[-KEPT:], f"after {act.__name__}"


@pytest.mark.parametrize("seed", seeds("audit log", 30))
def test_the_kept_records_are_the_newest_of_the_model(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "RECORDS_MAX", KEPT)
    audited = AuditedWorld(seed)
    for _ in range(STEPS):
        audited.step()
