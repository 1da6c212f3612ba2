"""A planned transfer refuses sends for a moment, and not for as long as somebody asks for it."""

from __future__ import annotations

from tests.support.worlds.engine_group import Group
from tidemill.broker.engine.replication.config import ReplicationConfig

CONFIG = ReplicationConfig()
STEP_MS = 50
ASKED_EVERY_MS = 500  # as a controller does


def group_of_three() -> Group:
    group = Group()
    group.elect(0)
    group.set_members(0, 1, 2)
    return group


def refused_ms(group: Group, duration_ms: int) -> int:
    """Let a controller ask for a transfer that nobody carries out; for how long none may send."""
    machine, refused = group.nodes[0].replication, 0
    for at_ms in range(0, duration_ms, STEP_MS):
        if at_ms % ASKED_EVERY_MS == 0:
            machine.hand_over(group.nodes[1].me.replica_id, group.now_ms)
        group.settle(STEP_MS)
        assert machine.master is not None
        refused += STEP_MS * (not machine.master.accepts_sends)
    return refused


def test_a_transfer_that_does_not_come_about_ends_however_often_it_is_asked_for() -> None:
    group = group_of_three()
    assert 0 < refused_ms(group, CONFIG.transfer_pause_ms) <= CONFIG.transfer_timeout_ms


def test_it_is_begun_again_after_a_pause() -> None:
    group = group_of_three()
    machine = group.nodes[0].replication
    refused_ms(group, CONFIG.transfer_timeout_ms + STEP_MS)
    assert not machine.hand_over(None, group.now_ms)
    group.settle(CONFIG.transfer_pause_ms)
    assert machine.hand_over(None, group.now_ms)


def test_it_ends_with_the_stream_of_its_target() -> None:
    group = group_of_three()
    machine = group.nodes[0].replication
    assert machine.hand_over(group.nodes[1].me.replica_id, group.now_ms)
    assert machine.master is not None
    assert not machine.master.accepts_sends
    group.kill(1)
    assert machine.master.accepts_sends
