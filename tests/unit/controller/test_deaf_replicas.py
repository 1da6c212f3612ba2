"""Reports of live replicas that cannot work together."""

from __future__ import annotations

from tests.unit.controller.test_election import BEAT, record
from tidemill.common.replica_group import ReplicaId, ReplicaRun
from tidemill.controller.election.elect import Candidate
from tidemill.controller.election.partitions import UNHEARD_MS, diverged_of, unheard_of
from tidemill.controller.election.sessions import Heartbeat

HEARD, SILENT = UNHEARD_MS, UNHEARD_MS + 1


def live(*beats: Heartbeat) -> list[Candidate]:
    """Return live replicas from 0 on; 0 is the master."""
    group = record()
    found = []
    for number, beat in enumerate(beats):
        registered = group.find(ReplicaId(number))
        assert registered is not None
        found.append(Candidate(ReplicaRun(ReplicaId(number), registered.incarnation), beat))
    return found


def hears(**silence_ms: int) -> Heartbeat:
    """Return the heartbeat of a replica with the silence of its peers: `of_1=20`."""
    heard = tuple((ReplicaId(int(one[-1])), ms) for one, ms in silence_ms.items())
    return BEAT._replace(peer_silence_ms=heard)


def test_replicas_that_reach_each_other_are_not_reported() -> None:
    beats = hears(of_1=HEARD, of_2=20), hears(of_0=20, of_2=HEARD), hears(of_0=20, of_1=20)
    assert not unheard_of(record(), live(*beats))


def test_silence_is_reported_in_each_direction() -> None:
    beats = hears(of_1=20, of_2=20), hears(of_0=SILENT, of_2=20), hears(of_0=20, of_1=SILENT)
    assert unheard_of(record(), live(*beats)) == {(1, 0), (2, 1)}


def test_a_follower_without_a_stream_is_reported_but_a_dead_one_is_not() -> None:
    beats = hears(of_2=20), hears(of_2=20), hears(of_0=20)
    # Replica 1 and 2 have not probed each other yet.
    assert unheard_of(record(), live(*beats)) == {(0, 1), (1, 0)}
    assert not unheard_of(record(), live(hears(of_2=SILENT)))


def test_a_diverged_log_is_reported_once_and_not_as_silence() -> None:
    known = hears(of_1=20)._replace(diverged=frozenset({ReplicaId(2)}))
    beats = live(known, hears(of_0=20), BEAT)
    assert diverged_of(beats) == {2}
    assert not unheard_of(record(), beats)
    assert not diverged_of(live(BEAT, BEAT))
