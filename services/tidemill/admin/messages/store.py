"""Where a message goes that the REST API was asked to send."""

from __future__ import annotations

import asyncio
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

# A member has heard of a topic within milliseconds of the home; one that the home cannot reach may
# not hear of it for long.
HEARING_MAX_S: Final = 2.0
HEARING_EVERY_S: Final = 0.02
# It takes no message now; another broker group may. What one that is away did with it is not known:
# a message of no group may be stored twice, and comes once more then.
MOVES: Final = (*UNREACHABLE_ERRORS, DiskFull, GroupDraining, TooFewInSync)

_turns = count()  # whose turn it is to store a message of no group


async def store(
    cluster: Brokers, request: pb.StoreMessageRequest, message_group: str
) -> BrokerAnswer[pb.StoreMessageReply]:
    """Store a message at one who is up, in turn, or in the one place of its message group."""
    members = await cluster.members()
    if len(members) == 1:
        return await _store_at(members[0], request)
    if message_group:
        return await _store_at(await _placed(cluster, members[0], request, message_group), request)
    able = await _find_able(members, request.topic)
    turn = next(_turns) % len(able)
    in_turn = [*able[turn:], *able[:turn]]
    for member in in_turn[:-1]:
        try:
            return await _store_at(member, request)
        except MOVES:
            continue
    return await _store_at(in_turn[-1], request)


async def _store_at(
    member: BrokerGroupClient, request: pb.StoreMessageRequest
) -> BrokerAnswer[pb.StoreMessageReply]:
    try:
        return BrokerAnswer(member.name, await member.client.call(calls.STORE_MESSAGE, request))
    except UNREACHABLE_ERRORS as error:
        raise type(error)(
            f"broker group {member.name}: {error.message}; the message may be stored there or not"
        ) from error


async def _find_able(
    members: Sequence[BrokerGroupClient], name: str
) -> Sequence[BrokerGroupClient]:
    """Return who is up and has a topic as the home has it; the home alone where it has none."""
    home = members[0]
    taking = [member for member in members if not member.is_draining]
    found = await asyncio.gather(*(_find_incarnation(member, name) for member in taking))
    by_member = dict(zip(taking, found, strict=True))
    if by_member.get(home) is None and await _is_up(home):
        return [home]  # It makes the topic, or refuses; what others have is of one that is deleted.
    known = [incarnation for incarnation in found if incarnation is not None]
    if not known:
        return [home]
    # While the home is away the newest one is its own: only it makes topics.
    current = by_member.get(home) or max(known, key=lambda incarnation: incarnation[1])
    return [member for member in taking if by_member[member] == current]


async def _find_incarnation(member: BrokerGroupClient, name: str) -> tuple[int, int] | None:
    """Return which topic of this name a broker group has; None: none, or it does not answer."""
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


async def _placed(
    cluster: Brokers, home: BrokerGroupClient, request: pb.StoreMessageRequest, message_group: str
) -> BrokerGroupClient:
    """Put the queue of a message group into `request`, and return who has it."""
    topic = await _find_topic(home, request.topic)
    if topic is None or not topic.placements:
        return home
    name, request.queue_id = broker_queue_of_message_group(message_group, topic.placements)
    member = await cluster.member(name)
    if member.is_home:
        return member
    end_s = time.monotonic() + HEARING_MAX_S
    while time.monotonic() < end_s:
        try:
            own = await member.client.call(
                calls.GET_TOPIC_STATUS, pb.GetTopicStatusRequest(name=topic.name)
            )
        except TopicNotFound:
            pass
        except UNREACHABLE_ERRORS as error:
            raise BrokerGroupUnreachable(
                f"broker group {name}, which has the message group, cannot be reached: the message"
                f" is not stored"
            ) from error
        else:
            # Another incarnation is of a topic that was deleted, and takes its messages with it.
            if (own.topic.home_id, own.topic.created_at_ms) == (topic.id, topic.created_at_ms):
                return member
        await asyncio.sleep(HEARING_EVERY_S)
    raise BrokerGroupUnreachable(
        f"broker group {name}, which has the message group, has not heard of the topic"
        f" {topic.name} from the home: the message is not stored"
    )


async def _find_topic(home: BrokerGroupClient, name: str) -> pb.TopicConfig | None:
    """Return a topic, made by this first use where that is allowed; None: the home refuses it."""
    try:
        return (
            await home.client.call(calls.GET_TOPIC_STATUS, pb.GetTopicStatusRequest(name=name))
        ).topic
    except TopicNotFound:
        if not (await home.client.call(calls.GET_CONFIG, pb.GetConfigRequest())).auto_create:
            return None
    return (await home.client.call(calls.PUT_TOPIC, pb.PutTopicRequest(name=name))).topic
