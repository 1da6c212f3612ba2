"""Store a message of the REST API: choose its broker group and send it there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from itertools import count
from typing import Final, NamedTuple

import grpc

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import (
    UNREACHABLE_ERRORS,
    BrokerAnswer,
    BrokerGroupClient,
    Brokers,
)
from tidemill.admin.messages.compose import ComposedMessage
from tidemill.common.errors import (
    AlreadyExists,
    BadRequest,
    BrokerGroupUnreachable,
    DedupKeyNotFound,
    DiskFull,
    GroupDraining,
    KeyOwnerChanged,
    ServiceError,
    TooFewInSync,
    TopicNotFound,
)
from tidemill.message.dedup_key import owner_of_key
from tidemill.message.queue_choice import broker_queue_of_message_group
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

# A member receives a new topic from the home within milliseconds, unless the home cannot reach it.
TOPIC_WAIT_S_MAX: Final = 2.0
TOPIC_POLL_PERIOD_S: Final = 0.02
# After these errors, try another broker group. An unreachable broker group may have stored the
# message, so a message without a message group may be stored twice and delivered twice.
TRY_NEXT_ERRORS: Final = (
    *UNREACHABLE_ERRORS,
    DiskFull,
    GroupDraining,
    KeyOwnerChanged,  # it has not heard from the home yet that deduplication is off
    TooFewInSync,
)

_UNKNOWN_TOPIC: Final = pb.TopicConfig()
_turns = count()  # of messages without a message group, over the broker groups


class _Candidate(NamedTuple):
    """A broker group with a topic, as it has it."""

    member: BrokerGroupClient
    topic: pb.TopicConfig
    incarnation: tuple[int, int]


async def check_takes_keys(cluster: Brokers, name: str) -> None:
    """Raise BadRequest if a topic does not check the dedup keys of messages."""
    try:
        asked = pb.GetTopicStatusRequest(name=name)
        topic = (await cluster.call_home(calls.GET_TOPIC_STATUS, asked)).answers[0].value.topic
    except TopicNotFound:
        verb, reason = "create", "does not exist"
    else:
        verb, reason = "set", "has no deduplication"
        if topic.HasField("dedup"):
            if topic.dedup.key_from != pb.DEDUP_KEY_SOURCE_MESSAGE_ID:
                return
            raise BadRequest(
                f"topic {name} takes the message id as dedup key, so an Idempotency-Key has no"
                f" effect; to change that, run: tidemill topic set {name}"
                f" --dedup-key-from propertyOrMessageId"
            )
    raise BadRequest(
        f"topic {name} {reason}, so an Idempotency-Key has no effect; to turn the deduplication on,"
        f" run: tidemill topic {verb} {name} --dedup-window 2m"
    )


async def store(
    cluster: Brokers,
    request: pb.StoreMessageRequest,
    message_group: str,
    *,
    message_id: str,
    dedup_key: str | None,
) -> BrokerAnswer[pb.StoreMessageReply]:
    """Store a message at the broker group of its message group, or at any one, in turn.

    On a topic with deduplication, a message without a message group goes to the owner of its key:
    the user property `dedup_key`, or the message id. No other broker group stores it.
    """
    members = await cluster.members()
    if len(members) == 1:
        return await _store_at(members[0], request)
    if message_group:
        member = await _choose_queue(cluster, members[0], request, message_group)
        return await _store_at(member, request)
    candidates = await _find_candidates(members, request.topic)
    topic = candidates[0].topic if candidates else _UNKNOWN_TOPIC
    key = _key_of(topic, message_id, dedup_key)
    if key is not None:
        return await _store_keyed(
            cluster, request, topic, message_id=message_id, dedup_key=dedup_key
        )
    # The home rejects an unknown topic. Others may still have a deleted topic.
    targets = [each.member for each in candidates] or [members[0]]
    turn = next(_turns) % len(targets)
    return await _store_at_first([*targets[turn:], *targets[:turn]], request)


async def _store_at_first(
    members: Sequence[BrokerGroupClient], request: pb.StoreMessageRequest
) -> BrokerAnswer[pb.StoreMessageReply]:
    """Store a message at the first broker group that takes it.

    If none takes it, an unreachable one may have stored it: then its error is raised.
    """
    unknown: ServiceError | None = None
    for tried, member in enumerate(members, 1):
        try:
            return await _store_at(member, request)
        except ServiceError as error:
            if unknown is None and isinstance(error, UNREACHABLE_ERRORS):
                unknown = error
            if isinstance(error, TRY_NEXT_ERRORS) and tried < len(members):
                continue
            if unknown is None or unknown is error:
                raise
            raise unknown from error
    raise AssertionError("there is at least one broker group")


async def _store_keyed(
    cluster: Brokers,
    request: pb.StoreMessageRequest,
    topic: pb.TopicConfig,
    *,
    message_id: str,
    dedup_key: str | None,
) -> BrokerAnswer[pb.StoreMessageReply]:
    """Store a message at the owner of its dedup key.

    The owner may have another list of owners than the home had, for milliseconds. The key is that
    of the newest setting of the topic; without a key, the home stores the message.
    """
    end_s = time.monotonic() + TOPIC_WAIT_S_MAX
    while True:
        key = _key_of(topic, message_id, dedup_key)
        try:
            if key is None:
                request.key_version = 0
                return await _store_at((await cluster.members())[0], request)
            return await _store_at_owner(cluster, request, topic, key)
        except KeyOwnerChanged:
            if time.monotonic() >= end_s:
                raise
        await asyncio.sleep(TOPIC_POLL_PERIOD_S)
        candidates = await _find_candidates(await cluster.members(), request.topic)
        topic = candidates[0].topic if candidates else topic


async def _store_at_owner(
    cluster: Brokers, request: pb.StoreMessageRequest, topic: pb.TopicConfig, key: bytes
) -> BrokerAnswer[pb.StoreMessageReply]:
    """Store a message, after a lookup at the old owner of its key. Raises KeyOwnerChanged."""
    placement = topic.placement
    home = (await cluster.members())[0]
    owner, old_owner = home, home
    if placement.broker_groups:
        owner = old_owner = await cluster.member(owner_of_key(key, placement.broker_groups))
    if placement.before:
        old_owner = await cluster.member(owner_of_key(key, placement.before))
    request.key_version = 0
    if old_owner.name != owner.name:
        await _wait_for_topic(old_owner, topic, "may know the dedup key of this message")
        lookup = pb.StoreMessageRequest(lookup=placement)
        lookup.MergeFrom(request)
        try:
            return await _store_at(old_owner, lookup)
        except DedupKeyNotFound:
            request.key_version = placement.version
    await _wait_for_topic(owner, topic, "owns the dedup key of this message")
    return await _store_at(owner, request)


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


async def _find_candidates(members: Sequence[BrokerGroupClient], name: str) -> Sequence[_Candidate]:
    """Return the members that are up and have the current topic, the home first."""
    home = members[0]
    active = [member for member in members if not member.is_draining]
    found = await asyncio.gather(*(_find_own_topic(member, name) for member in active))
    candidates = [
        _Candidate(member, topic, _incarnation_of(member, topic))
        for member, topic in zip(active, found, strict=True)
        if topic is not None
    ]
    if not candidates:
        return []
    if candidates[0].member is home:
        current = candidates[0].incarnation
    elif await _is_up(home):
        return []
    else:
        # Only the home creates topics, so while it is down, the newest topic is current.
        current = max((each.incarnation for each in candidates), key=lambda each: each[1])
    return [each for each in candidates if each.incarnation == current]


async def _find_own_topic(member: BrokerGroupClient, name: str) -> pb.TopicConfig | None:
    """Return a topic as a broker group has it; None if it has none or is down."""
    if not await _is_up(member):
        return None
    try:
        asked = pb.GetTopicStatusRequest(name=name)
        return (await member.client.call(calls.GET_TOPIC_STATUS, asked)).topic
    except (TopicNotFound, *UNREACHABLE_ERRORS):
        return None


def _incarnation_of(member: BrokerGroupClient, topic: pb.TopicConfig) -> tuple[int, int]:
    return topic.id if member.is_home else topic.home_id, topic.created_at_ms


def _key_of(topic: pb.TopicConfig, message_id: str, dedup_key: str | None) -> bytes | None:
    """Return the dedup key of a message; None if the topic does not check it."""
    if not topic.HasField("dedup"):
        return None
    key_from = topic.dedup.key_from
    if dedup_key is not None and key_from != pb.DEDUP_KEY_SOURCE_MESSAGE_ID:
        return dedup_key.encode()
    return None if key_from == pb.DEDUP_KEY_SOURCE_PROPERTY else message_id.encode()


async def _is_up(member: BrokerGroupClient) -> bool:
    try:
        return await member.client.is_serving()
    except (ServiceError, grpc.aio.AioRpcError):
        return False


async def _choose_queue(
    cluster: Brokers, home: BrokerGroupClient, request: pb.StoreMessageRequest, message_group: str
) -> BrokerGroupClient:
    """Put the queue of a message group into `request`, and return the member with this queue."""
    topic = await _find_topic(home, request.topic)
    if topic is None or not topic.placements:
        return home
    name, request.queue_id = broker_queue_of_message_group(message_group, topic.placements)
    member = await cluster.member(name)
    await _wait_for_topic(member, topic, "stores this message group")
    return member


async def _wait_for_topic(member: BrokerGroupClient, topic: pb.TopicConfig, role: str) -> None:
    """Wait until a broker group has a topic of the home. Raises BrokerGroupUnreachable."""
    if member.is_home:
        return
    end_s = time.monotonic() + TOPIC_WAIT_S_MAX
    while time.monotonic() < end_s:
        try:
            asked = pb.GetTopicStatusRequest(name=topic.name)
            own = (await member.client.call(calls.GET_TOPIC_STATUS, asked)).topic
        except TopicNotFound:
            pass
        except UNREACHABLE_ERRORS as error:
            raise BrokerGroupUnreachable(
                f"broker group {member.name}, which {role}, cannot be reached: the message is not"
                f" stored; retry later"
            ) from error
        else:
            # Another incarnation is a deleted topic, whose messages will be deleted. With an old
            # deduplication, the key would not be checked.
            if (own.home_id, own.created_at_ms, _dedup_of(own)) == (
                topic.home_id or topic.id,
                topic.created_at_ms,
                _dedup_of(topic),
            ):
                return
        await asyncio.sleep(TOPIC_POLL_PERIOD_S)
    raise BrokerGroupUnreachable(
        f"broker group {member.name}, which {role}, has not received topic {topic.name} from the"
        f" home yet: the message is not stored; retry later"
    )


def _dedup_of(topic: pb.TopicConfig) -> pb.DedupPolicy | None:
    return topic.dedup if topic.HasField("dedup") else None


async def _find_topic(home: BrokerGroupClient, name: str) -> pb.TopicConfig | None:
    """Return a topic. None: the home will reject the send."""
    with contextlib.suppress(TopicNotFound):
        asked = pb.GetTopicStatusRequest(name=name)
        return (await home.client.call(calls.GET_TOPIC_STATUS, asked)).topic
    return None


async def create_topic(
    cluster: Brokers, name: str, message: ComposedMessage, author: pb.ChangeAuthor
) -> None:
    """Create the missing topic of a message, with a type that takes it.

    A topic that appears meanwhile stays as it is.
    """
    request = pb.PutTopicRequest(
        name=name,
        # A topic of the default type takes every message without a priority.
        type=pb.TOPIC_TYPE_PRIORITY if message.has_priority else pb.TOPIC_TYPE_UNSPECIFIED,
        existence=pb.EXISTENCE_MUST_BE_NEW,
        audit=author,
    )
    with contextlib.suppress(AlreadyExists):
        await (await cluster.home()).call(calls.PUT_TOPIC, request)
