"""What a replica reports of its master: since when it has heard a word of it, and no less."""

from __future__ import annotations

from tests.support.worlds.engine_group import Group
from tidemill.broker.engine.replication.actions import StreamDial

FROZEN_MS = 5_000
STEP_MS = 50


def test_an_accepted_connection_does_not_count_as_a_sign_of_life() -> None:
    """Its kernel accepts, also while the process stands still."""
    group = Group()
    group.elect(0)
    group.set_members(0, 1, 2)
    group.settle()
    replica, began_ms, dialled = group.nodes[1].replication, group.now_ms, 0
    silent_ms = replica.peer_silence_ms(began_ms)[group.nodes[0].me.replica_id]
    for now_ms in range(began_ms, began_ms + FROZEN_MS, STEP_MS):
        replica.tick(now_ms)
        for action in replica.take_actions():
            if isinstance(action, StreamDial):
                dialled += 1
                replica.handle_connected(1_000 + dialled, now_ms)
        found = replica.peer_silence_ms(now_ms)[group.nodes[0].me.replica_id]
        assert found == silent_ms + now_ms - began_ms
    assert dialled > 1


def test_of_a_master_that_has_said_nothing_in_its_epoch_nothing_is_reported() -> None:
    group = Group()
    group.elect(0)
    group.set_members(0, 1, 2)
    group.cut_off.add(2)
    group.elect(1, 0, 1, 2)
    group.nodes[2].replication.learn(group.view, group.now_ms)
    assert group.nodes[2].replication.peer_silence_ms(group.now_ms) == {}
