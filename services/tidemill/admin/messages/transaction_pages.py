"""Pages of the transactions of all broker groups, the oldest first.

    token: filter ("," broker ":" half_id)...

Each broker group lists its transactions in the order of their half ids, which is that of the sends.
A token has the half id of the last shown transaction of each broker group. So no transaction is
skipped or repeated, even if the clocks of the broker groups differ. `filter` is a hash, because a
token is valid for the same filter only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, NamedTuple

from fastapi import Query

from tidemill.admin.cluster.brokers import BrokerAnswer
from tidemill.admin.http.paging import check_filter, hash_of_filter
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

TOKEN_CHARS_MAX: Final = 8_192  # 100 broker groups
HALF_ID_MAX: Final = 2**63 - 1
Token = Annotated[
    str | None,
    Query(
        alias="pageToken",
        max_length=TOKEN_CHARS_MAX,
        pattern="^[0-9a-f]{8}(,[A-Za-z0-9._-]{1,64}:[0-9]{1,19})*$",
        description="`nextPageToken` of the previous page, with the same filter.",
    ),
]


class TransactionRows(NamedTuple):
    """Ordered transactions with their broker groups, and the positions after them."""

    rows: list[tuple[str, pb.Transaction]]
    cursors: dict[str, int]  # by broker group: the half id of the last one
    has_more: bool


def encode_token(request: pb.ListTransactionsRequest, cursors: Mapping[str, int]) -> str:
    """Return the token of the page after `cursors`."""
    ends = [f"{broker}:{half_id}" for broker, half_id in sorted(cursors.items())]
    return ",".join([_filter_hash(request), *ends])


def decode_token(request: pb.ListTransactionsRequest, token: str | None) -> dict[str, int]:
    """Return the positions after which a page begins. Raises BadRequest."""
    if token is None:
        return {}
    filter_hash, *ends = token.split(",")
    check_filter(filter_hash, _filter_hash(request))
    pairs = (end.rpartition(":") for end in ends)
    return {broker: min(int(half_id), HALF_ID_MAX) for broker, _, half_id in pairs}


def request_after(
    request: pb.ListTransactionsRequest, cursors: Mapping[str, int], broker: str
) -> pb.ListTransactionsRequest:
    """Return the request to one broker group for the page after `cursors`."""
    own = pb.ListTransactionsRequest()
    own.CopyFrom(request)
    if broker in cursors:
        own.after_half_id = cursors[broker]
    return own


def merged(
    answers: Sequence[BrokerAnswer[pb.ListTransactionsReply]], cursors: Mapping[str, int], size: int
) -> TransactionRows:
    """Return the first `size` transactions of all broker groups after `cursors`.

    The page ends with the last known transaction of a broker group that has more of them.
    """
    at = dict.fromkeys((broker for broker, _ in answers), 0)
    replies = dict(answers)
    rows: list[tuple[str, pb.Transaction]] = []
    ends = dict(cursors)
    # The order inside a broker group wins: the time of a send may be unknown.
    times: dict[str, int] = {}
    while len(rows) < size:
        heads = []
        for broker, reply in replies.items():
            if at[broker] < len(reply.transactions):
                sent_at_ms = reply.transactions[at[broker]].sent_at_ms
                heads.append((max(sent_at_ms, times.get(broker, 0)), broker))
            elif reply.has_more:
                return TransactionRows(rows, ends, has_more=True)
        if not heads:
            return TransactionRows(rows, ends, has_more=False)
        times_ms, broker = min(heads)
        times[broker] = times_ms
        transaction = replies[broker].transactions[at[broker]]
        at[broker] += 1
        rows.append((broker, transaction))
        ends[broker] = transaction.half_id
    has_more = any(
        at[broker] < len(reply.transactions) or reply.has_more for broker, reply in replies.items()
    )
    return TransactionRows(rows, ends, has_more)


def _filter_hash(request: pb.ListTransactionsRequest) -> str:
    parts = (request.topic, str(request.state), str(request.older_than_ms))
    return hash_of_filter(",".join(parts).encode())
