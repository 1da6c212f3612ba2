"""Steps that add, remove and replace pods, against a model of Kubernetes."""

from __future__ import annotations

import pytest

from tests.support.worlds.replica_records import member_of
from tidemill.common.replica_group import ReplicaId
from tidemill.controller.election.elect import with_master
from tidemill.controller.election.membership import ChangeRejection
from tidemill.controller.election.record import GroupRecord, RegisteredRun, Retirement
from tidemill.controller.election.retirement import (
    find_leaver,
    forget,
    retire,
    with_number,
    without,
)
from tidemill.controller.pods import (
    MasterMove,
    PodReplacement,
    PodResize,
    PodStep,
    PodWait,
    StatefulSetPods,
    next_step,
)

STEPS_MAX = 100


def record_of(count: int, *, master: int = 0, out: tuple[int, ...] = ()) -> GroupRecord:
    members = [member_of(n) for n in range(count)]
    return GroupRecord(
        min_in_sync=2,
        epoch=3,
        version=7,
        master=members[master],
        sss=frozenset(one for one in members if one.replica_id not in out),
        replicas=tuple(
            (one.replica_id, RegisteredRun(f"store {n}", one.incarnation, f"host-{n}", False))
            for n, one in enumerate(members)
        ),
    )


def pods(
    replicas: int,
    partition: int | None = None,
    *,
    updated: int | None = None,
    ready: int | None = None,
    is_seen: bool = True,
) -> StatefulSetPods:
    """Return pods without a change, or with `updated` pods of a new template."""
    return StatefulSetPods(
        replicas=replicas,
        partition=replicas if partition is None else partition,
        ready=replicas if ready is None else ready,
        is_seen=is_seen,
        updated=replicas if updated is None else updated,
        is_changing=updated is not None,
    )


class Kubernetes:
    """A StatefulSet and its pods, with the record that controllers change."""

    def __init__(self, count: int, *, master: int = 0) -> None:
        self.replicas = self.partition = count
        self.revisions = [1] * count
        self.template = 1
        self.record = record_of(count, master=master)
        self.transfers = 0
        self.replaced: list[int] = []

    @property
    def pods(self) -> StatefulSetPods:
        updated = sum(one == self.template for one in self.revisions)
        is_changing = any(one != self.template for one in self.revisions)
        return StatefulSetPods(
            self.replicas, self.partition, len(self.revisions), updated, True, is_changing
        )

    def do(self, step: PodStep) -> None:
        match step:
            case PodResize(replicas, partition):
                assert abs(replicas - self.replicas) <= 1 or replicas > self.replicas
                self.replicas, self.partition = replicas, partition
            case PodReplacement(partition):
                assert partition == min(self.partition, self.replicas) - 1, "one at a time"
                self.partition = partition
            case MasterMove(target):
                self.transfers += 1
                moved = member_of(target)
                self.record = with_master(self.record, moved, self.record.sss, reason="moved")
            case PodWait():
                pass
        self._turn()

    def _turn(self) -> None:
        """Let Kubernetes and the replicas process the step."""
        assert len(self.record.sss) >= 2, "no window below the minimum"
        for deleted in range(self.replicas, len(self.revisions)):
            assert self.record.master != member_of(deleted), "a master's pod stays"
            assert member_of(deleted) not in self.record.sss
        self.revisions = self.revisions[: self.replicas]
        while len(self.revisions) < self.replicas:
            new = len(self.revisions)
            self.revisions.append(self.template if new >= self.partition else 1)
            self.record = self.record.with_replica(
                ReplicaId(new), RegisteredRun(f"store {new}", member_of(new).incarnation, "", False)
            )
            self.record = self.record._replace(sss=self.record.sss | {member_of(new)})
        for ordinal in reversed(range(self.partition, self.replicas)):
            if self.revisions[ordinal] != self.template:
                assert self.record.master != member_of(ordinal), "the master hands over first"
                self.revisions[ordinal] = self.template
                self.replaced.append(ordinal)

    def controller(self, spec_replicas: int) -> None:
        leaver = find_leaver(self.record)
        after = without(self.record, leaver) if leaver else with_number(self.record, spec_replicas)
        assert not isinstance(after, ChangeRejection)
        self.record = after
        retired = [id_ for id_, one in self.record.replicas if one.retired is not Retirement.NO]
        if self.record.master is not None and self.record.master.replica_id in retired:
            self.do(MasterMove(ReplicaId(0)))
        for id_ in retired:
            if id_ >= self.replicas:
                forgotten = forget(self.record, id_)
                assert not isinstance(forgotten, ChangeRejection)
                self.record = forgotten

    def run(self, *, spec_replicas: int) -> None:
        for _ in range(STEPS_MAX):
            self.controller(spec_replicas)
            step = next_step(self.pods, spec_replicas=spec_replicas, record=self.record)
            if step == PodWait() and self.replicas == spec_replicas:
                return
            self.do(step)
        raise AssertionError("the steps do not end")


