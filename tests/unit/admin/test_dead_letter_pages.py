"""Pages of the dead letters of several broker groups, and the messages of copies."""

from __future__ import annotations

import base64

import pytest
from pydantic import ValidationError

from tidemill.admin.cluster.brokers import BrokerAnswer
from tidemill.admin.json.dead_letters import DeadLetterCopyRequest
from tidemill.admin.messages.dead_letter_copies import COPY_OF, changed_message
from tidemill.admin.messages.dead_letter_pages import (
    decode_token,
    encode_token,
    merged,
    request_behind,
)
from tidemill.common.errors import BadRequest
from tidemill.message import stored_message
from tidemill.message.encoding import encode_stored
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

# By broker group: the times of death, in the order of the log. 0: unknown.
DEAD_AT_MS = {
    "b-0": [10, 20, 20, 90],
    "b-1": [5, 20, 0, 30, 31],
    "b-2": [40, 35],  # its clock was set back
    "b-3": [],
}
Row = tuple[str, int]


def reply(
    request: pb.ListDeadLettersRequest, times_ms: list[int], scan: int
) -> pb.ListDeadLettersReply:
    """Answer as a broker does that looks at `scan` dead letters. Log offsets are 100 apart."""
    before = request.before_log_offset if request.HasField("before_log_offset") else 1 << 60
    left = [(100 * n, at_ms) for n, at_ms in enumerate(times_ms, 1) if 100 * n < before][::-1]
    looked = left[: min(scan, request.page_size)]
    shown = [one for one in looked if request.tag != "none"]
    has_more = len(looked) < len(left)
    return pb.ListDeadLettersReply(
        letters=[pb.DeadLetter(log_offset=at, dead_at_ms=at_ms) for at, at_ms in shown],
        has_more=has_more,
        next_log_offset=looked[-1][0] if has_more else 0,
    )


def walk(page_size: int, scan: int = 1_000, tag: str = "") -> list[Row]:
    request = pb.ListDeadLettersRequest(page_size=page_size, tag=tag)
    seen: list[Row] = []
    token: str | None = None
    for _ in range(100):
        cursors = decode_token(request, token)
        answers = [
            BrokerAnswer(name, reply(request_behind(request, cursors, name), times_ms, scan))
            for name, times_ms in DEAD_AT_MS.items()
        ]
        rows, cursors, has_more = merged(answers, cursors, page_size)
        assert len(rows) <= page_size
        seen += [(broker, one.log_offset) for broker, one in rows]
        if not has_more:
            return seen
        token = encode_token(request, cursors)
    raise AssertionError("the pages do not end")


@pytest.mark.parametrize("scan", [1, 2, 1_000])
@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 100])
def test_pages_contain_each_dead_letter_once_in_the_order_of_its_broker(
    page_size: int, scan: int
) -> None:
    seen = walk(page_size, scan)
    assert sorted(seen) == sorted(
        (broker, 100 * n) for broker, times in DEAD_AT_MS.items() for n in range(1, len(times) + 1)
    )
    for broker in DEAD_AT_MS:
        offsets = [offset for name, offset in seen if name == broker]
        assert offsets == sorted(offsets, reverse=True)


def test_the_newest_dead_letter_is_first() -> None:
    assert walk(100)[:2] == [("b-0", 400), ("b-2", 200)]


def test_empty_pages_end() -> None:
    assert walk(2, scan=1, tag="none") == []


def test_a_token_belongs_to_its_filter() -> None:
    token = encode_token(pb.ListDeadLettersRequest(group="a", page_size=3), {"b-0": 7})
    assert decode_token(pb.ListDeadLettersRequest(group="a", page_size=9), token) == {"b-0": 7}
    with pytest.raises(BadRequest, match="another filter"):
        decode_token(pb.ListDeadLettersRequest(group="b", page_size=3), token)


# ------------------------------------------------------------ copies


def letter(
    encoding: v2.Encoding.ValueType = v2.IDENTITY, reason: str = "x"
) -> pb.GetDeadLetterReply:
    message = v2.Message(
        topic=v2.Resource(name="orders"),
        user_properties={"color": "red", "dedup-key": "order-17"},
        body=b"body",
        system_properties=v2.SystemProperties(
            message_id="m-1", tag="t", keys=["k"], body_encoding=encoding, message_group="g"
        ),
    )
    data = encode_stored(message, message_type=v2.FIFO, now_ms=5)
    head = data[: stored_message.decode(data).body_wire_at]
    return pb.GetDeadLetterReply(letter=pb.DeadLetter(head=head, reason=reason), blob=data)


def test_a_copy_without_changes_has_the_message_and_its_id() -> None:
    new = changed_message(letter(), DeadLetterCopyRequest())
    assert new.body_base64 == base64.b64encode(b"body").decode()
    assert (new.tag, new.keys, new.message_group) == ("t", ["k"], "g")
    assert new.properties == {"color": "red", COPY_OF: "m-1"}


def test_a_copy_has_the_changes() -> None:
    changes = DeadLetterCopyRequest(body="new", tag="u", keys=[], properties={"a": "b"})
    new = changed_message(letter(), changes)
    assert (new.body, new.body_base64, new.tag, new.keys) == ("new", None, "u", [])
    assert new.properties == {"a": "b", COPY_OF: "m-1"}


def test_a_copy_needs_a_body_if_that_of_the_dead_letter_cannot_be_kept() -> None:
    for found, match in (
        (letter(v2.GZIP), "compressed"),
        (letter(reason="damaged"), "lost"),
        (pb.GetDeadLetterReply(letter=pb.DeadLetter(reason="damaged")), "lost"),
    ):
        with pytest.raises(BadRequest, match=match):
            changed_message(found, DeadLetterCopyRequest())
        assert changed_message(found, DeadLetterCopyRequest(body="new")).body == "new"


def test_a_copy_has_one_kind_of_body() -> None:
    with pytest.raises(ValidationError):
        DeadLetterCopyRequest(body="a", body_base64="YQ==")
