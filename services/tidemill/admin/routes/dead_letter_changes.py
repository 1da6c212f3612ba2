"""Dead letters: replay, discard and copy them."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Response

from tidemill.admin.audit.author import PUB, Author
from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import UNREACHABLE_ERRORS, Brokers
from tidemill.admin.http.request_access import READS, RequestAccess
from tidemill.admin.json.bulk_changes import IDS_MAX
from tidemill.admin.json.dead_letters import (
    CopyTarget,
    DeadLetterChangeView,
    DeadLetterCopyRequest,
    DeadLetterCopyView,
    DeadLetterOutcome,
    DeadLetterOutcomeView,
    DeadLettersRequest,
)
from tidemill.admin.messages.compose import ComposedMessage
from tidemill.admin.messages.dead_letter_copies import changed_message
from tidemill.admin.messages.dead_letter_operations import settle_matching
from tidemill.admin.messages.letter_ids import LetterId, parse_letter_id, read_letter
from tidemill.admin.messages.operation_starts import BulkCaller
from tidemill.admin.messages.store import store
from tidemill.admin.routes import (
    Access,
    Caller,
    ChangeAuthor,
    Cluster,
    DryRun,
    GroupName,
    MessageComposer,
    SendLimits,
)
from tidemill.admin.routes.dead_letters import LetterIdPath
from tidemill.admin.routes.messages import MessageRoute
from tidemill.admin.routes.operation_keys import (
    CallerOfBulk,
    answer_begun,
    begun_responses,
    require_no_key,
)
from tidemill.common.errors import BadRequest, BrokerGroupNotFound, Conflict
from tidemill.security.acl import Action, group_resource, topic_resource
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

router = APIRouter(tags=["dead letters"], route_class=MessageRoute)

_REPLAY, _DISCARD = pb.DEAD_LETTER_ACTION_REPLAY, pb.DEAD_LETTER_ACTION_DISCARD
_KINDS: Final = {_REPLAY: pb.OPERATION_KIND_REPLAY, _DISCARD: pb.OPERATION_KIND_DISCARD}
BEGUN: Final = begun_responses(DeadLetterChangeView)


@router.post(
    "/groups/{group}/dead-letters:replay", response_model_exclude_none=True, responses=BEGUN
)
async def replay_dead_letters(
    group: GroupName,
    wanted: DeadLettersRequest,
    cluster: Cluster,
    caller: CallerOfBulk,
    response: Response,
    dry_run: DryRun = False,
) -> DeadLetterChangeView:
    """Give dead letters to their consumer group again, and to no other consumer group.

    A replayed message begins with attempt 1, and is as it was. It is replayed at most once: a
    repeated call has the outcome ALREADY_REPLAYED. If the group fails the message again, it becomes
    a new dead letter.

    A filter begins an operation: first a dry run with the filter, which counts, then the call with
    its `asOfMs` and with `maxCount`. The header `Idempotency-Key` makes repeats safe.
    """
    return await _change(cluster, group, wanted, _REPLAY, caller, response, is_dry=dry_run)


@router.post(
    "/groups/{group}/dead-letters:discard", response_model_exclude_none=True, responses=BEGUN
)
async def discard_dead_letters(
    group: GroupName,
    wanted: DeadLettersRequest,
    cluster: Cluster,
    caller: CallerOfBulk,
    response: Response,
    dry_run: DryRun = False,
) -> DeadLetterChangeView:
    """Mark dead letters as done without a replay. Retention deletes their messages later.

    A discarded dead letter cannot be replayed. A repeated call changes nothing. A filter begins an
    operation, as for a replay.
    """
    return await _change(cluster, group, wanted, _DISCARD, caller, response, is_dry=dry_run)


async def _change(
    cluster: Brokers,
    group: str,
    wanted: DeadLettersRequest,
    action: pb.DeadLetterAction.ValueType,
    caller: BulkCaller,
    response: Response,
    *,
    is_dry: bool,
) -> DeadLetterChangeView:
    if wanted.filter is None:
        require_no_key(caller)
        return await _settle(cluster, group, wanted, action, caller, is_dry=is_dry)
    kind = _KINDS[action]
    view = await settle_matching(cluster, group, wanted, kind, caller, is_dry=is_dry)
    answer_begun(view, response)
    return view


async def _settle(
    cluster: Brokers,
    group: str,
    wanted: DeadLettersRequest,
    action: pb.DeadLetterAction.ValueType,
    caller: BulkCaller,
    *,
    is_dry: bool,
) -> DeadLetterChangeView:
    """Settle dead letters at their broker groups, one after the other."""
    texts = wanted.ids or []
    if not 1 <= len(texts) <= IDS_MAX:
        raise BadRequest(f"{len(texts)} ids; 1 to {IDS_MAX} are allowed")
    ids = [parse_letter_id(one) for one in texts]
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
            requested_by=caller.name,
            audit=caller.author.of(f"Group:{group}"),
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
    shown = [_outcome(text, one, outcomes) for text, one in zip(texts, ids, strict=True)]
    effect = DeadLetterOutcome.REPLAYED if action == _REPLAY else DeadLetterOutcome.DISCARDED
    return DeadLetterChangeView(
        dry_run=is_dry,
        by=caller.name,
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
    to a topic is a send, which needs the right Pub on the topic, and Sub on the consumer group,
    because it shows the message to consumers of the topic. The dead letter stays as it is, or is
    discarded after the send.
    """
    one = parse_letter_id(letter_id)
    if changes.to is CopyTarget.TOPIC:
        access.require(Action.SUB, group_resource(group))
    async with cluster.large_read():
        found = await read_letter(cluster, group, one)
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
    _, stored = await store(cluster, request, message_group, message_id=message_id, dedup_key=key)
    if stored.HasField("repeat"):
        raise Conflict(
            f"message {stored.repeat.message_id} of topic {topic} has the dedup key of the copy, so"
            f" the copy is not stored, and the dead letter stays as it is; give the copy"
            f" another key, or none"
        )


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
