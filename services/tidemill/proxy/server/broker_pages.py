"""Pages that a broker makes in slices between its other work: few at once, in rotation.

All calls of one address share one place in the rotation.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, final

from tidemill.proxy.fair_turns import FairTurns
from tidemill.proxy.server.broker_queue import READER

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from tidemill.proxy.cluster.broker_calls import BrokerCalls
    from tidemill.proxy.cluster.linked_group import LinkedGroup

# Per broker group. The broker makes one page while the other is in transit. A broker that does not
# answer does not delay the pages of others.
PAGES_AT_ONCE: Final = 2


@final
class BrokerPages:
    """Requests for pages of one kind, shared by all calls."""

    def __init__(self, calls: BrokerCalls) -> None:
        self._calls = calls
        self._turns: defaultdict[str, FairTurns] = defaultdict(lambda: FairTurns(PAGES_AT_ONCE))

    async def ask(
        self, broker: LinkedGroup, method: str, request: Message, *, reader: str, timeout_ms: int
    ) -> bytes:
        """Return a page. The wait for the turn of `reader`, an address, has no timeout.

        The broker has `timeout_ms` from then on. Raises as `BrokerCalls.call`.
        """
        async with self._turns[broker.name].turn(reader):
            return await self._calls.call(
                broker, READER + method, request.SerializeToString(), timeout_ms=timeout_ms
            )
