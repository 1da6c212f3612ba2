"""The offline tools read stores with settled dead letters: a check is clean, a copy has all."""

from __future__ import annotations

from random import Random

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.worlds.engine_world import TOPIC
from tests.support.worlds.letter_world import LetterWorld
from tests.unit.offline.test_packed_stores import checked
from tidemill.broker.offline.copy import copy


def test_a_store_with_settled_dead_letters_is_sound_and_its_copy_has_the_states() -> None:
    for has_snapshot in (False, True):
        world = LetterWorld()
        world.topic(TOPIC)
        world.dead("a", "b", "c")
        world.replay(0)
        world.discard(1)
        if has_snapshot:
            world.checkpoint()
        assert checked(world).findings == []
        target = FaultyDisk(Random(1))
        for _ in copy(world.disk, target):
            pass
        again = LetterWorld(target, config=world.config, now_ms=world.now_ms)
        assert again.states() == ["REPLAYED", "DISCARDED", "OPEN"]
        assert again.bodies() == ["a"]
