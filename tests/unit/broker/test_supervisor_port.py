"""The messages of a broker to its supervisor."""

from __future__ import annotations

import socket

from tidemill.broker.controller_link.frames import FrameReader
from tidemill.broker.controller_link.port import ReplicaIntroduction, ReplicaStatus, SupervisorPort
from tidemill.common.replica_group import ReplicaId, ReplicaRun, ReplicationView
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire

ME = ReplicaRun(ReplicaId(0), "run-1")


class Replica:
    """A replica that has opened its store."""

    def introduction(self) -> ReplicaIntroduction:
        return ReplicaIntroduction(ME, "store-1", "10.0.0.1:10911", is_clean=True)

    def learn(self, view: ReplicationView) -> None:
        raise AssertionError("there is no view yet")

    def note_rejection(self, version: int) -> None:
        raise AssertionError("there is no proposal")

    def hand_over(self, target: ReplicaId | None) -> bool:
        raise AssertionError("there is no request")

    def status(self) -> ReplicaStatus:
        return ReplicaStatus(
            is_master=False,
            epoch_seen=0,
            version_seen=0,
            log_epoch=3,
            log_end=1_000,
            durable_end=1_000,
            confirm=0,
            blocked_ms=0,
            peer_silence_ms={},
        )


def test_a_replica_reports_its_state_together_with_its_registration() -> None:
    """A controller elects it after the first heartbeat, so this one does not wait for a period."""
    ours, theirs = socket.socketpair()
    with ours:
        port = SupervisorPort(theirs.detach())
        port.attach(Replica())
        messages = [
            wire.SessionUp.FromString(one) for one in FrameReader().receive(ours.recv(4096))
        ]
        port._socket.close()
    register, beat = messages
    assert register.register.member.incarnation == ME.incarnation
    assert (beat.heartbeat.log_epoch, beat.heartbeat.log_end) == (3, 1_000)
