"""Dead letters: list, count, show, replay, discard and copy them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable
from typing import Annotated, Final, NamedTuple

from fastapi import APIRouter, Depends, Path, Query

from tidemill.admin.audit.access_reports import note_access
from tidemill.admin.audit.author import PUB, Author
from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import UNREACHABLE_ERRORS, BrokerGroupClient, Brokers
from tidemill.admin.http.paging import PAGE_SIZE, PageSize
from tidemill.admin.http.request_access import READS, RequestAccess
from tidemill.admin.json.dead_letters import (
    IDS_MAX,
    LETTER_ID_PATTERN,
    CopyTarget,
    DeadLetterChangeView,
    DeadLetterCopyRequest,
    DeadLetterCopyView,
    DeadLetterCountView,
    DeadLetterDetailView,
    DeadLetterGroupView,
    DeadLetterOutcome,
    DeadLetterOutcomeView,
    DeadLetterPageView,
    DeadLetterReason,
    DeadLettersRequest,
    DeadLetterStateView,
    DeadLetterSummaryView,
)
from tidemill.admin.json.schema import EXACT_MAX, Instant
from tidemill.admin.messages.compose import ComposedMessage
from tidemill.admin.messages.dead_letter_copies import changed_message
from tidemill.admin.messages.dead_letter_pages import (
    Token,
    decode_token,
    encode_token,
    merged,
    request_behind,
)
from tidemill.admin.messages.store import store
from tidemill.admin.messages.views import dead_letter_detail_of, dead_letter_of
from tidemill.admin.routes import (
    Access,
    Caller,
    ChangeAuthor,
    Cluster,
    DryRun,
    GroupName,
    MessageComposer,
    OwnAccessLog,
    SendLimits,
)
from tidemill.admin.routes.messages import MessageRoute
from tidemill.common.errors import BadRequest, BrokerGroupNotFound, MessageNotFound
from tidemill.security.acl import Action, topic_resource
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

router = APIRouter(tags=["dead letters"], route_class=MessageRoute)

CALLS_MAX: Final = 32  # to each broker group, for a page of the dead letters that a user may see
OFFSET_MAX: Final = 2**63 - 1
_REPLAY, _DISCARD = pb.DEAD_LETTER_ACTION_REPLAY, pb.DEAD_LETTER_ACTION_DISCARD

LetterIdPath = Annotated[
    str,
    Path(
        description="Id of the dead letter: its broker group and its offset there.",
        json_schema_extra={"pattern": LETTER_ID_PATTERN},
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


class LetterId(NamedTuple):
    """A dead letter of a consumer group."""

    broker: str
    offset: int


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
    cursors = begin

    def ask(member: BrokerGroupClient) -> Awaitable[pb.ListDeadLettersReply]:
        return member.client.call(
            calls.LIST_DEAD_LETTERS, request_behind(request, cursors, member.name)
        )

    shown: list[tuple[str, pb.DeadLetter]] = []
    unreachable: set[str] = set()
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


@router.get("/dead-letters/summary", response_model_exclude_none=True)
async def summarize_dead_letters(cluster: Cluster, access: Access) -> DeadLetterSummaryView:
    """Count the dead letters of all consumer groups, by group, topic and reason.

    Each broker group reads up to 100,000 open dead letters, the newest of each consumer group
    first. `partial` tells whether there are more.
    """
    request = pb.SummarizeDeadLettersRequest()
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
    one = _parse(letter_id)
    async with cluster.large_read():
        found = await _read(cluster, group, one)
        is_hidden = not access.allows_group(Action.SUB, group)
        return dead_letter_detail_of(found, broker=one.broker, is_hidden=is_hidden)


@router.post("/groups/{group}/dead-letters:replay", response_model_exclude_none=True)
async def replay_dead_letters(
    group: GroupName,
    wanted: DeadLettersRequest,
    cluster: Cluster,
    caller: Caller,
    author: ChangeAuthor,
    dry_run: DryRun = False,
) -> DeadLetterChangeView:
    """Give dead letters to their consumer group again, and to no other consumer group.

    A replayed message begins with attempt 1, and is as it was. It is replayed at most once: a
    repeated call has the outcome ALREADY_REPLAYED. If the group fails the message again, it becomes
    a new dead letter.
    """
    return await _settle(cluster, group, wanted, _REPLAY, author, caller, is_dry=dry_run)


@router.post("/groups/{group}/dead-letters:discard", response_model_exclude_none=True)
async def discard_dead_letters(
    group: GroupName,
    wanted: DeadLettersRequest,
    cluster: Cluster,
    caller: Caller,
    author: ChangeAuthor,
    dry_run: DryRun = False,
) -> DeadLetterChangeView:
    """Mark dead letters as done without a replay. Retention deletes their messages later.

    A discarded dead letter cannot be replayed. A repeated call changes nothing.
    """
    return await _settle(cluster, group, wanted, _DISCARD, author, caller, is_dry=dry_run)


async def _settle(
    cluster: Brokers,
    group: str,
    wanted: DeadLettersRequest,
    action: pb.DeadLetterAction.ValueType,
    author: Author,
    caller: str,
    *,
    is_dry: bool,
) -> DeadLetterChangeView:
    """Settle dead letters at their broker groups, one after the other."""
    if not 1 <= len(wanted.ids) <= IDS_MAX:
        raise BadRequest(f"{len(wanted.ids)} ids; 1 to {IDS_MAX} are allowed")
    ids = [_parse(one) for one in wanted.ids]
    outcomes: dict[LetterId, list[str]] = {}
    warnings: list[str] = []
    unreachable: list[str] = []
    stopped_by = None
    brokers = list(dict.fromkeys(one.broker for one in ids))
    for broker in brokers:
        own = [one for one in ids if one.broker == broker]
        request = pb.SettleDeadLettersRequest(
            group=group,
            action=action,
            offsets=[one.offset for one in own],
            dry_run=is_dry,
            requested_by=caller,
            audit=author.of(f"Group:{group}"),
        )
        try:
            member = await cluster.member(broker)
            reply = await member.client.call(calls.SETTLE_DEAD_LETTERS, request)
        except BrokerGroupNotFound:
            reply = pb.SettleDeadLettersReply(outcomes=["NOT_FOUND"] * len(own))
        except UNREACHABLE_ERRORS:
            if len(brokers) == 1:
                raise
            unreachable.append(broker)
            continue
        for one, outcome in zip(own, reply.outcomes, strict=False):
            outcomes.setdefault(one, []).append(outcome)
        warnings += reply.warnings
        if reply.stopped_by:
            stopped_by = f"{broker}: {reply.stopped_by}"
    shown = [_outcome(text, one, outcomes) for text, one in zip(wanted.ids, ids, strict=True)]
    effect = DeadLetterOutcome.REPLAYED if action == _REPLAY else DeadLetterOutcome.DISCARDED
    return DeadLetterChangeView(
        dry_run=is_dry,
        by=caller,
        group=group,
        count=sum(one.outcome is effect for one in shown),
        outcomes=shown,
        warnings=list(dict.fromkeys(warnings)) or None,
        stopped_by=stopped_by,
        unreachable=unreachable or None,
    )


def _outcome(
    text: str, one: LetterId, outcomes: dict[LetterId, list[str]]
) -> DeadLetterOutcomeView:
    """Take the next outcome of a dead letter, which the request may name twice."""
    left = outcomes.get(one)
    return DeadLetterOutcomeView(id=text, outcome=DeadLetterOutcome(left.pop(0)) if left else None)


@router.post("/groups/{group}/dead-letters/{letter_id}:copy", response_model_exclude_none=True)
async def copy_dead_letter(
    group: GroupName,
    letter_id: LetterIdPath,
    changes: DeadLetterCopyRequest,
    cluster: Cluster,
    access: Access,
    composer: MessageComposer,
    quotas: SendLimits,
    caller: Caller,
    author: ChangeAuthor,
    dry_run: DryRun = False,
) -> DeadLetterCopyView:
    """Copy a dead letter with changes: to its consumer group, or to a topic.

    The copy is a new message with the property TIDEMILL_COPY_OF, the id of the message. A copy to
    the consumer group is a replay: no other group gets it, and the dead letter is REPLAYED. A copy
    to a topic is a send, which needs the right Pub on the topic; the dead letter stays as it is,
    or is discarded after the send.
    """
    one = _parse(letter_id)
    async with cluster.large_read():
        found = await _read(cluster, group, one)
        topic = changes.topic or found.letter.origin_topic
        if changes.to is CopyTarget.TOPIC:
            access.require(Action.PUB, topic_resource(topic))
        new = changed_message(found, changes)
    copied = composer.compose(topic, new)
    view = DeadLetterCopyView(
        dry_run=dry_run,
        by=caller,
        group=group,
        id=letter_id,
        message_id=None if dry_run else copied.message_id,
        topic=topic,
        receivers=[group],
    )
    settlement = pb.SettleDeadLettersRequest(
        group=group,
        offsets=[one.offset],
        dry_run=dry_run,
        requested_by=caller,
        audit=author.of(f"Group:{group}"),
    )
    if changes.to is CopyTarget.GROUP:
        settlement.action, settlement.blob = _REPLAY, copied.blob
        await _settle_copied(cluster, one, settlement, view)
        return view
    view.receivers = await _receivers_of(cluster, access, topic)
    if not dry_run:
        if quotas is not None:
            await quotas.admit(
                user=access.user,
                user_id=access.user_id,
                topic=topic,
                size_bytes=len(copied.blob),
                is_delayed=False,
            )
        await _send(cluster, copied, new.message_group or "", topic, author)
    if changes.discard:
        settlement.action = _DISCARD
        await _settle_copied(cluster, one, settlement, view)
    return view


async def _send(
    cluster: Brokers, copied: ComposedMessage, message_group: str, topic: str, author: Author
) -> None:
    request = pb.StoreMessageRequest(
        topic=topic,
        blob=copied.blob,
        existence=pb.EXISTENCE_MUST_EXIST,
        audit=author.of(f"Topic:{topic}", PUB),
    )
    message_id, key = copied.message_id, copied.dedup_key
    await store(cluster, request, message_group, message_id=message_id, dedup_key=key)


async def _settle_copied(
    cluster: Brokers, one: LetterId, request: pb.SettleDeadLettersRequest, view: DeadLetterCopyView
) -> None:
    member = await cluster.member(one.broker)
    reply = await member.client.call(calls.SETTLE_DEAD_LETTERS, request)
    view.outcome = DeadLetterOutcome(reply.outcomes[0])
    view.warnings = list(reply.warnings) or None
    if view.outcome is not DeadLetterOutcome.REPLAYED and request.action == _REPLAY:
        view.message_id = None  # The copy is not stored.


async def _receivers_of(cluster: Brokers, access: RequestAccess, topic: str) -> list[str]:
    """Return the consumer groups with consumers of a topic, as far as the caller may see them."""
    asked = pb.ListConflictsRequest(with_single_filters=True)
    answers = await cluster.call_all(calls.LIST_CONFLICTS, asked)
    names = {
        each.group
        for _, reply in answers.answers
        for each in reply.conflicts
        if each.topic == topic and each.filters
    }
    return sorted(name for name in names if access.allows_group(READS, name))


async def _read(cluster: Brokers, group: str, one: LetterId) -> pb.GetDeadLetterReply:
    try:
        member = await cluster.member(one.broker)
    except BrokerGroupNotFound as error:
        raise MessageNotFound(f"there is no such dead letter: {error}") from None
    request = pb.GetDeadLetterRequest(group=group, offset=one.offset)
    return await member.client.call(calls.GET_DEAD_LETTER, request)


def _parse(text: str) -> LetterId:
    """Return the broker group and the offset of an id. Raises BadRequest."""
    broker, _, offset = text.rpartition(":")
    if not broker or not offset.isascii() or not offset.isdecimal() or int(offset) > OFFSET_MAX:
        raise BadRequest(
            f"the id of a dead letter is BROKER:OFFSET, as a list shows it, not {text}"
        )
    return LetterId(broker, int(offset))
