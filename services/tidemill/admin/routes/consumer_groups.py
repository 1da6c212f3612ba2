"""Consumer groups: settings, progress, pause and deletion."""

from __future__ import annotations

import functools
from typing import Annotated, Any, Final

from fastapi import APIRouter, Body

from tidemill.admin.activity.numbers import GroupState
from tidemill.admin.activity.rows import (
    GROUP_FIELDS,
    all_unreachable,
    group_numbers,
    number_of_group,
    sampled_at_ms,
)
from tidemill.admin.activity.sampler import Reading
from tidemill.admin.audit.author import DELETE
from tidemill.admin.cluster import calls
from tidemill.admin.cluster.configuration import read_configuration
from tidemill.admin.cluster.proxies import list_client_ids
from tidemill.admin.http.paging import PAGE_SIZE, NameCursor, PageSize, page_of
from tidemill.admin.http.preconditions import Matching, Tagging, config_tag
from tidemill.admin.http.put_rights import allowed_existence, existence_refusals, note_put
from tidemill.admin.http.request_access import READS
from tidemill.admin.http.sorting import PREFIX, first_by, of_prefix, sort_query
from tidemill.admin.json import render
from tidemill.admin.json.conflicts import conflicts_of, topic_filters_of
from tidemill.admin.json.consumer_groups import (
    ConsumerGroupDeletionView,
    ConsumerGroupDetailView,
    ConsumerGroupPageView,
    ConsumerGroupProgressView,
    ConsumerGroupPutView,
    ConsumerGroupRowView,
    ConsumerGroupSettings,
    ConsumerGroupView,
    DeliveryOrder,
    GroupPauseRequest,
)
from tidemill.admin.routes import (
    Access,
    Activity,
    Caller,
    ChangeAuthor,
    Cluster,
    DryRun,
    GroupName,
    Namespace,
)
from tidemill.common.clock import SystemClock
from tidemill.message.namespaces import check_namespace
from tidemill.security.acl import group_resource
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

router = APIRouter(tags=["groups"])

PAUSE_MS: Final = 86_400_000  # default

Prefix = Annotated[str, PREFIX]
GroupSort = Annotated[str | None, sort_query(GROUP_FIELDS)]


@router.get("/groups", response_model_exclude_none=True)
async def list_groups(
    cluster: Cluster,
    access: Access,
    activity: Activity,
    cursor: NameCursor,
    page_size: PageSize = PAGE_SIZE,
    namespace: Namespace = "",
    prefix: Prefix = "",
    sort: GroupSort = None,
) -> ConsumerGroupPageView:
    """List consumer groups with their numbers, ordered by name or by a number.

    While the home is unreachable, the other broker groups answer with their copies.
    """
    check_namespace(namespace)
    found = await read_configuration(cluster)
    shown = [group for group in found.groups if access.allows_group(READS, group.name)]
    wanted, reading = of_prefix(shown, prefix, namespace=namespace), activity.read()
    if sort is None:
        page, token = page_of(wanted, page_size, cursor)
    else:
        number_of = functools.partial(number_of_group, reading)
        page, token = first_by(wanted, sort, number_of, size=page_size, token=cursor.token), None
    return ConsumerGroupPageView(
        groups=[
            ConsumerGroupRowView(**_with_numbers(render.group_of(group), reading)) for group in page
        ],
        next_page_token=token,
        sampled_at_ms=sampled_at_ms(reading),
        unreachable=all_unreachable(reading, found.unreachable),
    )


@router.put("/groups/{group}", response_model_exclude_none=True)
async def put_group(
    group: GroupName,
    settings: ConsumerGroupSettings,
    cluster: Cluster,
    access: Access,
    caller: Caller,
    author: ChangeAuthor,
    match: Matching,
    dry_run: DryRun = False,
) -> ConsumerGroupPutView:
    """Create or change a consumer group. The answer has the previous settings after a change."""
    resource = group_resource(group)
    request = pb.PutGroupRequest(
        name=group,
        existence=allowed_existence(access, resource, is_new=match.is_new),
        expected=match.wire,
        dry_run=dry_run,
        max_attempts=settings.max_attempts or 0,
        start_from_latest=None if settings.start_from is None else settings.start_from == "latest",
        requested_by=caller,
        audit=author.of(f"Group:{group}"),
    )
    if settings.priority_factor is not None:
        request.priority_factor = settings.priority_factor
    if settings.delivery_order is not None:
        is_fifo = settings.delivery_order is DeliveryOrder.FIFO
        request.delivery_order = (
            pb.DELIVERY_ORDER_ORDERED if is_fifo else pb.DELIVERY_ORDER_CONCURRENT
        )
    if settings.retry is not None and (policy := settings.retry.exponential) is not None:
        request.exponential.initial_ms = policy.initial_ms
        request.exponential.max_ms = policy.max_ms
        request.exponential.multiplier = policy.multiplier
    if settings.retry is not None and settings.retry.customized is not None:
        request.customized.next_ms.extend(settings.retry.customized.next_ms)
    with existence_refusals(access, resource):
        reply = await (await cluster.home()).call(calls.PUT_GROUP, request)
    put = ConsumerGroupPutView(
        is_new=not reply.HasField("before"), **render.group_of(reply.group).model_dump()
    )
    if not put.is_new and reply.before != reply.group:
        put.before = render.group_of(reply.before)
    if not dry_run:
        match.answer(config_tag(reply.group))
    note_put(access, resource, is_new=put.is_new)
    return put


