"""A controller and three replicas, as processes: the master after a crash or a freeze.

Other tests cover the clients and lost messages. On a busy machine any master may seem down for a
second. So each test starts from the master at its begin and from the later history, and does not
compare epochs.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.controlled_group import (
    ControlledGroup,
    controlled_group,
    reasons_since,
)
from tidemill.controller.election.failure import Failure
from tidemill.controller.election.history import FOUNDED, HANDED_OVER


@pytest.fixture
def group(tmp_path: Path) -> Iterator[ControlledGroup]:
    with controlled_group(tmp_path) as running:
        running.await_in_sync()
        yield running


def test_a_master_that_is_killed_is_replaced_and_comes_back_as_a_replica(
    group: ControlledGroup,
) -> None:
    before = group.group()
    assert before.history[0].reason == FOUNDED
    killed = before.view.master
    os.kill(group.replicas[killed.replica_id].broker_pid, signal.SIGKILL)
    after = group.led_by_another(before)
    assert after.view.master.replica_id != killed.replica_id
    assert reasons_since(before, after)[0] == Failure.DIED.value
    # Its supervisor has started it again.
    whole = group.await_in_sync()
    again = next(one for one in whole.view.sss if one.replica_id == killed.replica_id)
    assert again != killed


def test_a_master_that_is_stopped_hands_over_first(group: ControlledGroup) -> None:
    before = group.group()
    stopped = before.view.master.replica_id
    assert group.replicas[stopped].stop() == 0
    after = group.led_by_another(before)
    assert reasons_since(before, after)[0] == HANDED_OVER
    group.start_replica(stopped)
    group.await_in_sync()


def test_an_operator_moves_the_master(group: ControlledGroup) -> None:
    before = group.group()
    target = (before.view.master.replica_id + 2) % 3
    after = group.move_master(target)
    assert reasons_since(before, after)[-1] == HANDED_OVER
    group.await_in_sync()


def test_a_frozen_master_is_replaced_although_its_supervisor_reports(
    group: ControlledGroup,
) -> None:
    before = group.group()
    master = before.view.master
    broker = group.replicas[master.replica_id].broker_pid
    os.kill(broker, signal.SIGSTOP)
    after = group.led_by_another(before)
    assert reasons_since(before, after)[0] == Failure.STALLED.value
    os.kill(broker, signal.SIGCONT)
    whole = group.await_in_sync()
    # The previous master follows. Only an election makes it master again.
    assert whole.view.master != master or whole.view.epoch > after.view.epoch
    assert master in whole.view.sss


def test_replicas_serve_without_controllers_and_register_with_the_next_one(
    group: ControlledGroup,
) -> None:
    before = group.group()
    address = group.controller.grpc
    group.controller.end()
    group.controller = group.start_controller(address.rpartition(":")[2])
    after = group.await_group(
        lambda found: all(one.HasField("heartbeat") for one in found.replicas)
    )
    # The controller did not found a new group: the runs are the same.
    runs = [{one.replica_id: one.incarnation for one in seen.replicas} for seen in (before, after)]
    assert runs[0] == runs[1]
    assert after.history[: len(before.history)] == before.history
    os.kill(group.replicas[after.view.master.replica_id].broker_pid, signal.SIGKILL)
    group.led_by_another(after)


def test_replicas_that_run_on_are_led_again_when_the_record_was_lost(
    group: ControlledGroup,
) -> None:
    group.move_master(1)
    before = group.await_in_sync()
    address = group.controller.grpc
    group.controller.end()
    for file in group.folder.glob("groups.sqlite*"):
        file.unlink()
    group.controller = group.start_controller(address.rpartition(":")[2])
    # All replicas connect again. The controller does not elect a master by a guess.
    alarmed = group.await_group(
        lambda found: len(found.replicas) == 3 and "replicas have seen epoch" in found.alarm
    )
    assert "tidemill broker-group transfer broker-0 --unclean" in alarmed.alarm
    assert alarmed.view.epoch == 0
    group.lead(1)
    after = group.await_in_sync()
    assert after.view.epoch > before.view.epoch
    assert after.view.version > before.view.version
    assert after.history[0].reason.startswith("an operator")
    assert after.history[0].target == 1
