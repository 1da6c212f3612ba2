"""Ids of dead letters: BROKER:OFFSET."""

from __future__ import annotations

from typing import NamedTuple

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import Brokers
from tidemill.admin.messages.item_ids import split_item_id
from tidemill.common.errors import BrokerGroupNotFound, MessageNotFound
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


class LetterId(NamedTuple):
    """A dead letter of a consumer group."""

    broker: str
    offset: int


async def read_letter(cluster: Brokers, group: str, one: LetterId) -> pb.GetDeadLetterReply:
    """Return a dead letter with its message. Raises MessageNotFound, GroupNotFound."""
    try:
        member = await cluster.member(one.broker)
    except BrokerGroupNotFound as error:
        raise MessageNotFound(f"there is no such dead letter: {error}") from None
    request = pb.GetDeadLetterRequest(group=group, offset=one.offset)
    return await member.client.call(calls.GET_DEAD_LETTER, request)


def parse_letter_id(text: str) -> LetterId:
    """Return the broker group and the offset of an id. Raises BadRequest."""
    return LetterId(*split_item_id(text, "a dead letter is BROKER:OFFSET"))
