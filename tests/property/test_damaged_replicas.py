"""A flipped bit in one replica's log, and a restart of the group: no confirmed message is lost.

If a replica's log is damaged below its acked offset, the replica does not open, or it reports in
its registration that records may be missing. It must never take later records for a torn tail, be
elected, and let the other replicas cut the lost records (F-4, F-26; rows 24 and 25 of the faults).
"""

from __future__ import annotations

from random import Random

import pytest

from tests.support.seeds import seeds
from tests.support.worlds.engine_group import MARK_MS, Group, Node
from tidemill.broker.engine.store.segment import CorruptStore
from tidemill.common.replica_group import ReplicaId
from tidemill.controller.election.decide import RecordWrite, decide
from tidemill.controller.election.record import GroupRecord, RegisteredRun, Transition, view_of
from tidemill.controller.election.registration import Registration, register
from tidemill.controller.election.sessions import (
    ElectionTiming,
    Heartbeat,
    ReplicaHealth,
    ReplicaSessions,
)

STORE = "s"


@pytest.mark.parametrize("seed", seeds("damaged replicas", 24))
@pytest.mark.parametrize("how", ["killed", "power cut"])
def test_a_flipped_bit_loses_no_confirmed_message(how: str, seed: int) -> None:
    random, is_power_cut = Random(seed), how == "power cut"
    group = Group()
    group.elect(0)
    group.set_members(0, 1, 2)
    answered: list[str] = []
    for number in range(random.randint(4, 12)):
        texts = [f"{number}-{n}" for n in range(random.randint(1, 9))]
        group.send(*texts, size=random.choice((0, 300)))
        group.settle(random.choice((50, 200, 1_200)))
        master = group.nodes[0]
        if master.log.confirm_offset == master.log.log_end:
            answered += texts
    if random.random() < 0.5:
        group.settle(2 * MARK_MS)  # The group was idle for a while.
    victim = random.choice(group.nodes)
    # After a power cut, damage in the newest records looks like a torn tail, because the mark does
    # not cover them yet.
    end = victim.log.files.known_end._mark.durable if is_power_cut else victim.log.durable_offset
    if not end:
        return
    for node in group.nodes:
        group.kill(node.number, power_cut=is_power_cut)
    name = max(one for one in victim.disk.all_names() if one.startswith("log/0"))
    start = int(name.removeprefix("log/").partition(".")[0])
    if start >= end:
        return
    victim.disk.damage(name, random.randrange(end - start), bits=1 << random.randrange(8))
    restart(group, random.sample(group.nodes, 3))
    up = [node for node in group.nodes if node.is_up]
    assert len(up) >= 2, "the other replicas continue"
    group.set_members(*(node.number for node in up))
    group.settle(2_000)
    for node in up:
        found = set(node.bodies())
        lost = [text for text in answered if text not in found]
        assert not lost, f"replica {node.number} lacks {lost}; {victim.number} was damaged"
        assert not node.diverged


def restart(group: Group, nodes: list[Node]) -> None:
    """Start replicas one after the other, with the controller's own functions."""
    members = {node.me.replica_id: node.me for node in group.nodes}
    record = GroupRecord(
        min_in_sync=2,
        epoch=group.view.epoch,
        version=group.view.version,
        master=group.view.master,
        sss=group.view.sss,
        replicas=tuple(
            (id_, RegisteredRun(STORE, one.incarnation, f"h{id_}:1", is_unclean=False))
            for id_, one in sorted(members.items())
        ),
        history=(Transition(1, None, ReplicaId(0), "founded", 0, 0),),
    )
    timing, sessions, now_ms = ElectionTiming(), ReplicaSessions(ElectionTiming()), 0
    sessions.note_record(record, now_ms)
    for node in nodes:
        before = members[node.me.replica_id].incarnation
        try:
            node.start()
        except CorruptStore:
            node.is_up = False
            continue
        asked = Registration(
            node.me,
            before,
            STORE,
            f"h{node.number}:1",
            is_clean=not node.log.files.known_end.is_doubtful,
        )
        after = register(record, asked)
        assert isinstance(after, GroupRecord)
        record = after
        now_ms += timing.session_timeout_ms + 1
        for one in group.nodes:
            if one.is_up:
                sessions.note_heartbeat(one.me, beat_of(one), now_ms)
        intent = decide(record, sessions.observe(rank=0, now_ms=now_ms), timing)
        if isinstance(intent, RecordWrite):
            record = intent.record
        group.view = view_of(record)
        group.share_view()
        group.settle(200)


def beat_of(node: Node) -> Heartbeat:
    log = node.log
    epoch = max((entry.epoch for entry in log.journal if entry.start < log.log_end), default=0)
    return Heartbeat(
        False,
        log.epoch_seen,
        1,
        epoch,
        log.log_end,
        log.durable_offset,
        log.confirm_offset,
        ReplicaHealth.OK,
        0,
    )
