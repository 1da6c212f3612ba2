"""The feature level of a log: an item says it, and the log keeps it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.worlds.engine_world import World
from tidemill.broker.engine.layout.config import ConfigItem
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.record import UnknownRecord
from tidemill.broker.engine.metadata.catalog import feature_level_item
from tidemill.broker.engine.store.segment import CorruptStore
from tidemill.common.feature_level import FEATURE_LEVEL

LATER_LEVEL = rf"feature level {FEATURE_LEVEL + 1} .* Start the version that wrote it"


def test_a_new_store_gets_the_level_of_the_program() -> None:
    assert World().engine.catalog.feature_level == FEATURE_LEVEL


def test_a_capped_store_stays_at_its_level_and_its_log_has_no_item() -> None:
    world = World(feature_level=1)
    assert world.engine.catalog.feature_level == 1
    assert "featureLevel" not in world.engine.catalog.stated_at


def test_a_start_without_the_cap_raises_the_level_and_a_later_cap_keeps_it() -> None:
    world = World(feature_level=1)
    world.config = replace(world.config, feature_level=2)
    world.restart()
    assert world.engine.catalog.feature_level == 2
    world.config = replace(world.config, feature_level=1)
    for power_cut in (False, True):
        world.restart(power_cut=power_cut)
        assert world.engine.catalog.feature_level == 2


def test_a_checkpoint_and_retention_keep_the_level() -> None:
    world = World(feature_level=2)
    stated = world.engine.catalog.stated_at["featureLevel"]
    for _ in world.engine.checkpoints.write():
        pass
    world.restart()
    assert world.report.snapshot
    assert world.engine.catalog.feature_level == 2
    # Retention states it again before it removes the segment with the item.
    item = world.engine.catalog.find_stated_before("featureLevel", LogOffset(stated + 1))
    assert item == feature_level_item(2)


def test_a_master_raises_the_level_when_its_view_does() -> None:
    """A replica gets the level from its view, between two rounds."""
    world = World(feature_level=1, is_followed=True)
    engine = world.engine
    engine.allowed_level = 2
    assert engine.next_due_ms(world.now_ms, firing_ms=world.now_ms) == world.now_ms
    engine.run_due(world.now_ms, firing_ms=world.now_ms)
    engine.commit(world.now_ms)
    assert engine.catalog.feature_level == 2
    world.follow()
    world.fail_over()
    assert world.engine.catalog.feature_level == 2


def test_a_log_of_a_later_level_stops_the_start() -> None:
    world = World()
    item = feature_level_item(FEATURE_LEVEL + 1)
    with pytest.raises(UnknownRecord):
        world.engine.fold.append(ConfigItem(item), world.now_ms)
    world.engine.commit(world.now_ms)
    with pytest.raises(CorruptStore, match=LATER_LEVEL):
        world.restart()


def test_a_snapshot_of_a_later_level_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log behind a snapshot may not have the item any more."""
    monkeypatch.setattr("tidemill.broker.engine.metadata.catalog.FEATURE_LEVEL", FEATURE_LEVEL + 1)
    world = World(feature_level=FEATURE_LEVEL + 1)
    for _ in world.engine.checkpoints.write():
        pass
    monkeypatch.undo()
    with pytest.raises(CorruptStore, match=LATER_LEVEL):
        world.restart()