@pytest.mark.parametrize("master", range(3))
def test_an_upgrade_replaces_pods_in_turn_and_moves_the_master_first(master: int) -> None:
    world = Kubernetes(3, master=master)
    world.template = 2
    world.run(spec_replicas=3)
    assert world.replaced == [2, 1, 0]
    assert world.revisions == [2, 2, 2]
    assert world.partition == 3  # protects all pods from the next template
    # Master 2 hands over first, to a pod that is not replaced yet, and so a second time.
    assert world.transfers == (2 if master == 2 else 1)


@pytest.mark.parametrize("master", range(5))
def test_a_group_gets_more_and_fewer_replicas(master: int) -> None:
    world = Kubernetes(5, master=master)
    world.run(spec_replicas=3)
    assert [id_ for id_, _ in world.record.replicas] == [0, 1, 2]
    assert len(world.record.sss) == 3
    world.run(spec_replicas=5)
    assert len(world.record.sss) == 5
    assert world.partition == 5


def test_no_pod_is_replaced_while_another_is_not_ready_or_not_in_sync() -> None:
    starting = pods(3, 2, updated=1, ready=2)
    assert next_step(starting, spec_replicas=3, record=record_of(3)) == PodWait(
        "2 of 3 pods are ready"
    )
    behind = record_of(3, out=(2,))
    assert next_step(pods(3, 2, updated=1), spec_replicas=3, record=behind) == PodWait(
        "replica 2 is not in sync"
    )
    replacing = pods(3, 2, updated=0)
    assert next_step(replacing, spec_replicas=3, record=record_of(3)) == PodWait(
        "pod 2 is being replaced"
    )


def test_pods_are_replaced_if_they_are_not_in_sync_or_no_message_is_confirmed() -> None:
    broken = pods(3, 3, updated=0, ready=2)
    assert next_step(broken, spec_replicas=3, record=record_of(3, out=(2,))) == PodReplacement(2)
    alone = record_of(3, out=(1, 2))
    assert next_step(broken, spec_replicas=3, record=alone) == PodReplacement(2)
    last = pods(3, 1, updated=2, ready=1)
    assert next_step(last, spec_replicas=3, record=alone) == PodReplacement(0)


def test_the_master_moves_to_a_pod_that_is_already_replaced() -> None:
    replacing = pods(3, 1, updated=2)
    record = record_of(3, master=0)
    assert next_step(replacing, spec_replicas=3, record=record) == MasterMove(ReplicaId(1))
    drained = retire(record, ReplicaId(1), Retirement.DRAINED)
    assert isinstance(drained, GroupRecord)
    assert next_step(replacing, spec_replicas=3, record=drained) == MasterMove(ReplicaId(2))


def test_the_master_moves_to_no_pod_that_ends() -> None:
    record = record_of(3, master=0)
    replacing = pods(3, 1, updated=2)._replace(ending=frozenset({ReplicaId(1)}))
    assert next_step(replacing, spec_replicas=3, record=record) == MasterMove(ReplicaId(2))
    replacing = replacing._replace(ending=frozenset({ReplicaId(1), ReplicaId(2)}))
    assert next_step(replacing, spec_replicas=3, record=record) == PodWait(
        "pod 1 ends, so the master stays until another pod is ready"
    )


def test_a_needed_pod_stays_with_a_reason_for_people() -> None:
    step = next_step(pods(3), spec_replicas=2, record=record_of(3, out=(1,)))
    assert isinstance(step, PodWait)
    assert "replica 2 cannot be removed yet: 1 of the other replicas in sync" in step.why
    # A pod that has not registered is not needed.
    assert next_step(pods(4), spec_replicas=3, record=record_of(3)) == PodResize(3, 3)


def test_no_step_is_taken_before_kubernetes_has_processed_a_template() -> None:
    assert next_step(pods(3, is_seen=False), spec_replicas=3, record=record_of(3)) == PodWait()
    new = pods(3, 3, updated=3, is_seen=False)
    assert next_step(new, spec_replicas=3, record=record_of(3)) == PodWait()


def test_a_group_gets_its_pods_before_it_is_founded() -> None:
    assert next_step(pods(1, 0), spec_replicas=3, record=None) == PodResize(3, 3)
    assert next_step(pods(3, 0), spec_replicas=3, record=None) == PodResize(3, 3)
    assert next_step(pods(3), spec_replicas=3, record=None) == PodWait()


def test_one_replica_founds_the_group_before_others_join() -> None:
    """More pods would start beside it, and clients wait for it alone."""
    unseen = pods(1, 1, is_seen=False)
    assert next_step(unseen, spec_replicas=3, record=None) == PodWait()
    standing = pods(1, 1, updated=0)
    assert next_step(standing, spec_replicas=3, record=None) == PodReplacement(0)
    ending = pods(1, 0, updated=0, ready=0)
    assert next_step(ending, spec_replicas=3, record=None) == PodWait(
        "the last pod is being replaced"
    )
    assert next_step(pods(1, 0), spec_replicas=3, record=record_of(1)) == PodResize(3, 3)
