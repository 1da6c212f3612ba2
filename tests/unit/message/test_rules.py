"""Rules for names and sizes, row by row of the public protocol."""

from __future__ import annotations

import pytest

from tidemill.common.errors import (
    IllegalGroup,
    IllegalKey,
    IllegalMessageGroup,
    IllegalMessageId,
    IllegalPropertyKey,
    IllegalTag,
    IllegalTopic,
    MessageBodyEmpty,
    MessageBodyTooLarge,
    MessageCorrupted,
    PropertiesTooLarge,
    RequestError,
)
from tidemill.message.resource_names import check_group, check_topic
from tidemill.message.rules import RESERVED_PROPERTY_KEYS, check_digest, check_message
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

SYSTEM_TOPICS = [
    "TBW102",
    "SCHEDULE_TOPIC_XXXX",
    "BenchmarkTest",
    "RMQ_SYS_TRANS_HALF_TOPIC",
    "RMQ_SYS_TRACE_TOPIC",
    "RMQ_SYS_TRANS_OP_HALF_TOPIC",
    "TRANS_CHECK_MAX_TIME_TOPIC",
    "SELF_TEST_TOPIC",
    "OFFSET_MOVED_EVENT",
    "CHECKPOINT_TOPIC",
    "rmq_sys_anything",
    "%SYS%TIMER",
]


def message(
    *, body: bytes = b"body", user_properties: dict[str, str] | None = None, **properties: object
) -> v2.Message:
    values = {"message_id": "id", **properties}
    return v2.Message(
        body=body,
        user_properties=user_properties or {},
        system_properties=v2.SystemProperties(**values),  # type: ignore[arg-type]  # keywords by name
    )


@pytest.mark.parametrize("name", ["a", "A-z_0-9%|", "t" * 127, "TBW1020", "%DLQ%group", "a%b%c"])
def test_a_valid_topic_name_is_accepted(name: str) -> None:
    check_topic(name)


@pytest.mark.parametrize(
    "name", ["", " ", "\t", "a b", "a.b", "a/b", "ä", "a\n", "t" * 128, *SYSTEM_TOPICS]
)
def test_an_invalid_topic_name_is_rejected(name: str) -> None:
    with pytest.raises(IllegalTopic):
        check_topic(name)


@pytest.mark.parametrize("name", ["%b", "a%", "%", "a%%b", "%DLQ%", "%DLQ%a%", "%DLQ%%b"])
def test_a_topic_name_with_an_empty_part_is_rejected(name: str) -> None:
    with pytest.raises(IllegalTopic, match=f"the name {name} has an empty part"):
        check_topic(name)


@pytest.mark.parametrize("name", ["%b", "a%", "%", "a%%b", "%SYS%g"])
def test_a_group_name_with_an_empty_part_is_rejected(name: str) -> None:
    with pytest.raises(IllegalGroup, match=f"the name {name} has an empty part"):
        check_group(name)


@pytest.mark.parametrize("name", ["a", "A-z_0-9%|", "g" * 120])
def test_a_valid_group_name_is_accepted(name: str) -> None:
    check_group(name)


@pytest.mark.parametrize(
    "name", ["", " ", "a b", "a.b", "ä", "g" * 121, "rmq_sys_x", "%DLQ%g", "%RETRY%g"]
)
def test_an_invalid_group_name_is_rejected(name: str) -> None:
    with pytest.raises(IllegalGroup):
        check_group(name)


@pytest.mark.parametrize(
    "legal",
    [
        message(),
        message(tag=""),
        message(tag="tag with blanks, ä"),
        message(tag="*"),
        message(keys=["key one", "ä"]),
        message(message_group="g" * 63),
        message(message_id="x" * 1024),
        message(body=b"x" * 4_194_304),
        message(user_properties={f"key{n}": "v" for n in range(128)}),
        message(user_properties={"": ""}),
        # Together they reach the limit.
        message(tag="t", keys=["k"], user_properties={"p": "v" * 16_381}),
    ],
    ids=lambda _: "legal",
)
def test_a_message_within_the_limits_is_accepted(legal: v2.Message) -> None:
    check_message(legal)


