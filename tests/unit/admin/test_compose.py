"""Messages of the REST API: their ids, times and bodies."""

from __future__ import annotations

import os

import pytest

from tests.support.bodies import body_of
from tests.support.clocks import ManualClock
from tidemill.admin.json.messages import NewMessage
from tidemill.admin.messages.compose import DELAY_LEVELS_MS, Composer
from tidemill.admin.messages.message_ids import MessageIds
from tidemill.common.errors import BadRequest, IllegalDeliveryTime, IllegalTag, MessageTypeConflict
from tidemill.common.item_bytes import ITEM_BYTES_MAX
from tidemill.message import stored_message
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

NOW_MS = 1_790_000_000_123
BEGIN_OF_2021_S = 1_609_459_200


def composer() -> Composer:
    return Composer(ManualClock(NOW_MS), item_bytes_max=ITEM_BYTES_MAX)


def test_an_id_has_the_format_of_the_official_clients() -> None:
    ids = MessageIds(NOW_MS)
    first, second = bytes.fromhex(ids.make()), bytes.fromhex(ids.make())
    assert len(first) == 17
    assert first[0] == 1
    assert first[7:9] == (os.getpid() & 0xFFFF).to_bytes(2, "big")
    assert int.from_bytes(first[9:13], "big") == NOW_MS // 1000 - BEGIN_OF_2021_S
    assert first[:13] == second[:13]
    assert (first[13:], second[13:]) == (bytes(4), bytes([0, 0, 0, 1]))


def test_ids_are_upper_case_and_all_different() -> None:
    ids = MessageIds(NOW_MS)
    made = [ids.make() for _ in range(1000)]
    assert len(set(made)) == 1000
    assert all(each == each.upper() for each in made)


def test_the_delay_levels_match_older_clients() -> None:
    seconds = (
        1,
        5,
        10,
        30,
        60,
        120,
        180,
        240,
        300,
        360,
        420,
        480,
        540,
        600,
        1200,
        1800,
        3600,
        7200,
    )
    assert tuple(each * 1000 for each in seconds) == DELAY_LEVELS_MS


@pytest.mark.parametrize(
    ("fields", "kind", "due_at_ms", "delay_ms"),
    [
        ({}, v2.NORMAL, 0, None),
        ({"message_group": "g"}, v2.FIFO, 0, None),
        ({"deliver_at_ms": NOW_MS + 7}, v2.DELAY, NOW_MS + 7, None),
        ({"delay_ms": 0}, v2.DELAY, 0, 0),
        ({"delay_ms": 9}, v2.DELAY, 0, 9),
        ({"delay_level": 1}, v2.DELAY, 0, 1_000),
        ({"delay_level": 18}, v2.DELAY, 0, 7_200_000),
        ({"delay_level": 2**40}, v2.DELAY, 0, 7_200_000),
    ],
)
def test_a_message_has_a_due_time_or_a_delay_for_the_broker(
    fields: dict[str, object], kind: int, due_at_ms: int, delay_ms: int | None
) -> None:
    composed = composer().compose("topic", NewMessage.model_validate({"body": "b", **fields}))
    stored = stored_message.decode(composed.blob)
    assert (stored.message_type, stored.due_at_ms, composed.delay_ms) == (kind, due_at_ms, delay_ms)
    assert stored.born_at_ms == NOW_MS
    assert stored_message.message_id_of(composed.blob) == composed.message_id


def test_a_body_can_be_base64() -> None:
    composed = composer().compose("topic", NewMessage(body_base64="/wA="))
    assert body_of(composed.blob) == b"\xff\0"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"body_base64": "/w"}, BadRequest),
        ({"body": "b", "tag": "a|b"}, IllegalTag),
        ({"body": "b", "deliver_at_ms": -1}, IllegalDeliveryTime),
        ({"body": "b", "deliver_at_ms": 2**53}, IllegalDeliveryTime),
        ({"body": "b", "delay_ms": 1, "message_group": "g"}, MessageTypeConflict),
    ],
)
def test_the_rules_for_messages_of_clients_apply(
    fields: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        composer().compose("topic", NewMessage.model_validate(fields))


@pytest.mark.parametrize("priority", [0, 7, (1 << 31) - 1])
def test_a_priority_is_stored_as_sent(priority: int) -> None:
    blob = composer().compose("orders", NewMessage(body="b", priority=priority)).blob
    fields = stored_message.decode(blob)
    system = v2.SystemProperties.FromString(blob[fields.system_at : fields.user_at])
    assert (system.message_type, system.HasField("priority")) == (v2.PRIORITY, True)
    assert system.priority == priority


def test_a_priority_with_a_message_group_is_a_conflict() -> None:
    with pytest.raises(MessageTypeConflict):
        composer().compose("orders", NewMessage(body="b", priority=1, message_group="g"))
