"""Pages of the transactions of several broker groups contain each one once, in order."""

from __future__ import annotations

import pytest

from tidemill.admin.cluster.brokers import BrokerAnswer
from tidemill.admin.messages.transaction_pages import (
    decode_token,
    encode_token,
    merged,
    request_after,
)
from tidemill.common.errors import BadRequest
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

# By broker group: the times of sends, in the order of half ids. 0: unknown.
SENT_AT_MS = {
    "b-0": [10, 20, 20, 90],
    "b-1": [5, 20, 0, 30, 31],
    "b-2": [40, 35],  # its clock was set back
    "b-3": [],
}
Row = tuple[str, int]


def reply(request: pb.ListTransactionsRequest, times_ms: list[int]) -> pb.ListTransactionsReply:
    """Answer as a broker does. Half ids are 100 apart."""
    after = request.after_half_id if request.HasField("after_half_id") else -1
    rest = [(100 * n, at_ms) for n, at_ms in enumerate(times_ms) if 100 * n > after]
    page = rest[: request.page_size]
    return pb.ListTransactionsReply(
        transactions=[pb.Transaction(half_id=half_id, sent_at_ms=at_ms) for half_id, at_ms in page],
        has_more=len(page) < len(rest),
    )


def walk(page_size: int) -> list[Row]:
    request = pb.ListTransactionsRequest(page_size=page_size, topic="orders")
    seen: list[Row] = []
    token: str | None = None
    while True:
        cursors = decode_token(request, token)
        answers = [
            BrokerAnswer(name, reply(request_after(request, cursors, name), times_ms))
            for name, times_ms in SENT_AT_MS.items()
        ]
        rows, cursors, has_more = merged(answers, cursors, page_size)
        assert len(rows) <= page_size
        seen += [(broker, one.half_id) for broker, one in rows]
        if not has_more:
            return seen
        token = encode_token(request, cursors)


@pytest.mark.parametrize("page_size", [1, 2, 3, 7, 100])
def test_pages_contain_each_transaction_once_in_the_order_of_its_broker_group(
    page_size: int,
) -> None:
    seen = walk(page_size)
    for name, times_ms in SENT_AT_MS.items():
        own = [half_id for broker, half_id in seen if broker == name]
        assert own == [100 * n for n in range(len(times_ms))]


def test_a_page_is_ordered_by_the_time_of_the_send() -> None:
    names = [broker for broker, _ in walk(100)]
    assert names == [
        *("b-1", "b-0", "b-0", "b-0", "b-1", "b-1"),
        *("b-1", "b-1", "b-2", "b-2", "b-0"),
    ]


def test_a_token_of_another_filter_is_rejected() -> None:
    token = encode_token(pb.ListTransactionsRequest(topic="orders"), {"b-0": 7})
    assert decode_token(pb.ListTransactionsRequest(topic="orders"), token) == {"b-0": 7}
    for other in (
        pb.ListTransactionsRequest(topic="bills"),
        pb.ListTransactionsRequest(topic="orders", older_than_ms=1),
        pb.ListTransactionsRequest(topic="orders", state=pb.TRANSACTION_STATE_OPEN),
    ):
        with pytest.raises(BadRequest, match="another filter"):
            decode_token(other, token)
