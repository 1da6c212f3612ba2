"""The position of consumer groups: resets, pull offsets and queue locks."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from fastapi import APIRouter

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import BrokerAnswer, BrokerGroupClient, Brokers
from tidemill.admin.http.preconditions import Matching
from tidemill.admin.json import render
from tidemill.admin.json.consumer_groups import (
    OffsetResetRequest,
    OffsetResetView,
    PullOffsetDeletionRequest,
    PullOffsetDeletionView,
    PullOffsetView,
    QueueOffsetView,
    QueueResetView,
)
from tidemill.admin.json.deliveries import LockReleaseRequest, LockReleaseView
from tidemill.admin.json.schema import millis_of
from tidemill.admin.routes import Caller, ChangeAuthor, Cluster, DryRun, GroupName
from tidemill.common.errors import BadRequest, BrokerGroupUnreachable, Conflict, ServiceError
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

router = APIRouter(tags=["groups"])


@router.post("/groups/{group}:resetOffset", response_model_exclude_none=True)
async def reset_offset(
    group: GroupName,
    reset: OffsetResetRequest,
    cluster: Cluster,
    caller: Caller,
    author: ChangeAuthor,
    match: Matching,
    dry_run: DryRun = False,
) -> OffsetResetView:
    """Move a group to another position of topics, at all broker groups or at none.

    The query or the body can request a dry run. Each broker logs the old position, the new position
    and the caller. Several topics are checked first, and then reset one after the other. `queues`
    changes only the broker groups that it names; all of them check it first.
    """
    is_dry = dry_run or reset.dry_run
    topics = list(dict.fromkeys(reset.topics or [reset.topic or ""]))

    def request(
        topic: str, *, is_dry: bool, queues: Sequence[QueueOffsetView] = ()
    ) -> pb.ResetOffsetRequest:
        return _reset_of(
            group,
            topic,
            reset,
            queues,
            expected=match.wire,
            dry_run=is_dry,
            requested_by=caller,
            audit=author.of(f"Group:{group}"),
        )

    def change(topic: str, *, is_dry: bool) -> Awaitable[list[BrokerAnswer[pb.ResetOffsetReply]]]:
        if reset.queues is not None:
            return _reset_queues(
                cluster, reset.queues, functools.partial(request, topic), is_dry=is_dry
            )
        return cluster.change_all(
            calls.RESET_OFFSET,
            dry_run=request(topic, is_dry=True),
            request=request(topic, is_dry=is_dry),
            home_first=match.expected is not None and not is_dry,
        )

    if len(topics) > 1:
        for topic in topics:
            await change(topic, is_dry=True)
    replies: dict[str, list[BrokerAnswer[pb.ResetOffsetReply]]] = {}
    for topic in topics:
        try:
            replies[topic] = await change(topic, is_dry=is_dry)
        except ServiceError as error:
            if not replies or is_dry:
                raise
            done = ", ".join(replies)
            raise type(error)(
                f"{topic}: {error.message}; the group is reset in {done} already: repeat this"
            ) from None
    return OffsetResetView(
        dry_run=is_dry,
        by=caller,
        group=group,
        topic=reset.topic,
        queues=[row for topic, answers in replies.items() for row in _rows_of(topic, answers)],
    )


def _rows_of(
    topic: str, answers: Sequence[BrokerAnswer[pb.ResetOffsetReply]]
) -> Iterator[QueueResetView]:
    for broker, reply in answers:
        for queue, from_offset, to_offset in zip(
            reply.queues, reply.from_offsets, reply.to_offsets, strict=True
        ):
            yield render.queue_reset_of(topic, queue, from_offset, to_offset, broker)


async def _reset_queues(
    cluster: Brokers,
    queues: Sequence[QueueOffsetView],
    request_of: Callable[..., pb.ResetOffsetRequest],
    *,
    is_dry: bool,
) -> list[BrokerAnswer[pb.ResetOffsetReply]]:
    """Reset a group in single queues, if all their broker groups accept that. Raises ServiceError.

    Each broker group compares the expected version with its copy of the consumer group.
    """
    by_broker: dict[str, list[QueueOffsetView]] = {}
    members = await cluster.members()
    for each in queues:
        if each.broker is None and len(members) > 1:
            raise BadRequest(
                f"there are {len(members)} broker groups; name the broker of queue {each.queue}"
            )
        by_broker.setdefault(each.broker or members[0].name, []).append(each)
    found = [(await cluster.member(broker), own) for broker, own in by_broker.items()]
    answers: list[BrokerAnswer[pb.ResetOffsetReply]] = []
    for is_plan in (True,) if is_dry else (True, False):
        answers = []
        for member, own in found:
            try:
                reply = await member.client.call(
                    calls.RESET_OFFSET, request_of(is_dry=is_plan, queues=own)
                )
            except ServiceError as error:
                done = ", ".join(answer.broker for answer in answers)
                after = f"; the group is reset at {done} already" if done and not is_plan else ""
                raise type(error)(f"{member.name}: {error.message}{after}") from None
            answers.append(BrokerAnswer(member.name, reply))
    return answers


def _reset_of(
    group: str,
    topic: str,
    reset: OffsetResetRequest,
    queues: Sequence[QueueOffsetView],
    **fields: Any,
) -> pb.ResetOffsetRequest:
    """Return the request to reset a group in one topic, or in these queues of it."""
    request = pb.ResetOffsetRequest(group=group, topic=topic, **fields)
    if queues:
        request.queues.queues.extend(
            pb.QueueOffset(queue_id=each.queue, offset=each.offset) for each in queues
        )
    elif reset.timestamp is not None:
        request.timestamp_ms = millis_of(reset.timestamp)
    elif reset.timestamp_ms is not None:
        request.timestamp_ms = reset.timestamp_ms
    elif reset.offset is not None:
        request.offset = reset.offset
    elif reset.to == "earliest":
        request.earliest = True
    else:
        request.latest = True
    return request


@router.post("/groups/{group}:forgetPullOffsets")
async def forget_pull_offsets(
    group: GroupName,
    pulled: PullOffsetDeletionRequest,
    cluster: Cluster,
    caller: Caller,
    author: ChangeAuthor,
    match: Matching,
    dry_run: DryRun = False,
) -> PullOffsetDeletionView:
    """Delete the pull offsets of a group in a topic, at all broker groups or at none.

    For the group of an archive this means: retention no longer waits for the archive. The query or
    the body can request a dry run. Each broker logs the deletion.
    """
    is_dry = dry_run or pulled.dry_run

    def request(*, is_dry: bool) -> pb.ForgetPullOffsetsRequest:
        return pb.ForgetPullOffsetsRequest(
            group=group,
            topic=pulled.topic,
            expected=match.wire,
            dry_run=is_dry,
            requested_by=caller,
            audit=author.of(f"Group:{group}"),
        )

    replies = await cluster.change_all(
        calls.FORGET_PULL_OFFSETS,
        dry_run=request(is_dry=True),
        request=request(is_dry=is_dry),
        home_first=match.expected is not None,
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
    group: GroupName,
    release: LockReleaseRequest,
    cluster: Cluster,
    caller: Caller,
    author: ChangeAuthor,
    match: Matching,
    dry_run: DryRun = False,
) -> LockReleaseView:
    """Unlock a queue of a FIFO group before the invisible duration of its batch ends.

    The delivery counts as an attempt. Its consumer may still ack until the next delivery; then the
    broker rejects its receipt handles.
    """
    member = await _holder_of(cluster, group, release)
    if dry_run:
        lock = await _find_lock(member, group, release)
    else:
        request = pb.ReleaseLockRequest(
            group=group,
            topic=release.topic,
            queue_id=release.queue,
            expected=match.wire,
            asked_by=caller,
            audit=author.of(f"Group:{group}"),
        )
        lock = await member.client.call(calls.RELEASE_LOCK, request)
    released = render.lock_of(release.topic, release.queue, lock, member.name)
    return LockReleaseView(dry_run=dry_run, by=caller, group=group, released=released)


async def _find_lock(
    member: BrokerGroupClient, group: str, release: LockReleaseRequest
) -> pb.QueueLock:
    """Return the lock that a release would end. Raises Conflict if the queue is not locked.

    It is a read, so that a broker of an older version does not take the dry run for a release.
    """
    progress = await member.client.call(
        calls.GET_GROUP_PROGRESS, pb.GetGroupProgressRequest(name=group)
    )
    for queue in progress.queues:
        is_wanted = (queue.topic, queue.queue_id) == (release.topic, release.queue)
        if is_wanted and queue.HasField("lock"):
            return queue.lock
    raise Conflict(
        f"queue {release.queue} of {release.topic} is not locked at {member.name}: the next"
        " consumer that polls gets its messages"
    )


async def _holder_of(
    cluster: Brokers, group: str, release: LockReleaseRequest
) -> BrokerGroupClient:
    """Return the broker group with a locked queue. Raises Conflict if several have one."""
    members = await cluster.members()
    if release.broker is not None:
        return await cluster.member(release.broker)
    if len(members) == 1:
        return members[0]
    found = await cluster.call_all(calls.GET_GROUP_PROGRESS, pb.GetGroupProgressRequest(name=group))
    locked = [
        broker
        for broker, progress in found.answers
        for queue in progress.queues
        if queue.topic == release.topic
        and queue.queue_id == release.queue
        and queue.HasField("lock")
    ]
    queue_name = f"queue {release.queue} of {release.topic}"
    if len(locked) > 1:
        raise Conflict(f"{queue_name} is locked at {', '.join(locked)}: name the broker group")
    if found.unreachable:
        raise BrokerGroupUnreachable(
            f"{', '.join(found.unreachable)} cannot be reached, and {queue_name} may be locked"
            f" there: name the broker group"
        )
    # Without a locked queue, the home rejects the request with the reason.
    return await cluster.member(locked[0]) if locked else members[0]
