"""Topics: list, create, change, show and delete them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Final

from fastapi import APIRouter, Query

from tidemill.admin.activity.rows import (
    TOPIC_FIELDS,
    all_unreachable,
    number_of_topic,
    sampled_at_ms,
    topic_numbers,
)
from tidemill.admin.activity.sampler import Reading
from tidemill.admin.audit.author import DELETE
from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import UNREACHABLE_ERRORS, Brokers
from tidemill.admin.cluster.configuration import read_configuration
from tidemill.admin.cluster.proxies import list_client_ids
from tidemill.admin.http.paging import PAGE_SIZE, NameCursor, PageSize, page_of
from tidemill.admin.http.preconditions import Matching, Tagging, config_tag
from tidemill.admin.http.put_rights import allowed_existence, existence_refusals, note_put
from tidemill.admin.http.request_access import READS, RequestAccess
from tidemill.admin.http.sorting import PREFIX, first_by, of_prefix, sort_query
from tidemill.admin.json import render
from tidemill.admin.json.activity import TopicGroupView
from tidemill.admin.json.levels import levels_of
from tidemill.admin.json.topics import (
    AckedView,
    BrokerGroupPurgeView,
    PurgeSettings,
    RetentionSettings,
    TopicDeletionView,
    TopicDetailsView,
    TopicPageView,
    TopicPurgeView,
    TopicPutView,
    TopicRowView,
    TopicSettings,
    TopicSpreadView,
    TopicTypeView,
    TransactionSettings,
)
from tidemill.admin.routes import (
    Access,
    Activity,
    Caller,
    ChangeAuthor,
    Cluster,
    DryRun,
    Namespace,
    PutTopicName,
    TopicName,
)
from tidemill.common.clock import SystemClock
from tidemill.common.errors import BrokerGroupUnreachable, Conflict, Overloaded, TopicNotFound
from tidemill.message.namespaces import check_namespace
from tidemill.message.resource_names import DEAD_LETTER_TOPIC_PREFIX
from tidemill.security.acl import Action, topic_resource
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

router = APIRouter(tags=["topics"])

# Causes of an unknown number of expired messages. Conflict: a broker group is too old to count.
UNCOUNTED_ERRORS: Final = (
    *UNREACHABLE_ERRORS,
    BrokerGroupUnreachable,
    Conflict,
    Overloaded,
    TopicNotFound,
)

Prefix = Annotated[str, PREFIX]
TopicSort = Annotated[str | None, sort_query(TOPIC_FIELDS)]
IncludeSystem = Annotated[
    bool, Query(alias="includeSystem", description="Also retry and dead-letter topics.")
]


@router.get("/topics", response_model_exclude_none=True)
async def list_topics(
    cluster: Cluster,
    access: Access,
    activity: Activity,
    cursor: NameCursor,
    page_size: PageSize = PAGE_SIZE,
    include_system: IncludeSystem = False,
    namespace: Namespace = "",
    prefix: Prefix = "",
    sort: TopicSort = None,
) -> TopicPageView:
    """List topics with their numbers, ordered by name or by a number.

    While the home is unreachable, the other broker groups answer with their copies.
    """
    check_namespace(namespace)
    found = await read_configuration(cluster, with_system=include_system)
    shown = [topic for topic in found.topics if access.allows_topic(READS, topic.name)]
    wanted, reading = of_prefix(shown, prefix, namespace=namespace), activity.read()
    if sort is None:
        page, token = page_of(wanted, page_size, cursor)
    else:
        number_of = functools.partial(number_of_topic, reading)
        page, token = first_by(wanted, sort, number_of, size=page_size, token=cursor.token), None
    return TopicPageView(
        topics=[
            TopicRowView(**dict(render.topic_of(topic)), **dict(topic_numbers(reading, topic.name)))
            for topic in page
        ],
        next_page_token=token,
        sampled_at_ms=sampled_at_ms(reading),
        unreachable=all_unreachable(reading, found.unreachable),
    )


@router.put("/topics/{topic}", response_model_exclude_none=True)
async def put_topic(
    topic: PutTopicName,
    settings: TopicSettings,
    cluster: Cluster,
    access: Access,
    caller: Caller,
    author: ChangeAuthor,
    match: Matching,
    dry_run: DryRun = False,
) -> TopicPutView:
    """Create or change a topic.

    Without `force`, the type of a topic with messages does not change. Each broker group has its
    own dead-letter topics: their retention changes at all broker groups, or at none while one is
    unreachable.
    """
    retention = _retention_change(settings.retention)
    resource = topic_resource(topic)
    if retention is not None and topic.startswith(DEAD_LETTER_TOPIC_PREFIX):
        access.require(Action.UPDATE, resource)
        return await _put_dead_letter_topic(
            cluster, topic, settings, author.of(f"Topic:{topic}"), caller, is_dry=dry_run
        )
    existence = allowed_existence(access, resource, is_new=match.is_new)
    kind = settings.message_type
    may_exist = existence != pb.EXISTENCE_MUST_BE_NEW
    if kind is not None and not settings.force and may_exist:
        await _check_empty(cluster, topic, kind)
    request = pb.PutTopicRequest(
        name=topic,
        type=pb.TopicType.Value(f"TOPIC_TYPE_{kind.value}") if kind else pb.TOPIC_TYPE_UNSPECIFIED,
        queues=settings.queues or 0,
        delivery_spread_ms=settings.delivery_spread_ms,
        retention=retention,
        transaction=_policy_change(settings.transaction),
        dedup=_dedup_change(settings),
        force=settings.force,
        existence=existence,
        expected=match.wire,
        dry_run=dry_run,
        requested_by=caller,
        audit=author.of(f"Topic:{topic}"),
    )
    with existence_refusals(access, resource):
        reply = await (await cluster.home()).call(calls.PUT_TOPIC, request)
    put = _put_view(reply)
    if dry_run:
        put.expired_messages = await _count_expired(cluster, reply)
    else:
        match.answer(config_tag(reply.topic))
    note_put(access, resource, is_new=put.is_new)
    return put


async def _count_expired(cluster: Brokers, reply: pb.PutTopicReply) -> int | None:
    """Return how many messages are older than a planned retention time; None: unknown.

    Broker groups keep other messages for their limits of bytes, which are not counted.
    """
    kept_ms, before_ms = reply.topic.retention.ms, reply.before.retention.ms
    if kept_ms <= 0 or kept_ms == before_ms or not reply.HasField("before"):
        return None
    request = pb.PurgeTopicRequest(
        name=reply.topic.name,
        before_timestamp_ms=max(SystemClock().wall_ms() - kept_ms, 0),
        dry_run=True,
    )
    try:
        found = await cluster.call_all(calls.PURGE_TOPIC, request)
    except UNCOUNTED_ERRORS:
        return None
    return None if found.unreachable else sum(one.messages for _, one in found.answers)


def _put_view(reply: pb.PutTopicReply) -> TopicPutView:
    put = TopicPutView(
        is_new=not reply.HasField("before"), **render.topic_of(reply.topic).model_dump()
    )
    if not put.is_new and reply.before != reply.topic:
        put.before = render.topic_of(reply.before)
    put.warning = reply.warning or None
    return put


def _retention_change(settings: RetentionSettings | None) -> pb.TopicRetentionChange | None:
    if settings is None:
        return None
    given = settings.model_fields_set  # a field that is null becomes the default
    return pb.TopicRetentionChange(
        ms=settings.ms or 0 if "ms" in given else None,
        bytes=settings.bytes or 0 if "bytes" in given else None,
        frees_acked=settings.acked not in {None, AckedView.KEEP} if "acked" in given else None,
    )


def _policy_change(settings: TransactionSettings | None) -> pb.TransactionPolicyChange | None:
    if settings is None:
        return None
    return pb.TransactionPolicyChange(
        first_check_ms=settings.first_check_ms,
        period_ms=settings.period_ms,
        attempts=settings.attempts,
    )


def _dedup_change(settings: TopicSettings) -> pb.DedupPolicyChange | None:
    if "dedup" not in settings.model_fields_set:
        return None
    dedup = settings.dedup
    if dedup is None:
        return pb.DedupPolicyChange(is_off=True)
    shares_rest = "memory_bytes" in dedup.model_fields_set
    return pb.DedupPolicyChange(
        window_ms=dedup.window_ms,
        key_from=None if dedup.key_from is None else render.KEY_SOURCES[dedup.key_from],
        mode=None if dedup.mode is None else render.DEDUP_MODES[dedup.mode],
        max_wait_ms=dedup.max_wait_ms,
        memory_bytes=dedup.memory_bytes or 0 if shares_rest else None,
    )


async def _put_dead_letter_topic(
    cluster: Brokers,
    topic: str,
    settings: TopicSettings,
    author: pb.ChangeAuthor,
    caller: str,
    *,
    is_dry: bool,
) -> TopicPutView:
    others = settings.model_fields_set - {"retention"}
    if others:
        raise Conflict("retry and dead-letter topics are managed by the broker: set only retention")

    def request(*, is_dry: bool) -> pb.PutTopicRequest:
        change = _retention_change(settings.retention)
        return pb.PutTopicRequest(
            name=topic, retention=change, dry_run=is_dry, requested_by=caller, audit=author
        )

    answers = await cluster.change_all(
        calls.PUT_TOPIC, dry_run=request(is_dry=True), request=request(is_dry=is_dry)
    )
    return _put_view(answers[0].value)


@router.get("/topics/{topic}", response_model_exclude_none=True)
async def get_topic(
    topic: TopicName, cluster: Cluster, access: Access, activity: Activity, match: Tagging
) -> TopicDetailsView:
    """Show a topic, its numbers and its queues at all broker groups.

    A PRIORITY topic also has the progress of its consumer groups in each level, over all reachable
    broker groups.
    """
    asked = pb.GetTopicStatusRequest(name=topic, with_readers=True)
    found = await cluster.call_all(calls.GET_TOPIC_STATUS, asked)
    config, reading = render.topic_of(found.answers[0].value.topic), activity.read()
    match.answer(config_tag(found.answers[0].value.topic))
    return TopicDetailsView(
        **dict(config),
        **dict(topic_numbers(reading, config.name)),
        groups=_groups_of(reading, config.name, access),
        sampled_at_ms=sampled_at_ms(reading),
        queue_status=[
            render.queue_of(queue, broker)
            for broker, status in found.answers
            for queue in status.queues
        ],
        levels=levels_of(
            [status for _, status in found.answers],
            is_shown=lambda group: access.allows_group(READS, group),
        ),
        unreachable=all_unreachable(reading, found.unreachable),
    )


def _groups_of(reading: Reading, topic: str, access: RequestAccess) -> list[TopicGroupView] | None:
    """Return the consumer groups of a topic that the caller may see; None: unknown."""
    found = None if reading.numbers is None else reading.numbers.topics.get(topic)
    if found is None:
        return None
    return [
        TopicGroupView(name=name, lag=lag)
        for name, lag in sorted(found.lags.items())
        if access.allows_group(READS, name)
    ]


@router.delete("/topics/{topic}", response_model_exclude_none=True)
async def delete_topic(
    topic: TopicName,
    cluster: Cluster,
    access: Access,
    caller: Caller,
    author: ChangeAuthor,
    match: Matching,
    dry_run: DryRun = False,
) -> TopicDeletionView:
    """Delete a topic with its messages.

    The home deletes it first, and the other broker groups as soon as the home reaches them. Each
    broker group has its own dead-letter topics: these are deleted at all broker groups, or at none
    while one is unreachable.
    """
    planned = pb.DeleteTopicRequest(name=topic, dry_run=True, requested_by=caller)
    request = pb.DeleteTopicRequest(
        name=topic, requested_by=caller, audit=author.of(f"Topic:{topic}", DELETE)
    )
    clients = await list_client_ids(
        cluster, pb.ListClientsRequest(topic=topic, owner=access.client_owner)
    )
    found = await cluster.call_all(calls.DELETE_TOPIC, planned)
    if not dry_run and topic.startswith(DEAD_LETTER_TOPIC_PREFIX):
        await cluster.change_all(calls.DELETE_TOPIC, dry_run=planned, request=request)
    elif not dry_run:
        if match.wire is not None:
            request.expected.CopyFrom(match.wire)
        await (await cluster.home()).call(calls.DELETE_TOPIC, request)
    replies = [reply for _, reply in found.answers]
    return TopicDeletionView(
        dry_run=dry_run,
        by=caller,
        topic=render.topic_of(replies[0].topic),
        messages=sum(reply.messages for reply in replies),
        delayed_messages=sum(reply.delayed_messages for reply in replies),
        groups=_shown_groups(access, replies),
        clients=clients,
        unreachable=found.unreachable or None,
    )


@router.post("/topics/{topic}:purge", response_model_exclude_none=True)
async def purge_topic(
    topic: TopicName,
    settings: PurgeSettings,
    cluster: Cluster,
    access: Access,
    caller: Caller,
    author: ChangeAuthor,
    match: Matching,
    dry_run: DryRun = False,
) -> TopicPurgeView:
    """Remove messages of a topic, read or not, at all broker groups.

    Messages in flight may still be acked; they are not delivered again. Delayed messages stay.
    While a broker group is unreachable, nothing is removed.
    """

    def request(*, is_dry: bool) -> pb.PurgeTopicRequest:
        return pb.PurgeTopicRequest(
            name=topic,
            before_timestamp_ms=settings.before_timestamp_ms,
            queue_id=settings.queue,
            with_retries=settings.include_retries,
            expected=match.wire,
            dry_run=is_dry,
            requested_by=caller,
            audit=author.of(f"Topic:{topic}", DELETE),
        )

    planned, unreachable = request(is_dry=True), None
    if dry_run:
        answers, unreachable = await cluster.call_all(calls.PURGE_TOPIC, planned)
    else:
        answers = await cluster.change_all(
            calls.PURGE_TOPIC,
            dry_run=planned,
            request=request(is_dry=False),
            home_first=match.expected is not None,
        )
    replies = [reply for _, reply in answers]
    return TopicPurgeView(
        dry_run=dry_run,
        by=caller,
        topic=render.topic_of(replies[0].topic),
        broker_groups=[
            BrokerGroupPurgeView(broker=broker, messages=reply.messages, bytes=reply.size_bytes)
            for broker, reply in answers
        ],
        delayed_messages=sum(reply.delayed_messages for reply in replies),
        groups=_shown_groups(access, replies),
        unreachable=unreachable or None,
    )


@router.post("/topics/{topic}:spread", response_model_exclude_none=True)
async def spread_topic(
    topic: TopicName,
    cluster: Cluster,
    caller: Caller,
    author: ChangeAuthor,
    match: Matching,
    dry_run: DryRun = False,
) -> TopicSpreadView:
    """Make all active broker groups owners of the dedup keys of a topic.

    Keys that move are looked up at their old owners until their windows are over. The answer is 409
    if the topic has no deduplication, or while an earlier spread is open.
    """
    request = pb.SpreadTopicRequest(
        name=topic,
        expected=match.wire,
        dry_run=dry_run,
        requested_by=caller,
        audit=author.of(f"Topic:{topic}"),
    )
    reply = await (await cluster.home()).call(calls.SPREAD_TOPIC, request)
    is_changed = reply.topic != reply.before
    return TopicSpreadView(
        dry_run=dry_run,
        by=caller,
        topic=render.topic_of(reply.topic),
        before=render.topic_of(reply.before) if is_changed else None,
    )


def _shown_groups(
    access: RequestAccess, replies: Sequence[pb.DeleteTopicReply | pb.PurgeTopicReply]
) -> list[str]:
    groups = {group for reply in replies for group in reply.groups}
    return sorted(group for group in groups if access.allows_group(READS, group))


async def _check_empty(cluster: Brokers, name: str, kind: TopicTypeView) -> None:
    """Raise Conflict if a topic of another type has messages at any broker group.

    Raises BrokerGroupUnreachable if a broker group is unreachable, which may have some.
    """
    try:
        found = await cluster.call_all(
            calls.DELETE_TOPIC, pb.DeleteTopicRequest(name=name, dry_run=True)
        )
    except TopicNotFound:
        return
    topic = render.topic_of(found.answers[0].value.topic)
    if topic.message_type is kind:
        return
    used = [
        f"{reply.messages} messages and {reply.delayed_messages} delayed ones at {broker}"
        for broker, reply in found.answers
        if reply.messages or reply.delayed_messages
    ]
    change = f"its type changes from {topic.message_type} to {kind} only with force (--force)"
    if used:
        raise Conflict(f"topic {name!r} has {', '.join(used)}: {change}")
    if found.unreachable:
        raise BrokerGroupUnreachable(
            f"{', '.join(found.unreachable)} cannot be reached and may have messages of topic"
            f" {name!r}: {change}"
        )
