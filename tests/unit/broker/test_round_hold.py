"""The hold of rounds at a master that can confirm nothing, and the rejections after it."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from tests.support.worlds.engine_world import World
from tests.unit.engine.replication.test_machines import Pair, view
from tidemill.broker.engine.replication.actions import SetProposal
from tidemill.broker.engine.replication.config import AckMode
from tidemill.broker.server.replicas.round_hold import SHORT_HOLD_MS, RoundHold
from tidemill.common.errors import TooFewInSync


def master_alone() -> Pair:
    """A master that is the only member of its set, and confirms what it writes."""
    pair = Pair(AckMode.SYNC_MEMORY)
    pair.learn(view(sss=(0,))._replace(min_in_sync=1))
    return pair


def test_a_master_in_doubt_rejects_messages_after_the_hold_and_says_why() -> None:
    pair, world = master_alone(), World()
    hold = RoundHold(world.engine.commands)
    assert not hold.update(pair.master.master, pair.now_ms)
    pair.now_ms += 1_001  # longer than a stream may be silent
    pair.master.tick(pair.now_ms)
    with capture_logs() as lines:
        assert hold.update(pair.master.master, pair.now_ms)
        world.engine.commands.check_sends()
        pair.now_ms += SHORT_HOLD_MS
        reported: list[str] = []
        hold.on_rejection = reported.append
        assert not hold.update(pair.master.master, pair.now_ms)
        [why] = reported
        assert why.startswith("its master stood still")
        with pytest.raises(TooFewInSync, match="its master stood still"):
            world.engine.commands.check_sends()
        assert hold.take_end(pair.master.master, pair.now_ms)
    assert [line["event"] for line in lines] == [
        "messages are rejected, because none can be confirmed"
    ]


def test_messages_are_accepted_again_when_the_controllers_end_the_doubt() -> None:
    pair, world = master_alone(), World()
    hold = RoundHold(world.engine.commands)
    pair.now_ms += 1_001
    for _ in range(0, SHORT_HOLD_MS + 500, 500):
        pair.master.tick(pair.now_ms)
        hold.update(pair.master.master, pair.now_ms)
        pair.now_ms += 500
    pair.master.take_actions()
    with pytest.raises(TooFewInSync):
        world.engine.commands.check_sends()
    while world.engine.commands.why_unconfirmed and pair.now_ms < 10_000:
        pair.now_ms += 500
        pair.master.tick(pair.now_ms)
        for action in pair.master.take_actions():
            if isinstance(action, SetProposal):
                pair.master.handle_acceptance(action.proposal.version, pair.now_ms)
        hold.update(pair.master.master, pair.now_ms)
    world.engine.commands.check_sends()
    assert not hold.update(pair.master.master, pair.now_ms)


def test_too_few_replicas_are_named_and_messages_accepted_when_one_is_back() -> None:
    pair, world = Pair(AckMode.SYNC_MEMORY), World()
    pair.learn(view(sss=(0,)))
    hold = RoundHold(world.engine.commands)
    for _ in range(0, SHORT_HOLD_MS, 500):
        assert hold.update(pair.master.master, pair.now_ms)
        world.engine.commands.check_sends()
        pair.now_ms += 500
        pair.master.tick(pair.now_ms)
    hold.update(pair.master.master, pair.now_ms)
    with pytest.raises(TooFewInSync, match="too few replicas are in sync"):
        world.engine.commands.check_sends()
    pair.learn(view(version=2, sss=(0, 1)))
    with capture_logs() as lines:
        hold.update(pair.master.master, pair.now_ms)
    world.engine.commands.check_sends()
    assert [line["event"] for line in lines] == ["messages are accepted again"]


def test_each_hold_has_its_whole_time() -> None:
    pair, world = Pair(AckMode.SYNC_MEMORY), World()
    hold = RoundHold(world.engine.commands)
    for number in range(2):
        pair.learn(view(version=2 * number + 1, sss=(0,)))
        for _ in range(0, SHORT_HOLD_MS, 500):
            assert hold.update(pair.master.master, pair.now_ms)
            pair.now_ms += 500
            pair.master.tick(pair.now_ms)
        pair.learn(view(version=2 * number + 2, sss=(0, 1)))
        assert not hold.update(pair.master.master, pair.now_ms)


def test_a_rejection_names_the_present_reason() -> None:
    pair, world = Pair(AckMode.SYNC_MEMORY), World()
    hold = RoundHold(world.engine.commands)
    pair.now_ms += 1_001  # longer than a stream may be silent
    pair.master.tick(pair.now_ms)
    reasons = []
    for recorded in (view(version=2, sss=(0,)), view(version=3, sss=(0, 1))):
        pair.learn(recorded)
        hold.update(pair.master.master, pair.now_ms)
        pair.now_ms += SHORT_HOLD_MS
        hold.update(pair.master.master, pair.now_ms)
        reasons.append(world.engine.commands.why_unconfirmed)
    assert ["too few" in reasons[0], "stood still" in reasons[1]] == [True, True]
