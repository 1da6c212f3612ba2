"""Pages of queues for PullMessage and ReadMessages: read from a broker and joined for a response.

Addresses take turns, with few pages at once. A turn of the event loop joins one slice of all pages.
A client that reads all the time therefore costs others little more than the copying.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple, final

from tidemill.common.slices import run_slices
from tidemill.proxy.fair_turns import FairTurns
from tidemill.proxy.message_codec import join_pulled
from tidemill.proxy.server.broker_queue import READER, BrokerQueue
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from tidemill.message.resources import ResourceName
    from tidemill.proxy.cluster.broker_calls import BrokerCalls

# Per broker group, at most a megabyte each: one is joined while the other is in transit. A broker
# that does not answer does not delay the pages of others.
PAGES_AT_ONCE: Final = 2


class PullPage(NamedTuple):
    """Messages of a queue, and the queue's bounds."""

    next_offset: int  # of the next page
    is_at_end: bool  # no further message is committed
    min_offset: int
    end_offset: int
    items: list[bytes]  # encoded parts of a response, each with its header


@final
class PullPages:
    """Reads of pages, shared by all calls."""

    def __init__(self, calls: BrokerCalls) -> None:
        self._calls = calls
        self._turns: dict[str, FairTurns] = {}  # by broker group
        self._joining = asyncio.Lock()

    async def read(
        self,
        queue: BrokerQueue,
        pull: link_pb2.PullRequest,
        *,
        reader: str,
        header: bytes,
        topic: ResourceName,
        timeout_ms: int,
    ) -> PullPage:
        """Return a page, with its messages joined for a response.

        `reader`: an address. All its reads share one place in the rotation. Raises as
        `BrokerCalls.call`.
        """
        request = pull.SerializeToString()
        turns = self._turns.get(queue.broker.name)
        if turns is None:
            turns = self._turns[queue.broker.name] = FairTurns(PAGES_AT_ONCE)
        async with turns.turn(reader):
            answer = await self._calls.call(
                queue.broker, READER + "Pull", request, timeout_ms=timeout_ms
            )
            reply = link_pb2.PullReply.FromString(answer)
            del answer
            joining = join_pulled(
                reply,
                header=header,
                topic=topic,
                store_host=queue.broker.name.encode(),
                queue_id=queue.queue_id,
            )
            joined = await run_slices(joining, one_by_one=self._joining)
        # `reply` ends here: a protobuf message keeps the memory of all its parts.
        return PullPage(
            reply.next_offset, reply.is_at_end, reply.min_offset, reply.end_offset, joined
        )
