"""Consumer groups."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, Request

from tidemill.admin import schemas
from tidemill.admin.paging import PAGE_SIZE, PageSize, PageToken, page_of
from tidemill.admin.routes import Broker
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

router = APIRouter(tags=["groups"])


@router.get("/groups", response_model_exclude_none=True)
async def list_groups(
    broker: Broker, page_size: PageSize = PAGE_SIZE, page_token: PageToken = None
) -> schemas.GroupPage:
    """List consumer groups by name."""
    config = await broker.config()
    page, token = page_of(config.groups, page_size, page_token)
    return schemas.GroupPage(
        groups=[schemas.group_of(group) for group in page], next_page_token=token
    )


@router.put("/groups/{group}", response_model_exclude_none=True)
async def put_group(group: str, settings: schemas.GroupSettings, broker: Broker) -> schemas.Group:
    """Create a consumer group, or change one."""
    request = pb.PutGroupRequest(
        name=group,
        max_attempts=settings.max_attempts or 0,
        start_from_latest=settings.start_from == "latest",
    )
    if settings.delivery_order is not None:
        is_fifo = settings.delivery_order is schemas.DeliveryOrder.FIFO
        request.delivery_order = pb.ORDERED if is_fifo else pb.CONCURRENT
    if settings.retry is not None and (policy := settings.retry.exponential) is not None:
        request.exponential.initial_ms = policy.initial_ms
        request.exponential.max_ms = policy.max_ms
        request.exponential.multiplier = policy.multiplier
    if settings.retry is not None and settings.retry.customized is not None:
        request.customized.next_ms.extend(settings.retry.customized.next_ms)
    return schemas.group_of(await broker.put_group(request))


# Before /groups/{group}, whose pattern would not match the second segment but reads the same.
@router.get("/groups/{group}/progress", response_model_exclude_none=True)
async def get_progress(group: str, broker: Broker) -> schemas.GroupProgress:
    """Show how far a group is: lag, in flight, oldest unacknowledged, by topic and in total.

    Of a FIFO group also which queues are locked: a batch that is out keeps the rest of its queue.
    """
    return schemas.progress_of(await broker.group_progress(group))


@router.get("/groups/{group}", response_model_exclude_none=True)
async def get_group(group: str, broker: Broker) -> schemas.Group:
    """Show a consumer group."""
    return schemas.group_of((await broker.group_progress(group)).group)


@router.post("/groups/{group}:resetOffset", response_model_exclude_none=True)
async def reset_offset(
    group: str, reset: schemas.OffsetReset, broker: Broker
) -> schemas.OffsetResetDone:
    """Let a group go on from another place of a topic."""
    request = pb.ResetOffsetRequest(group=group, topic=reset.topic)
    if reset.timestamp_ms is not None:
        request.timestamp_ms = reset.timestamp_ms
    elif reset.offset is not None:
        request.offset = reset.offset
    elif reset.to == "earliest":
        request.earliest = True
    else:
        request.latest = True
    reply = await broker.reset_offset(request)
    queues = [schemas.queue_of(queue) for queue in reply.queues]
    return schemas.OffsetResetDone(group=group, topic=reset.topic, queues=queues)


@router.post("/groups/{group}:releaseLock", response_model_exclude_none=True)
async def release_lock(
    group: str, release: schemas.LockRelease, broker: Broker, request: Request
) -> schemas.LockReleaseDone:
    """Let the next consumer have what locks a queue of a FIFO group, before its time is up.

    The delivery counts as an attempt, as when its time is up. Until the next one its consumer may
    still ack; then its receipt handles are refused.
    """
    lock = await broker.release_lock(
        pb.ReleaseLockRequest(
            group=group,
            topic=release.topic,
            queue_id=release.queue,
            asked_by=request.client.host if request.client is not None else "",
        )
    )
    released = schemas.lock_of(release.topic, release.queue, lock)
    return schemas.LockReleaseDone(group=group, released=released)


@router.delete("/groups/{group}", status_code=HTTPStatus.NO_CONTENT)
async def delete_group(group: str, broker: Broker) -> None:
    """Delete a consumer group with its progress."""
    await broker.delete_group(group)
