"""A member of another broker group or cluster is rejected and changes nothing.

Addresses are given to others, and settings have slips: one such stream must not end a group.
"""

from __future__ import annotations

import pytest

from tests.support.worlds.engine_group import Group, Node
from tidemill.broker.engine.replication.actions import StreamSend
from tidemill.broker.engine.replication.epoch_journal import LogExtent
from tidemill.broker.engine.replication.messages import Hello, Refusal
from tidemill.common.replica_group import ReplicaId, ReplicaRun


def group_of_three() -> Group:
    group = Group()
    group.elect(0)
    group.set_members(0, 1, 2)
    return group


def answer(node: Node, hello: Hello) -> Refusal:
    node.replication.handle_hello(77, hello, 1_000_000)
    sent = [one.message for one in node.replication.take_actions() if isinstance(one, StreamSend)]
    (refusal,) = [message for message in sent if isinstance(message, Refusal)]
    return refusal


def hello_of(group: str, member: ReplicaRun, epoch_seen: int) -> Hello:
    return Hello(group, member, "store", epoch_seen, 1, LogExtent((), 0, 0), 0)


@pytest.mark.parametrize("name", ["other", "g"], ids=["another group", "the same name elsewhere"])
def test_a_stranger_with_a_later_epoch_ends_no_master(name: str) -> None:
    group = group_of_three()
    node = group.nodes[0]
    answer(node, hello_of(name, ReplicaRun(ReplicaId(1), "nobody here"), 50))
    assert node.replication.master is not None
    assert node.log.epoch_seen == 1
    group.send("a")
    group.settle()
    assert [one.bodies() for one in group.nodes] == [["a"]] * 3


def test_a_member_with_a_later_epoch_does() -> None:
    group = group_of_three()
    node = group.nodes[0]
    answer(node, hello_of("g", group.nodes[1].me, 50))
    assert node.replication.master is None
    assert node.log.epoch_seen == 50


@pytest.mark.parametrize("number", [0, 1], ids=["master", "replica"])
def test_a_foreign_member_gets_no_view(number: int) -> None:
    group = group_of_three()
    refusal = answer(group.nodes[number], hello_of("other", ReplicaRun(ReplicaId(1), "x"), 1))
    assert refusal.view is None
    if number:
        ours = answer(group.nodes[number], hello_of("g", group.nodes[2].me, 1))
        assert ours.view == group.view


def test_a_view_of_another_group_is_ignored() -> None:
    group = group_of_three()
    node = group.nodes[1]
    foreign = group.view._replace(epoch=20, version=99, group="elsewhere/g")
    node.replication.learn(foreign, group.now_ms)
    stream = node.replication._dialled
    assert stream is not None
    node.replication.handle_message(stream, Refusal("no", foreign), group.now_ms)
    assert node.log.epoch_seen == 1
    assert node.replication.view == group.view
