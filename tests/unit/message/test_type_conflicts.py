"""Errors for a message whose type does not fit its topic, and the types of priorities."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from tidemill.common.errors import BadRequest, MessageTypeConflict
from tidemill.message.rules import check_type, message_type, type_for_topic
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

SOME_TIME = Timestamp(seconds=1)


def check(topic_type: pb.TopicType.ValueType, **properties: Any) -> v2.MessageType.ValueType:
    """Check a message with these properties for a topic, and return the type of the message."""
    system = v2.SystemProperties(**properties)
    kind = message_type(system)
    check_type(type_for_topic(kind, system), "jobs", topic_type, exists=True)
    return kind


def test_a_delay_message_for_a_normal_topic_names_the_command_for_both() -> None:
    with pytest.raises(MessageTypeConflict, match="tidemill topic set jobs --type MIXED"):
        check(pb.TOPIC_TYPE_NORMAL, delivery_timestamp=SOME_TIME)


def test_no_command_is_named_if_none_helps() -> None:
    with pytest.raises(MessageTypeConflict) as refused:
        check(pb.TOPIC_TYPE_NORMAL, lite_topic="lite")
    assert "tidemill topic" not in str(refused.value)


@pytest.mark.parametrize(
    "topic_type", [each for each in pb.TopicType.values() if each != pb.TOPIC_TYPE_PRIORITY]
)
@pytest.mark.parametrize("due", [None, SOME_TIME])
def test_a_priority_on_another_topic_names_the_command_for_it(
    topic_type: pb.TopicType.ValueType, due: Timestamp | None
) -> None:
    with pytest.raises(MessageTypeConflict, match="tidemill topic set jobs --type PRIORITY"):
        check(topic_type, priority=3, delivery_timestamp=due)


@pytest.mark.parametrize(
    ("properties", "kind"),
    [
        ({"priority": 0}, v2.PRIORITY),
        ({"priority": (1 << 31) - 1}, v2.PRIORITY),
        ({}, v2.NORMAL),
        ({"message_type": v2.NORMAL}, v2.NORMAL),
        ({"message_type": v2.NORMAL, "priority": 0}, v2.NORMAL),
        ({"delivery_timestamp": SOME_TIME}, v2.DELAY),
        ({"delivery_timestamp": SOME_TIME, "priority": 3}, v2.DELAY),
        ({"delivery_timestamp": SOME_TIME, "priority": 3, "message_type": v2.PRIORITY}, v2.DELAY),
    ],
)
def test_a_priority_topic_takes_priorities_and_normal_and_delayed_messages(
    properties: dict[str, Any], kind: v2.MessageType.ValueType
) -> None:
    assert check(pb.TOPIC_TYPE_PRIORITY, **properties) == kind


@pytest.mark.parametrize(
    "properties",
    [
        {"priority": 1, "message_group": "g"},
        {"priority": 1, "lite_topic": "lite"},
        {"priority": 1, "message_type": v2.TRANSACTION},
        {"priority": 1, "message_type": v2.NORMAL},
        {"priority": 1, "message_group": "g", "delivery_timestamp": SOME_TIME},
        {"message_type": v2.PRIORITY},
        {"message_group": "g"},
        {"message_type": v2.TRANSACTION},
    ],
)
def test_a_priority_topic_rejects_a_message_of_two_types(properties: dict[str, Any]) -> None:
    with pytest.raises(MessageTypeConflict) as refused:
        check(pb.TOPIC_TYPE_PRIORITY, **properties)
    assert "--type MIXED" not in str(refused.value), "a MIXED topic rejects priorities"


@pytest.mark.parametrize("due", [None, SOME_TIME])
def test_a_negative_priority_is_rejected(due: Timestamp | None) -> None:
    with pytest.raises(BadRequest, match="priority is -1; it must be 0 or higher"):
        check(pb.TOPIC_TYPE_PRIORITY, priority=-1, delivery_timestamp=due)
