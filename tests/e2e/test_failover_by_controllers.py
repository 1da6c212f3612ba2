"""A controller and three replicas, as processes: who is master when one dies or stands still.

What clients see of it, and that nothing is lost, is for other tests.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.controlled_group import ControlledGroup, controlled_group


@pytest.fixture
def group(tmp_path: Path) -> Iterator[ControlledGroup]:
    with controlled_group(tmp_path) as running:
        running.await_in_sync()
        yield running


def test_a_master_that_is_killed_is_replaced_and_comes_back_as_a_replica(
    group: ControlledGroup,
) -> None:
    before = group.group()
    assert before.view.master.replica_id == 0
    os.kill(group.replicas[0].broker_pid, signal.SIGKILL)
    after = group.await_group(lambda found: found.view.epoch == 2)
    assert after.view.master.replica_id in (1, 2)
    assert [one.reason for one in after.history] == ["founded", "its process has ended"]
    # Its supervisor has started it again.
    whole = group.await_in_sync()
    assert whole.view.epoch == 2
    assert whole.view.master == after.view.master


def test_a_master_that_is_stopped_hands_over_first(group: ControlledGroup) -> None:
    assert group.replicas[0].stop() == 0
    after = group.await_group(lambda found: found.view.epoch == 2)
    assert [one.reason for one in after.history] == ["founded", "handed over"]
    group.start_replica(0)
    group.await_in_sync()


def test_an_operator_moves_the_master(group: ControlledGroup) -> None:
    group.transfer(2)
    after = group.await_group(lambda found: found.view.epoch == 2)
    assert after.view.master.replica_id == 2
    assert after.history[-1].reason == "handed over"
    group.await_in_sync()


def test_a_master_that_stands_still_is_replaced_while_its_supervisor_is_heard(
    group: ControlledGroup,
) -> None:
    broker = group.replicas[0].broker_pid
    os.kill(broker, signal.SIGSTOP)
    after = group.await_group(lambda found: found.view.epoch == 2)
    assert after.history[-1].reason == "it does not turn"
    os.kill(broker, signal.SIGCONT)
    whole = group.await_in_sync()
    assert whole.view.epoch == 2  # It did not lead again.


def test_replicas_go_on_without_controllers_and_are_known_to_the_next_one(
    group: ControlledGroup,
) -> None:
    before = group.group()
    address = group.controller.grpc
    group.controller.end()
    group.controller = group.start_controller(address.rpartition(":")[2])
    after = group.await_group(
        lambda found: all(one.HasField("heartbeat") for one in found.replicas)
    )
    # Nothing was decided: the same epoch, and the same runs.
    assert after.view == before.view
    os.kill(group.replicas[0].broker_pid, signal.SIGKILL)
    group.await_group(lambda found: found.view.epoch == 2)


def test_replicas_that_run_on_are_led_again_when_the_record_was_lost(
    group: ControlledGroup,
) -> None:
    group.transfer(1)
    group.await_group(lambda found: found.view.epoch == 2)
    before = group.await_in_sync()
    address = group.controller.grpc
    group.controller.end()
    for file in group.folder.glob("groups.sqlite*"):
        file.unlink()
    group.controller = group.start_controller(address.rpartition(":")[2])
    # All of them come again by themselves, and nobody is made master by a guess.
    alarmed = group.await_group(
        lambda found: len(found.replicas) == 3 and "have seen epoch 2" in found.alarm
    )
    assert "tidemill cluster replace" in alarmed.alarm
    assert alarmed.view.epoch == 0
    group.force(1)
    after = group.await_in_sync()
    assert (after.view.epoch, after.view.master.replica_id) == (3, 1)
    assert after.view.version > before.view.version
