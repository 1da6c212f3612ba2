"""Errors for a message whose type does not fit its topic."""

from __future__ import annotations

import pytest

from tidemill.common.errors import MessageTypeConflict
from tidemill.message.rules import check_type
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


def test_a_delay_message_for_a_normal_topic_names_the_command_for_both() -> None:
    with pytest.raises(MessageTypeConflict, match="tidemill topic create jobs --type MIXED"):
        check_type(v2.DELAY, "jobs", pb.TOPIC_TYPE_NORMAL)


def test_no_command_is_named_if_none_helps() -> None:
    with pytest.raises(MessageTypeConflict) as refused:
        check_type(v2.PRIORITY, "jobs", pb.TOPIC_TYPE_NORMAL)
    assert "tidemill topic" not in str(refused.value)
