"""Dead letters: list, count and show them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Awaitable
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Path, Query

from tidemill.admin.audit.access_reports import note_access
from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import BrokerGroupClient, Brokers
from tidemill.admin.http.paging import PAGE_SIZE, PageSize
from tidemill.admin.http.request_access import READS
from tidemill.admin.json.bulk_changes import ITEM_ID_PATTERN
from tidemill.admin.json.dead_letters import (
    DeadLetterCountView,
    DeadLetterDetailView,
    DeadLetterGroupView,
    DeadLetterPageView,
    DeadLetterReason,
    DeadLetterStateView,
    DeadLetterSummaryView,
)
from tidemill.admin.json.schema import EXACT_MAX, Instant
from tidemill.admin.messages.dead_letter_pages import (
    Token,
    decode_token,
    encode_token,
    merged,
    request_behind,
)
from tidemill.admin.messages.letter_ids import parse_letter_id, read_letter
from tidemill.admin.messages.views import dead_letter_detail_of, dead_letter_of
from tidemill.admin.routes import Access, ChangeAuthor, Cluster, GroupName, OwnAccessLog
from tidemill.security.acl import Action
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

router = APIRouter(tags=["dead letters"])

CALLS_MAX: Final = 8  # to each broker group, for a page of the dead letters that a user may see

LetterIdPath = Annotated[
    str,
    Path(
        description="Id of the dead letter: its broker group and its offset there.",
        json_schema_extra={"pattern": ITEM_ID_PATTERN},
    ),
]
Group = Annotated[str, Query(description="Only of this consumer group.")]
Topic = Annotated[str, Query(description="Only messages that were sent to this topic.")]
Reason = Annotated[DeadLetterReason | None, Query(description="Only with this reason.")]
Tag = Annotated[str, Query(description="Only messages with this tag.")]
State = Annotated[
    DeadLetterStateView | None, Query(description="Only in this state. Default: all states.")
]
_TIME = "Unix ms, or a time such as 2027-01-01T08:00:00Z."
FromMs = Annotated[
    Instant,
    Query(alias="fromMs", ge=0, le=EXACT_MAX, description=f"Dead at or after this time: {_TIME}"),
]
ToMs = Annotated[
    Instant, Query(alias="toMs", ge=0, le=EXACT_MAX, description=f"Dead before this time: {_TIME}")
]
Causes = Annotated[
    bool,
    Query(description="Count by topic and reason too, which needs a read of the dead letters."),
]


def note_read(group: GroupName, access: Access, author: ChangeAuthor, own: OwnAccessLog) -> None:
    """Note a read of the body of a dead letter in the access log."""
    if access.allows_group(Action.SUB, group):
        note_access(own, author.actor, author.call, resource=f"Group:{group}", action="Sub")


NotedRead = Annotated[None, Depends(note_read)]


@router.get("/dead-letters", response_model_exclude_none=True)
async def list_dead_letters(
    cluster: Cluster,
    access: Access,
    group: Group = "",
    topic: Topic = "",
    reason: Reason = None,
    tag: Tag = "",
    state: State = None,
    from_ms: FromMs = 0,
    to_ms: ToMs = 0,
    page_size: PageSize = PAGE_SIZE,
    page_token: Token = None,
) -> DeadLetterPageView:
    """List dead letters of consumer groups at all broker groups, the newest first.

    A page with fewer items than requested, even an empty page, may have a `nextPageToken`. Dead
    letters of timers and transactions are not in the list.
    """
    request = pb.ListDeadLettersRequest(
        group=group,
        topic=topic,
        reason=reason.lower() if reason else "",
        tag=tag,
        state=pb.DeadLetterState.Value(
            f"DEAD_LETTER_STATE_{state.value if state else 'UNSPECIFIED'}"
        ),
        from_ms=from_ms,
        to_ms=to_ms,
        page_size=page_size,
    )
    begin = decode_token(request, page_token)
    if group and not access.allows_group(READS, group):
        return DeadLetterPageView(dead_letters=[])  # As for a group without dead letters.
    if not group and access.is_limited:
        groups, lost = await _groups_with_letters(cluster)
        if not any(access.allows_group(READS, name) for name in groups):
            return DeadLetterPageView(dead_letters=[], unreachable=lost or None)
    cursors = begin

    def ask(member: BrokerGroupClient) -> Awaitable[pb.ListDeadLettersReply]:
        return member.client.call(
            calls.LIST_DEAD_LETTERS, request_behind(request, cursors, member.name)
        )

    shown: list[tuple[str, pb.DeadLetter]] = []
    unreachable: set[str] = set()
    async with cluster.scan():
        # A page that ends at a hidden dead letter would tell its place.
        for _ in range(CALLS_MAX):
            found = await cluster.ask_all(ask)
            unreachable.update(found.unreachable)
            rows, cursors, has_more = merged(found.answers, cursors, page_size)
            shown += [each for each in rows if access.allows_group(READS, each[1].group)]
            if not has_more or len(shown) > page_size or not access.is_limited:
                break
    if len(shown) > page_size:
        shown, has_more = shown[:page_size], True
        cursors = {**begin, **{broker: one.log_offset for broker, one in shown}}
    return DeadLetterPageView(
        dead_letters=[
            dead_letter_of(one, broker=broker, with_keys=access.allows_group(Action.SUB, one.group))
            for broker, one in shown
        ],
        next_page_token=encode_token(request, cursors) if has_more else None,
        unreachable=sorted(unreachable) or None,
    )


async def _groups_with_letters(cluster: Brokers) -> tuple[set[str], list[str]]:
    """Return the consumer groups with dead letters, and the unreachable broker groups."""
    request = pb.SummarizeDeadLettersRequest(without_causes=True)
    found = await cluster.call_all(calls.SUMMARIZE_DEAD_LETTERS, request)
    return {one.group for _, reply in found.answers for one in reply.groups}, found.unreachable


@router.get("/dead-letters/summary", response_model_exclude_none=True)
async def summarize_dead_letters(
    cluster: Cluster, access: Access, causes: Causes = True
) -> DeadLetterSummaryView:
    """Count the dead letters of all consumer groups, by group, topic and reason.

    For topics and reasons, each broker group reads up to 100,000 open dead letters, the newest of
    each consumer group first. `partial` tells whether there are more.
    """
    request = pb.SummarizeDeadLettersRequest(without_causes=not causes)
    async with cluster.scan() if causes else contextlib.nullcontext():
        found = await cluster.call_all(calls.SUMMARIZE_DEAD_LETTERS, request)
    groups: dict[str, DeadLetterGroupView] = {}
    topics, reasons = Counter[str](), Counter[str]()
    for _, reply in found.answers:
        for counts in reply.groups:
            if access.allows_group(READS, counts.group):
                _add_counts(groups, counts)
        for cause in reply.causes:
            if access.allows_group(READS, cause.group):
                topics[cause.origin_topic] += cause.count
                reasons[cause.reason.upper()] += cause.count
    ends = [one.deleted_from_at_ms for one in groups.values() if one.deleted_from_at_ms]
    return DeadLetterSummaryView(
        groups=sorted(groups.values(), key=lambda one: (-one.open, one.group)),
        topics=[DeadLetterCountView(topic=name, open=n) for name, n in topics.most_common()],
        reasons=[
            DeadLetterCountView(reason=DeadLetterReason(name), open=n)
            for name, n in reasons.most_common()
        ],
        deleted_from_at_ms=min(ends, default=None),
        partial=any(reply.is_partial for _, reply in found.answers) or None,
        unreachable=found.unreachable or None,
    )


def _add_counts(groups: dict[str, DeadLetterGroupView], counts: pb.DeadLetterCounts) -> None:
    """Add the numbers of a broker group to those of the consumer group."""
    known = groups.setdefault(
        counts.group, DeadLetterGroupView(group=counts.group, open=0, replayed=0, discarded=0)
    )
    known.open += counts.open
    known.replayed += counts.replayed
    known.discarded += counts.discarded
    oldest = (known.oldest_open_at_ms, counts.oldest_open_at_ms)
    known.oldest_open_at_ms = min(filter(None, oldest), default=None)
    deleted = (known.deleted_from_at_ms, counts.deleted_from_at_ms)
    known.deleted_from_at_ms = min(filter(None, deleted), default=None)


@router.get("/groups/{group}/dead-letters/{letter_id}", response_model_exclude_none=True)
async def get_dead_letter(
    group: GroupName, letter_id: LetterIdPath, cluster: Cluster, access: Access, _noted: NotedRead
) -> DeadLetterDetailView:
    """Show a dead letter with its message. The body needs Sub on the consumer group."""
    one = parse_letter_id(letter_id)
    async with cluster.large_read():
        found = await read_letter(cluster, group, one)
        is_hidden = not access.allows_group(Action.SUB, group)
        return dead_letter_detail_of(found, broker=one.broker, is_hidden=is_hidden)
