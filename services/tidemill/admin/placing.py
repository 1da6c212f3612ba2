"""Where a message goes that the REST API was asked to send."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from tidemill.admin.brokers import AWAY, Answer, Brokers, Member
from tidemill.common.errors import BrokerGroupUnreachable, TopicNotFound
from tidemill.message.queue_choice import place_of_group
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

# A member has heard of a topic within milliseconds of the home; one that the home cannot reach may
# not hear of it for long.
HEARING_MAX_S: Final = 2.0
HEARING_EVERY_S: Final = 0.02


async def store(
    cluster: Brokers, request: pb.StoreMessageRequest, message_group: str
) -> Answer[pb.StoreMessageReply]:
    """Store a message at the home, or in the one place of its message group."""
    members = await cluster.members()
    if not message_group or len(members) == 1:
        return Answer(members[0].name, await members[0].client.store_message(request))
    member = await _placed(cluster, members[0], request, message_group)
    return Answer(member.name, await member.client.store_message(request))


async def _placed(
    cluster: Brokers, home: Member, request: pb.StoreMessageRequest, message_group: str
) -> Member:
    """Put the queue of a message group into `request`, and return who has it."""
    topic = await _find_topic(home, request.topic)
    if topic is None or not topic.placements:
        return home
    name, request.queue_id = place_of_group(message_group, topic.placements)
    member = await cluster.member(name)
    if member.is_home:
        return member
    end_s = time.monotonic() + HEARING_MAX_S
    while time.monotonic() < end_s:
        try:
            own = await member.client.topic_status(topic.name)
        except TopicNotFound:
            pass
        except AWAY as error:
            raise BrokerGroupUnreachable(
                f"broker group {name}, which has the message group, cannot be reached: the message"
                f" is not stored"
            ) from error
        else:
            # Another incarnation is of a topic that was deleted, and takes its messages with it.
            if own.topic.home_id == topic.id:
                return member
        await asyncio.sleep(HEARING_EVERY_S)
    raise BrokerGroupUnreachable(
        f"broker group {name}, which has the message group, has not heard of the topic"
        f" {topic.name} from the home: the message is not stored"
    )


async def _find_topic(home: Member, name: str) -> pb.TopicConfig | None:
    """Return a topic, made by this first use where that is allowed; None: the home refuses it."""
    try:
        return (await home.client.topic_status(name)).topic
    except TopicNotFound:
        if not (await home.client.config()).auto_create:
            return None
    return (await home.client.put_topic(pb.PutTopicRequest(name=name))).topic
