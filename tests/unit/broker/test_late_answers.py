"""Controllers that answer late: the supervisor asks others, and still passes the answer on."""

from __future__ import annotations

import pytest

from tests.unit.broker.test_controller_sessions import World
from tests.unit.engine.replication.test_machines import run, view
from tidemill.broker.engine.replication.config import ReplicationConfig
from tidemill.broker.engine.replication.sync_state import SyncState
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire

DOUBT_MS_MAX = 60_000


@pytest.mark.parametrize("answer_ms", [800, 1_200, 1_800])
@pytest.mark.parametrize("controllers", [1, 2])
def test_slow_controllers_end_a_doubt(answer_ms: int, controllers: int) -> None:
    """Each answer takes this long, and each controller answers one request after the other."""
    world = World(2)
    world.registered()
    if controllers == 1:
        world.sessions.note_disconnection(1)
    state = SyncState(
        run(0), view(sss=(0, 1)), ReplicationConfig(), epoch_start_end=1, confirm=1, now_ms=0
    )
    state.doubt(0)
    number, versions = 100, dict[int, int]()  # of the last proposal, as the port knows it
    waiting: dict[int, list[tuple[int, int]]] = {0: [], 1: []}  # by controller: time and number
    while state.is_doubtful and world.now_ms < DOUBT_MS_MAX:
        world.pass_ms(10)
        proposal = state.tick(10, world.now_ms)
        if proposal is not None:
            number += 1
            versions = {number: proposal.version}
            world.say(wire.SessionUp(number=number, proposal=wire.Proposal()))
        for controller, up in world.take():
            if up.WhichOneof("message") == "proposal":
                busy_until_ms = waiting[controller][-1][0] if waiting[controller] else 0
                at_ms = max(busy_until_ms, world.now_ms) + answer_ms
                waiting[controller].append((at_ms, up.number))
        for controller, queue in waiting.items():
            while queue and queue[0][0] <= world.now_ms:
                world.answer(controller, queue.pop(0)[1], "done")
        world.take()
        for down in world.to_broker:
            if down.WhichOneof("message") == "answer" and down.answer.number in versions:
                state.handle_acceptance(versions.pop(down.answer.number))
        world.to_broker.clear()
    assert not state.is_doubtful