@router.get("/groups/{group}/progress", response_model_exclude_none=True)
async def get_progress(group: GroupName, cluster: Cluster) -> ConsumerGroupProgressView:
    """Show the progress of a group: lag, messages in flight and oldest unacknowledged message.

    The answer has sums by topic and in total, over all reachable broker groups, and the names of
    the unreachable ones. A FIFO group also has locked queues: a batch in flight blocks its queue.
    """
    return render.progress_of(
        await cluster.call_all(calls.GET_GROUP_PROGRESS, pb.GetGroupProgressRequest(name=group))
    )


@router.get("/groups/{group}", response_model_exclude_none=True)
async def get_group(
    group: GroupName, cluster: Cluster, access: Access, activity: Activity, match: Tagging
) -> ConsumerGroupDetailView:
    """Show a consumer group, with its numbers, and the filters and conflicts of its consumers."""
    found = await cluster.call_home(
        calls.GET_GROUP_PROGRESS, pb.GetGroupProgressRequest(name=group)
    )
    asked = pb.ListConflictsRequest(groups=[group], with_single_filters=True)
    answers = await cluster.call_all(calls.LIST_CONFLICTS, asked)
    config, reading = render.group_of(found.answers[0].value.group), activity.read()
    match.answer(config_tag(found.answers[0].value.group))
    return ConsumerGroupDetailView(
        **_with_numbers(config, reading),
        sampled_at_ms=sampled_at_ms(reading),
        conflicts=conflicts_of(answers) or None,
        filters=[
            each for each in topic_filters_of(answers) if access.allows_topic(READS, each.topic)
        ]
        or None,
        unreachable=all_unreachable(reading, found.unreachable, answers.unreachable),
    )


@router.post("/groups/{group}:pause", response_model_exclude_none=True)
async def pause_group(
    group: GroupName,
    wish: Annotated[GroupPauseRequest, Body(default_factory=GroupPauseRequest)],
    cluster: Cluster,
    caller: Caller,
    author: ChangeAuthor,
    match: Matching,
    is_dry: DryRun = False,
) -> ConsumerGroupView:
    """Pause a consumer group: its polls find no message until the end of the pause.

    Consumers stay connected. They may still ack and renew what they have. Messages wait, and count
    in the lag. A second call changes the end and the reason.
    """
    until_ms = wish.until_ms or SystemClock().wall_ms() + PAUSE_MS
    request = pb.PauseGroupRequest(
        name=group,
        pause=pb.GroupPause(until_ms=until_ms, by=caller, reason=wish.reason),
        expected=match.wire,
        dry_run=is_dry,
        requested_by=caller,
        audit=author.of(f"Group:{group}"),
    )
    reply = await (await cluster.home()).call(calls.PAUSE_GROUP, request)
    return render.group_of(reply.group)


@router.post("/groups/{group}:resume", response_model_exclude_none=True)
async def resume_group(
    group: GroupName,
    cluster: Cluster,
    caller: Caller,
    author: ChangeAuthor,
    match: Matching,
    is_dry: DryRun = False,
) -> ConsumerGroupView:
    """End the pause of a consumer group. A group that is not paused stays as it is."""
    request = pb.PauseGroupRequest(
        name=group,
        expected=match.wire,
        dry_run=is_dry,
        requested_by=caller,
        audit=author.of(f"Group:{group}"),
    )
    reply = await (await cluster.home()).call(calls.PAUSE_GROUP, request)
    return render.group_of(reply.group)


@router.delete("/groups/{group}", response_model_exclude_none=True)
async def delete_group(
    group: GroupName,
    cluster: Cluster,
    access: Access,
    caller: Caller,
    author: ChangeAuthor,
    match: Matching,
    dry_run: DryRun = False,
) -> ConsumerGroupDeletionView:
    """Delete a consumer group with its progress. Its dead letters remain."""
    clients = await list_client_ids(
        cluster, pb.ListClientsRequest(group=group, owner=access.client_owner)
    )
    found = await cluster.call_all(
        calls.DELETE_GROUP, pb.DeleteGroupRequest(name=group, dry_run=True, requested_by=caller)
    )
    if not dry_run:
        request = pb.DeleteGroupRequest(
            name=group,
            expected=match.wire,
            requested_by=caller,
            audit=author.of(f"Group:{group}", DELETE),
        )
        await (await cluster.home()).call(calls.DELETE_GROUP, request)
    replies = [reply for _, reply in found.answers]
    topics = {topic for reply in replies for topic in reply.topics}
    return ConsumerGroupDeletionView(
        dry_run=dry_run,
        by=caller,
        group=render.group_of(replies[0].group),
        topics=sorted(topic for topic in topics if access.allows_topic(READS, topic)),
        lag=sum(reply.lag for reply in replies),
        clients=clients,
        unreachable=found.unreachable or None,
    )


def _with_numbers(group: ConsumerGroupView, reading: Reading) -> dict[str, Any]:
    """Return the fields of a consumer group and its numbers."""
    values = {**dict(group), **dict(group_numbers(reading, group.name))}
    return values if group.paused is None else {**values, "state": GroupState.PAUSED}
