"""The messages of a broker to its supervisor."""

from __future__ import annotations

import socket

from tidemill.broker.controller_link.frames import FrameReader
from tidemill.broker.controller_link.port import ReplicaIntroduction, ReplicaStatus, SupervisorPort
from tidemill.common.replica_group import Proposal, ReplicaId, ReplicaRun, ReplicationView
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire

ME = ReplicaRun(ReplicaId(0), "run-1")


class Replica:
    """A replica that has opened its store."""

    def introduction(self) -> ReplicaIntroduction:
        return ReplicaIntroduction(ME, "store-1", "10.0.0.1:10911", is_clean=True)

    def learn(self, view: ReplicationView) -> None:
        raise AssertionError("there is no view yet")

    def note_acceptance(self, version: int) -> None:
        raise AssertionError("there is no proposal")

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


class Proposer(Replica):
    """A replica that records the answers to its proposals."""

    def __init__(self) -> None:
        self.answers: list[str] = []

    def note_acceptance(self, version: int) -> None:
        self.answers.append(f"accepted {version}")

    def note_rejection(self, version: int) -> None:
        self.answers.append(f"rejected {version}")


def test_a_replica_learns_the_answer_to_its_last_proposal_only() -> None:
    replica = Proposer()
    ours, theirs = socket.socketpair()
    with ours:
        port = SupervisorPort(theirs.detach())
        port.attach(replica)
        for version in (7, 8, 9):
            port.propose(Proposal(3, version, ME, frozenset({ME})))
            port.propose(Proposal(3, version, ME, frozenset({ME})))
            sent = [
                wire.SessionUp.FromString(one) for one in FrameReader().receive(ours.recv(4096))
            ]
            for up in sent[-2:]:
                answer = wire.Answer(number=up.number)
                if version == 8:
                    answer.refused = "another version"
                elif version == 9:
                    answer.unavailable = "later"
                else:
                    answer.done.SetInParent()
                port._receive(wire.SessionDown(answer=answer))
        port._socket.close()
    assert replica.answers == ["accepted 7", "rejected 8"]
