"""The limits of a request: each rejects a larger value with its code, some before parsing."""

from __future__ import annotations

import pytest

from tidemill.common.errors import CODES, BadRequest, PropertiesTooLarge
from tidemill.message import limits
from tidemill.message.limits import FieldLimit
from tidemill.message.outline import SMALL_BYTES, check_send, check_telemetry
from tidemill.message.wire import bytes_field


@pytest.mark.parametrize("limit", limits.FIELDS, ids=lambda row: row.field)
def test_a_limit_accepts_its_value_and_rejects_one_more(limit: FieldLimit) -> None:
    limit.check_count(limit.limit)
    with pytest.raises(limit.error, match=f"at most {limit.limit} {limit.unit}"):
        limit.check_count(limit.limit + 1)
    assert 40_000 <= CODES[limit.error].rocketmq < 50_000


def test_a_text_is_counted_in_bytes() -> None:
    limits.ATTEMPT_ID.check_text("淘" * 85)
    with pytest.raises(BadRequest, match="not 258"):
        limits.ATTEMPT_ID.check_text("淘" * 86)


def many(part: bytes, count: int) -> bytes:
    return part * count


@pytest.mark.parametrize(
    ("request_wire", "error"),
    [
        pytest.param(many(b"\x0a\x00", 40_000), BadRequest, id="messages"),
        pytest.param(many(b"\x10\x01", 40_000), BadRequest, id="unknown fields"),
        pytest.param(
            bytes_field(1, many(b"\x12\x00", 40_000)), PropertiesTooLarge, id="user properties"
        ),
        pytest.param(
            bytes_field(1, many(bytes_field(3, b"\x12\x00" * 300_000), 2)),
            PropertiesTooLarge,
            id="keys",
        ),
        pytest.param(bytes_field(1, many(b"\x20\x01", 40_000)), BadRequest, id="fields"),
    ],
)
def test_counts_of_a_large_send_are_rejected_before_it_is_parsed(
    request_wire: bytes, error: type[Exception]
) -> None:
    assert len(request_wire) > SMALL_BYTES
    with pytest.raises(error):
        check_send(request_wire)


def test_a_large_send_passes_and_the_parser_rejects_invalid_bytes() -> None:
    body = bytes_field(4, bytes(4 << 20))
    message = bytes_field(1, b"topic") + bytes_field(3, b"x" * 500) + body
    check_send(bytes_field(1, message) * 3)
    for cut in (1, 2, 3, 4, 1_000):
        check_send(bytes_field(1, message)[:-cut])
    check_send(b"\xff" * (SMALL_BYTES + 1))


TRACE = bytes_field(3, bytes_field(1, b"nonce") + bytes_field(2, b"x" * (900 << 10)))


def test_a_requested_stack_trace_may_be_large() -> None:
    answer = bytes_field(1, b"\x08\x01") + TRACE
    check_telemetry(answer, is_requested=True)
    with pytest.raises(BadRequest):
        check_telemetry(answer, is_requested=False)
    check_telemetry(bytes_field(2, bytes(SMALL_BYTES - 4)), is_requested=False)


@pytest.mark.parametrize(
    "large",
    [
        pytest.param(TRACE + bytes_field(2, bytes(SMALL_BYTES)), id="settings beside it"),
        pytest.param(b"\x5b\x5c" * 40_000 + TRACE, id="after skipped fields"),
        pytest.param(many(b"\x1a\x00", 40_000), id="in pieces"),
        pytest.param(bytes_field(2, bytes(SMALL_BYTES + 1)), id="settings"),
    ],
)
def test_another_large_telemetry_command_is_rejected(large: bytes) -> None:
    with pytest.raises(BadRequest):
        check_telemetry(large, is_requested=True)
