"""Pages of queues, as PullMessage and ReadMessages want them: asked of a broker, and joined.

Few at once, in rotation among those who want them; and of all that are joined a turn of the event
loop has one slice. So whoever reads on and on costs others little more than the copying.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple, final

from tidemill.common.slices import run_slices
from tidemill.proxy.fair_turns import FairTurns
from tidemill.proxy.message_codec import join_pulled
from tidemill.proxy.server.queues import READER, Queue
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from tidemill.proxy.cluster.broker_calls import BrokerCalls

# Of one broker group, of a megabyte each at most: one is joined while the other is on its way.
# Those of one that does not answer keep none of the others.
PAGES_AT_ONCE: Final = 2


class Page(NamedTuple):
    """Messages of a queue, and what the broker says of it."""

    next_offset: int  # where to go on
    is_at_end: bool  # nothing else is committed
    min_offset: int
    end_offset: int
    items: list[bytes]  # each with its header, as it stands in a response


@final
class PullPages:
    """Reads pages for everybody."""

    def __init__(self, calls: BrokerCalls) -> None:
        self._calls = calls
        self._turns: dict[str, FairTurns] = {}  # by broker group
        self._joining = asyncio.Lock()

    async def read(
        self,
        queue: Queue,
        pull: link_pb2.PullRequest,
        *,
        reader: str,
        header: bytes,
        topic_wire: bytes,
        timeout_ms: int,
    ) -> Page:
        """Return a page, with its messages joined for a response.

        `reader`: an address; all that it reads shares a place in the rotation. Raises as
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
                topic_wire=topic_wire,
                store_host=queue.broker.name.encode(),
                queue_id=queue.queue_id,
            )
            joined = await run_slices(joining, one_by_one=self._joining)
        # A message of protobuf keeps the memory of all its parts, whatever is taken out of it.
        return Page(reply.next_offset, reply.is_at_end, reply.min_offset, reply.end_offset, joined)
