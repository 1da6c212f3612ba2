"""Store a message of the REST API: choose its broker group and send it there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from itertools import count
from typing import Final

import grpc

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import (
    UNREACHABLE_ERRORS,
    BrokerAnswer,
    BrokerGroupClient,
    Brokers,
)
from tidemill.common.errors import (
    BrokerGroupUnreachable,
    DiskFull,
    GroupDraining,
    ServiceError,
    TooFewInSync,
    TopicNotFound,
)
from tidemill.message.queue_choice import broker_queue_of_message_group
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

# A member receives a new topic from the home within milliseconds, unless the home cannot reach it.
TOPIC_WAIT_S_MAX: Final = 2.0
TOPIC_POLL_PERIOD_S: Final = 0.02
# After these errors, try another broker group. An unreachable broker group may have stored the
# message, so a message without a message group may be stored twice and delivered twice.
TRY_NEXT_ERRORS: Final = (*UNREACHABLE_ERRORS, DiskFull, GroupDraining, TooFewInSync)

_turns = count()  # of messages without a message group, over the broker groups


async def store(
    cluster: Brokers, request: pb.StoreMessageRequest, message_group: str
) -> BrokerAnswer[pb.StoreMessageReply]:
    """Store a message at the broker group of its message group, or at any one, in turn."""
    members = await cluster.members()
    if len(members) == 1:
        return await _store_at(members[0], request)
    if message_group:
        member = await _choose_queue(cluster, members[0], request, message_group)
        return await _store_at(member, request)
    candidates = await _find_candidates(members, request.topic)
    turn = next(_turns) % len(candidates)
    ordered = [*candidates[turn:], *candidates[:turn]]
    for member in ordered[:-1]:
        try:
            return await _store_at(member, request)
        except TRY_NEXT_ERRORS:
            continue
    return await _store_at(ordered[-1], request)


async def _store_at(
    member: BrokerGroupClient, request: pb.StoreMessageRequest
) -> BrokerAnswer[pb.StoreMessageReply]:
    try:
        return BrokerAnswer(member.name, await member.client.call(calls.STORE_MESSAGE, request))
    except UNREACHABLE_ERRORS as error:
        raise type(error)(
            f"broker group {member.name}: {error.message}; the message may be stored there, so"
            " check before you send it again"
        ) from error


async def _find_candidates(
    members: Sequence[BrokerGroupClient], name: str
) -> Sequence[BrokerGroupClient]:
    """Return the members that are up and have the current topic; else the home alone."""
    home = members[0]
    active = [member for member in members if not member.is_draining]
    found = await asyncio.gather(*(_find_incarnation(member, name) for member in active))
    by_member = dict(zip(active, found, strict=True))
    if by_member.get(home) is None and await _is_up(home):
        return [home]  # It creates the topic or rejects it. Others may still have a deleted topic.
    known = [incarnation for incarnation in found if incarnation is not None]
    if not known:
        return [home]
    # Only the home creates topics, so while it is down, the newest topic is current.
    current = by_member.get(home) or max(known, key=lambda incarnation: incarnation[1])
    return [member for member in active if by_member[member] == current]


async def _find_incarnation(member: BrokerGroupClient, name: str) -> tuple[int, int] | None:
    """Return the incarnation of a topic at a broker group; None if it has none or is down."""
    if not await _is_up(member):
        return None
    try:
        topic = (
            await member.client.call(calls.GET_TOPIC_STATUS, pb.GetTopicStatusRequest(name=name))
        ).topic
    except (TopicNotFound, *UNREACHABLE_ERRORS):
        return None
    return topic.id if member.is_home else topic.home_id, topic.created_at_ms


async def _is_up(member: BrokerGroupClient) -> bool:
    try:
        return await member.client.is_serving()
    except (ServiceError, grpc.aio.AioRpcError):
        return False


async def _choose_queue(
    cluster: Brokers, home: BrokerGroupClient, request: pb.StoreMessageRequest, message_group: str
) -> BrokerGroupClient:
    """Put the queue of a message group into `request`, and return the member with this queue."""
    may_create = request.existence != pb.EXISTENCE_MUST_EXIST
    topic = await _find_topic(home, request.topic, may_create=may_create)
    if topic is None or not topic.placements:
        return home
    name, request.queue_id = broker_queue_of_message_group(message_group, topic.placements)
    member = await cluster.member(name)
    if member.is_home:
        return member
    end_s = time.monotonic() + TOPIC_WAIT_S_MAX
    while time.monotonic() < end_s:
        try:
            own = await member.client.call(
                calls.GET_TOPIC_STATUS, pb.GetTopicStatusRequest(name=topic.name)
            )
        except TopicNotFound:
            pass
        except UNREACHABLE_ERRORS as error:
            raise BrokerGroupUnreachable(
                f"broker group {name}, which stores this message group, cannot be reached: the"
                f" message is not stored; retry later"
            ) from error
        else:
            # Another incarnation is a deleted topic, whose messages will be deleted.
            if (own.topic.home_id, own.topic.created_at_ms) == (topic.id, topic.created_at_ms):
                return member
        await asyncio.sleep(TOPIC_POLL_PERIOD_S)
    raise BrokerGroupUnreachable(
        f"broker group {name}, which stores this message group, has not received topic {topic.name}"
        f" from the home yet: the message is not stored; retry later"
    )


async def _find_topic(
    home: BrokerGroupClient, name: str, *, may_create: bool
) -> pb.TopicConfig | None:
    """Return a topic; create it if that is allowed. None: the home will reject the send."""
    with contextlib.suppress(TopicNotFound):
        return (
            await home.client.call(calls.GET_TOPIC_STATUS, pb.GetTopicStatusRequest(name=name))
        ).topic
    if not may_create:
        return None
    with contextlib.suppress(TopicNotFound):
        request = pb.PutTopicRequest(name=name, is_first_use=True)
        return (await home.client.call(calls.PUT_TOPIC, request)).topic
    return None
