"""Security items after random changes, starts, failovers, snapshots and floors, against a model."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.disk.quiet import has_pending
from tests.support.security_items import TableModel, change_engine, delete, put, table_of
from tests.support.seeds import seeds
from tests.support.worlds.engine_world import World
from tests.support.worlds.packed_worlds import (
    SEGMENT,
    floors,
    forget_derived_files,
    move_floor,
    pack_all,
)

KINDS = ("user", "role", "token", "quota", "ban")
NAMES = tuple("abcdefgh")
STEPS = 150


class SecuredWorld:
    """A world with its model."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.world = World(
            FaultyDisk(Random(seed)),
            segment_bytes=SEGMENT,
            checkpoint_log_bytes=SEGMENT,
            is_followed=self.random.random() < 0.5,
        )
        self.model = TableModel()

    def choose_items(self) -> list[dict[str, Any]]:
        """Choose items with different keys; only items that exist are deleted."""
        random, items = self.random, []
        for kind, name in random.sample(
            [(k, n) for k in KINDS for n in NAMES], random.randint(1, 6)
        ):
            if (kind, name) in self.model.items and random.random() < 0.5:
                items.append(delete(name, kind=kind))
            else:
                items.append(put(name, "x" * random.randint(0, 2_000), kind=kind))
        if random.random() < 0.2:
            items.append({"op": "security", "security": {"mode": random.choice("abc")}})
        return items

    def change(self) -> None:
        """Change the table, in a round of its own or together with the next commands."""
        items = self.choose_items()
        change_engine(self.world.engine, *items, now_ms=self.world.now_ms)
        self.model.change(*items)
        if self.random.random() < 0.7:
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
        """Change the table between two steps of background work, which waits for commits."""
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
                self.commit()  # the restated items
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
        assert table_of(self.world.engine) == self.model.table, f"after {act.__name__}"


@pytest.mark.parametrize("seed", seeds("security items", 100))
def test_the_table_is_the_one_of_the_model(seed: int) -> None:
    world = SecuredWorld(seed)
    for _ in range(STEPS):
        world.step()
    world.restart()
    assert table_of(world.world.engine) == world.model.table
