"""Ids of dead letters: BROKER:OFFSET."""

from __future__ import annotations

from typing import Final, NamedTuple

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import Brokers
from tidemill.common.errors import BadRequest, BrokerGroupNotFound, MessageNotFound
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

OFFSET_MAX: Final = 2**63 - 1


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
    broker, _, offset = text.rpartition(":")
    if not broker or not offset.isascii() or not offset.isdecimal() or int(offset) > OFFSET_MAX:
        raise BadRequest(
            f"the id of a dead letter is BROKER:OFFSET, as a list shows it, not {text}"
        )
    return LetterId(broker, int(offset))
