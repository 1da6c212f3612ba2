"""The phases of a replica: every pair of phase and change, against the transition table."""

from __future__ import annotations

import itertools
from zlib import crc32

import pytest

from tests.unit.engine.replication.test_machines import Log, run, view
from tidemill.broker.engine.replication.config import ReplicationConfig
from tidemill.broker.engine.replication.epoch_journal import CommonPrefix, EpochEntry, LogExtent
from tidemill.broker.engine.replication.messages import Digest, Welcome
from tidemill.broker.engine.replication.replica import Replica
from tidemill.broker.engine.replication.replica_phases import TRANSITIONS, PhaseChange, ReplicaPhase

CONFIG = ReplicationConfig()
LATER_MS = CONFIG.dial_longest_ms
TO_PHASE = {
    ReplicaPhase.DISCONNECTED: [],
    ReplicaPhase.DIALLING: [PhaseChange.DIAL],
    ReplicaPhase.GREETING: [PhaseChange.DIAL, PhaseChange.CONNECT],
    ReplicaPhase.FOLLOWING: [PhaseChange.DIAL, PhaseChange.CONNECT, PhaseChange.JOIN],
    ReplicaPhase.DIVERGED: [PhaseChange.DIAL, PhaseChange.CONNECT, PhaseChange.DIVERGE],
}


def welcome(data: bytes) -> Welcome:
    """Return the Welcome of a master whose log has `data` before the common end."""
    extent = LogExtent((EpochEntry(1, 0),), 0, 1)
    return Welcome(1, run(0), CommonPrefix(1), Digest(0, 1, crc32(data)), extent, 0)


def cause(replica: Replica, change: PhaseChange) -> None:
    """Bring about an event of the kind `change`."""
    match change:
        case PhaseChange.DIAL:
            replica.tick(LATER_MS)
        case PhaseChange.CONNECT:
            replica.handle_connected(7, LATER_MS)
        case PhaseChange.JOIN:
            replica.handle_welcome(welcome(b"\1"), LATER_MS)
        case PhaseChange.DIVERGE:
            replica.handle_welcome(welcome(b"\2"), LATER_MS)
        case PhaseChange.DISCONNECT:
            replica.handle_closed(0)
        case PhaseChange.RELEASE:
            replica.learn(view(version=2, sss=(0, 2)), 0)


def replica_in(phase: ReplicaPhase) -> Replica:
    log = Log(b"\1", (EpochEntry(1, 0),))
    replica = Replica(run(1), "broker-0", "store", log, view(), CONFIG, 0)
    for change in TO_PHASE[phase]:
        cause(replica, change)
    assert replica.phase is phase
    return replica


@pytest.mark.parametrize(("phase", "change"), list(itertools.product(ReplicaPhase, PhaseChange)))
def test_each_event_changes_the_phase_as_in_the_table(
    phase: ReplicaPhase, change: PhaseChange
) -> None:
    replica = replica_in(phase)
    cause(replica, change)
    assert replica.phase is TRANSITIONS[change].get(phase, phase)


@pytest.mark.parametrize(("state_floor", "is_needed"), [(1, True), (2, False), (2, True)])
def test_a_needed_log_that_ends_before_the_state_floor_is_not_emptied(
    state_floor: int, is_needed: bool
) -> None:
    replica = replica_in(ReplicaPhase.GREETING)
    replica.view = view(sss=(0, 1) if is_needed else (0, 2))
    log = replica._log
    assert isinstance(log, Log)
    message = welcome(b"\1")
    replica.handle_welcome(
        message._replace(extent=message.extent._replace(state_floor=state_floor)), LATER_MS
    )
    is_refused = is_needed and state_floor > log.log_end
    assert replica.phase is (ReplicaPhase.DIVERGED if is_refused else ReplicaPhase.FOLLOWING)
    assert bool(log.floors) is not is_refused
