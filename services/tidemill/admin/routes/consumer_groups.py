"""Consumer groups."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Response

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import BrokerGroupClient, Brokers
from tidemill.admin.cluster.configuration import read_configuration
from tidemill.admin.http.paging import PAGE_SIZE, PageSize, PageToken, page_of
from tidemill.admin.json import render
from tidemill.admin.json.consumer_groups import (
    ConsumerGroupDeletionView,
    ConsumerGroupPageView,
    ConsumerGroupProgressView,
    ConsumerGroupPutView,
    ConsumerGroupSettings,
    ConsumerGroupView,
    DeliveryOrder,
    OffsetResetRequest,
    OffsetResetView,
    PullOffsetDeletionRequest,
    PullOffsetDeletionView,
    PullOffsetView,
)
from tidemill.admin.json.deliveries import LockReleaseRequest, LockReleaseView
from tidemill.admin.json.schema import millis_of
from tidemill.admin.routes import Caller, Cluster, DryRun, json_of
from tidemill.common.errors import BrokerGroupUnreachable, Conflict
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

router = APIRouter(tags=["groups"])

Name = Annotated[str, Path(description="Name of the consumer group.")]


@router.get("/groups", response_model_exclude_none=True)
async def list_groups(
    cluster: Cluster, page_size: PageSize = PAGE_SIZE, page_token: PageToken = None
) -> ConsumerGroupPageView:
    """List consumer groups by name.

    While the home is away it is what the other broker groups have heard of it.
    """
    found = await read_configuration(cluster)
    page, token = page_of(found.groups, page_size, page_token)
    return ConsumerGroupPageView(
        groups=[render.group_of(group) for group in page],
        next_page_token=token,
        unreachable=found.unreachable,
    )


@router.put("/groups/{group}", response_model_exclude_none=True)
async def put_group(
    group: Name, settings: ConsumerGroupSettings, cluster: Cluster, caller: Caller
) -> ConsumerGroupPutView:
    """Create a consumer group, or change one; the answer says which, and what it was."""
    request = pb.PutGroupRequest(
        name=group,
        max_attempts=settings.max_attempts or 0,
        start_from_latest=settings.start_from == "latest",
        requested_by=caller,
    )
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
    reply = await (await cluster.home()).call(calls.PUT_GROUP, request)
    put = ConsumerGroupPutView(
        is_new=not reply.HasField("before"), **render.group_of(reply.group).model_dump()
    )
    if not put.is_new and reply.before != reply.group:
        put.before = render.group_of(reply.before)
    return put


# Before /groups/{group}, whose pattern would not match the second segment but reads the same.
@router.get("/groups/{group}/progress", response_model_exclude_none=True)
async def get_progress(group: Name, cluster: Cluster) -> ConsumerGroupProgressView:
    """Show how far a group is: lag, in flight, oldest unacknowledged, by topic and in total.

    Of a FIFO group also which queues are locked: a batch that is out keeps the rest of its queue.
    It is summed over all broker groups that can be reached, and the others are named.
    """
    return render.progress_of(
        await cluster.ask_all(
            lambda member: member.client.call(
                calls.GET_GROUP_PROGRESS, pb.GetGroupProgressRequest(name=group)
            )
        )
    )


@router.get("/groups/{group}", response_model_exclude_none=True)
async def get_group(group: Name, cluster: Cluster) -> ConsumerGroupView:
    """Show a consumer group."""
    found = await cluster.ask_home(
        lambda member: member.client.call(
            calls.GET_GROUP_PROGRESS, pb.GetGroupProgressRequest(name=group)
        )
    )
    return render.group_of(found.answers[0].value.group)


@router.post("/groups/{group}:resetOffset", response_model_exclude_none=True)
async def reset_offset(
    group: Name,
    reset: OffsetResetRequest,
    cluster: Cluster,
    caller: Caller,
    dry_run: DryRun = False,
) -> OffsetResetView:
    """Let a group go on from another place of a topic, at all broker groups or at none.

    It is a dry run where the query or the body says so.
    Each broker writes one line to its log: from where, to where, and who asked.
    """
    is_dry = dry_run or reset.dry_run
    request = pb.ResetOffsetRequest(
        group=group, topic=reset.topic, dry_run=is_dry, requested_by=caller
    )
    if reset.timestamp is not None:
        request.timestamp_ms = millis_of(reset.timestamp)
    elif reset.timestamp_ms is not None:
        request.timestamp_ms = reset.timestamp_ms
    elif reset.offset is not None:
        request.offset = reset.offset
    elif reset.to == "earliest":
        request.earliest = True
    else:
        request.latest = True
    planned = pb.ResetOffsetRequest()
    planned.CopyFrom(request)
    planned.dry_run = True
    replies = await cluster.change_all(
        check=lambda member: member.client.call(calls.RESET_OFFSET, planned),
        change=lambda member: member.client.call(calls.RESET_OFFSET, request),
    )
    return OffsetResetView(
        dry_run=is_dry,
        by=caller,
        group=group,
        topic=reset.topic,
        queues=[
            render.queue_reset_of(queue, from_offset, broker)
            for broker, reply in replies
            for queue, from_offset in zip(reply.queues, reply.from_offsets, strict=True)
        ],
    )


@router.post("/groups/{group}:forgetPullOffsets")
async def forget_pull_offsets(
    group: Name,
    pulled: PullOffsetDeletionRequest,
    cluster: Cluster,
    caller: Caller,
    dry_run: DryRun = False,
) -> PullOffsetDeletionView:
    """Forget how far a group has pulled a topic, at all broker groups or at none.

    Of the group that an archive tells what it has sealed: its topic is kept for it no more. It is a
    dry run where the query or the body says so. Each broker writes a line to its log.
    """
    is_dry = dry_run or pulled.dry_run

    def request(*, is_dry: bool) -> pb.ForgetPullOffsetsRequest:
        return pb.ForgetPullOffsetsRequest(
            group=group, topic=pulled.topic, dry_run=is_dry, requested_by=caller
        )

    replies = await cluster.change_all(
        check=lambda member: member.client.call(calls.FORGET_PULL_OFFSETS, request(is_dry=True)),
        change=lambda member: member.client.call(calls.FORGET_PULL_OFFSETS, request(is_dry=is_dry)),
    )
    return PullOffsetDeletionView(
        dry_run=is_dry,
        by=caller,
        group=group,
        topic=pulled.topic,
        queues=[
            PullOffsetView(
                broker=broker,
                queue_id=each.queue_id,
                offset=each.offset,
                behind=max(each.max_offset - max(each.offset, each.min_offset), 0),
            )
            for broker, reply in replies
            for each in reply.queues
        ],
    )


@router.post("/groups/{group}:releaseLock", response_model_exclude_none=True)
async def release_lock(
    group: Name, release: LockReleaseRequest, cluster: Cluster, caller: Caller
) -> LockReleaseView:
    """Let the next consumer have what locks a queue of a FIFO group, before its time is up.

    The delivery counts as an attempt, as when its time is up. Until the next one its consumer may
    still ack; then its receipt handles are refused.
    """
    member = await _holder_of(cluster, group, release)
    lock = await member.client.call(
        calls.RELEASE_LOCK,
        pb.ReleaseLockRequest(
            group=group, topic=release.topic, queue_id=release.queue, asked_by=caller
        ),
    )
    released = render.lock_of(release.topic, release.queue, lock, member.name)
    return LockReleaseView(by=caller, group=group, released=released)


@router.delete(
    "/groups/{group}",
    status_code=HTTPStatus.NO_CONTENT,
    response_model=None,
    responses={200: {"description": "The dry run.", "model": ConsumerGroupDeletionView}},
)
async def delete_group(
    group: Name, cluster: Cluster, caller: Caller, dry_run: DryRun = False
) -> Response | None:
    """Delete a consumer group with its progress; its dead letters stay."""
    request = pb.DeleteGroupRequest(name=group, dry_run=dry_run, requested_by=caller)
    if not dry_run:
        await (await cluster.home()).call(calls.DELETE_GROUP, request)
        return None
    planned = await cluster.ask_all(lambda member: member.client.call(calls.DELETE_GROUP, request))
    replies = [reply for _, reply in planned.answers]
    deletion = ConsumerGroupDeletionView(
        dry_run=True,
        by=caller,
        group=render.group_of(replies[0].group),
        topics=sorted({topic for reply in replies for topic in reply.topics}),
        lag=sum(reply.lag for reply in replies),
        unreachable=planned.unreachable or None,
    )
    return json_of(deletion)


async def _holder_of(
    cluster: Brokers, group: str, release: LockReleaseRequest
) -> BrokerGroupClient:
    """Return which broker group has a locked queue. Raises Conflict where several have one."""
    members = await cluster.members()
    if release.broker is not None:
        return await cluster.member(release.broker)
    if len(members) == 1:
        return members[0]
    found = await cluster.ask_all(
        lambda member: member.client.call(
            calls.GET_GROUP_PROGRESS, pb.GetGroupProgressRequest(name=group)
        )
    )
    locked = [
        broker
        for broker, progress in found.answers
        for queue in progress.queues
        if queue.topic == release.topic
        and queue.queue_id == release.queue
        and queue.HasField("lock")
    ]
    what = f"queue {release.queue} of {release.topic}"
    if len(locked) > 1:
        raise Conflict(f"{what} is locked at {', '.join(locked)}: name the broker group")
    if found.unreachable:
        raise BrokerGroupUnreachable(
            f"{', '.join(found.unreachable)} cannot be asked whether {what} is locked there: name"
            f" the broker group"
        )
    # Where nobody has it locked the home says what is wrong.
    return await cluster.member(locked[0]) if locked else members[0]
