"""Pages that a broker makes in slices between its other work: few at once, and in rotation.

However many calls of an address want them, it has one place among those who do.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, final

from tidemill.proxy.fair_turns import FairTurns
from tidemill.proxy.server.queues import READER

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from tidemill.proxy.cluster.broker_calls import BrokerCalls
    from tidemill.proxy.cluster.broker_group import BrokerGroup

# Of one broker group, which does a slice of one at a time: the other one is on its way. Those of
# one that does not answer keep none of the others.
PAGES_AT_ONCE: Final = 2


@final
class BrokerPages:
    """Asks for pages of one kind for everybody."""

    def __init__(self, calls: BrokerCalls) -> None:
        self._calls = calls
        self._turns: defaultdict[str, FairTurns] = defaultdict(lambda: FairTurns(PAGES_AT_ONCE))

    async def ask(
        self, broker: BrokerGroup, method: str, request: Message, *, reader: str, timeout_ms: int
    ) -> bytes:
        """Return a page, for which the broker has `timeout_ms` from when its turn has come.

        `reader`: an address. Raises as `BrokerCalls.call`.
        """
        async with self._turns[broker.name].turn(reader):
            return await self._calls.call(
                broker, READER + method, request.SerializeToString(), timeout_ms=timeout_ms
            )
