"""Pages of the dead letters of all broker groups, the newest first.

    token: filter ("," broker ":" log_offset)...

Each broker group lists its dead letters in the order of its log, backwards. A token has the log
offset of the last shown dead letter of each broker group. So no dead letter is skipped or repeated,
even if the clocks of the broker groups differ. `filter` is a hash, because a token is valid for the
same filter only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, NamedTuple

from fastapi import Query

from tidemill.admin.cluster.brokers import BrokerAnswer
from tidemill.admin.http.paging import check_filter, hash_of_filter
from tidemill.admin.json.schema import EXACT_MAX
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

TOKEN_CHARS_MAX: Final = 8_192  # 100 broker groups
LOG_OFFSET_MAX: Final = 2**62
Token = Annotated[
    str | None,
    Query(
        alias="pageToken",
        max_length=TOKEN_CHARS_MAX,
        pattern="^[0-9a-f]{8}(,[A-Za-z0-9._-]{1,64}:[0-9]{1,19})*$",
        description="`nextPageToken` of the previous page, with the same filter.",
    ),
]


class DeadLetterRows(NamedTuple):
    """Ordered dead letters with their broker groups, and the positions behind them."""

    rows: list[tuple[str, pb.DeadLetter]]
    cursors: dict[str, int]  # by broker group: the log offset of the last one
    has_more: bool


def encode_token(request: pb.ListDeadLettersRequest, cursors: Mapping[str, int]) -> str:
    """Return the token of the page behind `cursors`."""
    ends = [f"{broker}:{log_offset}" for broker, log_offset in sorted(cursors.items())]
    return ",".join([_filter_hash(request), *ends])


def decode_token(request: pb.ListDeadLettersRequest, token: str | None) -> dict[str, int]:
    """Return the positions behind which a page begins. Raises BadRequest."""
    if token is None:
        return {}
    filter_hash, *ends = token.split(",")
    check_filter(filter_hash, _filter_hash(request))
    pairs = (end.rpartition(":") for end in ends)
    return {broker: min(int(log_offset), LOG_OFFSET_MAX) for broker, _, log_offset in pairs}


def request_behind(
    request: pb.ListDeadLettersRequest, cursors: Mapping[str, int], broker: str
) -> pb.ListDeadLettersRequest:
    """Return the request to one broker group for the page behind `cursors`."""
    own = pb.ListDeadLettersRequest()
    own.CopyFrom(request)
    if broker in cursors:
        own.before_log_offset = cursors[broker]
    return own


def merged(
    answers: Sequence[BrokerAnswer[pb.ListDeadLettersReply]], cursors: Mapping[str, int], size: int
) -> DeadLetterRows:
    """Return the first `size` dead letters of all broker groups behind `cursors`.

    The page ends with the last known dead letter of a broker group that has more of them.
    """
    at = dict.fromkeys((broker for broker, _ in answers), 0)
    replies = dict(answers)
    rows: list[tuple[str, pb.DeadLetter]] = []
    # A broker group that has none now gets none on later pages: new ones are newer than this page.
    is_empty = [broker for broker, reply in answers if not reply.letters and not reply.has_more]
    ends = dict.fromkeys(is_empty, 0) | dict(cursors)
    # The order inside a broker group wins: its clock may have been set back.
    times: dict[str, int] = {}
    while len(rows) < size:
        heads = []
        for broker, reply in replies.items():
            if at[broker] < len(reply.letters):
                dead_at_ms = reply.letters[at[broker]].dead_at_ms or EXACT_MAX
                heads.append((min(dead_at_ms, times.get(broker, EXACT_MAX)), broker))
            elif reply.has_more:
                ends[broker] = reply.next_log_offset
                return DeadLetterRows(rows, ends, has_more=True)
        if not heads:
            return DeadLetterRows(rows, ends, has_more=False)
        times_ms, broker = max(heads)
        times[broker] = times_ms
        letter = replies[broker].letters[at[broker]]
        at[broker] += 1
        rows.append((broker, letter))
        ends[broker] = letter.log_offset
    has_more = any(
        at[broker] < len(reply.letters) or reply.has_more for broker, reply in replies.items()
    )
    return DeadLetterRows(rows, ends, has_more)


def _filter_hash(request: pb.ListDeadLettersRequest) -> str:
    own = pb.ListDeadLettersRequest()
    own.CopyFrom(request)
    own.ClearField("page_size")
    encoded = own.SerializeToString(deterministic=True)
    return hash_of_filter(encoded)