@pytest.mark.parametrize(
    ("illegal", "error"),
    [
        (message(message_id=""), IllegalMessageId),
        (message(message_id="  "), IllegalMessageId),
        (message(message_id="x" * 1025), IllegalMessageId),
        (message(tag=" "), IllegalTag),
        (message(tag="a "), IllegalTag),
        (message(tag="\u3000a"), IllegalTag),
        (message(tag="t" * 16_385), IllegalTag),
        (message(tag="a|b"), IllegalTag),
        (message(tag="a\x01"), IllegalTag),
        (message(keys=[""]), IllegalKey),
        (message(keys=["good", " "]), IllegalKey),
        (message(keys=["a\x7f"]), IllegalKey),
        (message(message_group=""), IllegalMessageGroup),
        (message(message_group=" "), IllegalMessageGroup),
        (message(message_group="g" * 64), IllegalMessageGroup),
        (message(message_group="ä" * 32), IllegalMessageGroup),
        (message(message_group="a\n"), IllegalMessageGroup),
        (message(user_properties={"a\x00": "v"}), IllegalPropertyKey),
        (message(user_properties={"a": "v\x9f"}), IllegalPropertyKey),
        (message(user_properties={f"key{n}": "v" for n in range(129)}), PropertiesTooLarge),
        (message(user_properties={"k": "v" * 16_384}), PropertiesTooLarge),
        (message(user_properties={"k": "ä" * 8_192}), PropertiesTooLarge),
        (message(keys=["k" * 16_385]), PropertiesTooLarge),
        (message(tag="t" * 4_096, keys=["k" * 12_289]), PropertiesTooLarge),
        (message(body=b""), MessageBodyEmpty),
        (message(body=b"x" * 4_194_305), MessageBodyTooLarge),
    ],
)
def test_a_message_over_a_limit_is_rejected(illegal: v2.Message, error: type[RequestError]) -> None:
    with pytest.raises(error):
        check_message(illegal)


@pytest.mark.parametrize("name", sorted(RESERVED_PROPERTY_KEYS))
def test_a_reserved_property_is_rejected(name: str) -> None:
    with pytest.raises(IllegalPropertyKey):
        check_message(message(user_properties={name: "v"}))


def test_the_reserved_properties_match_the_protocol_and_two_of_timers() -> None:
    assert len(RESERVED_PROPERTY_KEYS) == 51 + 2
    assert {"TIMER_ROLL_LABEL", "__STARTDELIVERTIME"} <= RESERVED_PROPERTY_KEYS
    assert {"KEYS", "TAGS", "1ST_POP_TIME", "__BORNHOST", "__CRC32#"} <= RESERVED_PROPERTY_KEYS


@pytest.mark.parametrize(
    ("kind", "checksum"),
    [
        (v2.MD5, "841A2D689AD86BD1611447453C22C6FC"),
        (v2.MD5, "841a2d689ad86bd1611447453c22c6fc"),
        (v2.MD5, ""),
        (v2.SHA1, "02083F4579E08A612425C0C1A17EE47ADD783B94"),
        (v2.CRC32, "DBA80BB2"),
        (v2.CRC32, "3685223346"),
    ],
)
def test_a_body_is_accepted_with_each_form_of_its_digest(
    kind: v2.DigestType.ValueType, checksum: str
) -> None:
    digest = v2.Digest(type=kind, checksum=checksum)
    check_digest(digest, b"body")
    if checksum:
        with pytest.raises(MessageCorrupted):
            check_digest(digest, b"bodx")


@pytest.mark.parametrize("checksum", ["81566", "00081566"])
def test_a_crc_is_accepted_with_and_without_leading_zeros(checksum: str) -> None:
    check_digest(v2.Digest(type=v2.CRC32, checksum=checksum), b"665")
