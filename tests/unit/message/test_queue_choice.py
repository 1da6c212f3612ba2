"""Queues: messages of a message group share one, all others are spread."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.message.queue_choice import (
    RoundRobin,
    broker_queue_of_message_group,
    level_of,
    queue_of_message_group,
)
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


def test_messages_without_a_group_use_the_queues_in_turn() -> None:
    turns = RoundRobin()
    assert sorted(turns.choose_queue(8) for _ in range(16)) == sorted([*range(8), *range(8)])


@given(st.text(min_size=1, max_size=63), st.integers(1, 64))
def test_a_message_group_always_goes_to_the_same_queue(group: str, count: int) -> None:
    queue = queue_of_message_group(group, queues=count)
    assert 0 <= queue < count
    assert queue_of_message_group(group, queues=count) == queue


def test_the_queue_of_a_message_group_is_the_same_in_every_release() -> None:
    """Golden: another result would break the order of existing message groups."""
    assert [queue_of_message_group(f"order-{n}", queues=8) for n in range(8)] == [
        2,
        1,
        4,
        6,
        7,
        1,
        4,
        2,
    ]


def test_a_message_group_has_one_queue_among_all_broker_groups() -> None:
    """Frozen as the queues are, because every sender must find the same queue."""
    placements = [
        pb.Placement(broker_group="a", queues=2),
        pb.Placement(broker_group="b", queues=1),
        pb.Placement(broker_group="c", queues=3),
    ]
    flat = [("a", 0), ("a", 1), ("b", 0), ("c", 0), ("c", 1), ("c", 2)]
    for n in range(100):
        place = broker_queue_of_message_group(f"order-{n}", placements)
        assert place == flat[queue_of_message_group(f"order-{n}", queues=len(flat))]


def test_a_level_is_the_priority_up_to_the_last_queue() -> None:
    priorities = (0, 1, 7, 8, (1 << 31) - 1)
    assert [level_of(priority, queues=8) for priority in priorities] == [0, 1, 7, 7, 7]
    assert [level_of(priority, queues=1) for priority in priorities] == [0] * 5
