"""Quotas on messages that the REST API sends (ADR 0078).

The process holds no tokens: each send with a quota asks the home. A send over a limit is refused at
once. If the home does not answer, sends with a quota fail.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, final

from tidemill.admin.cluster import calls
from tidemill.common.errors import Overloaded
from tidemill.security.quotas import LIMIT_TEXTS, STOCK_LIMITS, QuotaLimit, QuotaTable
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.admin.cluster.brokers import Brokers
    from tidemill.admin.cluster.item_copy import ItemCopy

PROCESS_ID_BYTES: Final = 16  # random, so unique per process
NO_CLIENT: Final = ""  # a request has no client id


@final
class RestSendQuotas:
    """The tokens of messages that the REST API sends."""

    def __init__(
        self,
        lease: Callable[[pb.LeaseTokensRequest], Awaitable[pb.LeaseTokensReply]],
        copy: ItemCopy,
    ) -> None:
        """`lease` asks the home, and `copy` has the quotas."""
        self._ask_home = lease
        self._copy = copy
        self._process_id = os.urandom(PROCESS_ID_BYTES)
        self._table = QuotaTable(lambda _kind, name: copy.items.get(name), lambda: copy.counts)
        copy.on_change = self._table.note_change

    async def admit(
        self, *, user: str, user_id: int, topic: str, size_bytes: int, is_delayed: bool = False
    ) -> None:
        """Take the tokens of a message, all or none. Raises Overloaded."""
        await self._copy.refresh()
        matched = (
            () if self._table.is_empty else self._table.rates_of(user, user_id, NO_CLIENT, topic)
        )
        rates = [
            rate
            for rate in matched
            if is_delayed or rate.key.limit is not QuotaLimit.PENDING_TIMERS
        ]
        if not rates:
            return
        costs = [
            rate.cost(messages=1, size_bytes=size_bytes, timers=int(is_delayed)) for rate in rates
        ]
        granted = await self._lease(
            [
                pb.TokenDemand(quota=rate.key.quota, limit=rate.key.limit, wanted=cost, first=cost)
                for rate, cost in zip(rates, costs, strict=True)
            ]
        )
        missing = [n for n, cost in enumerate(costs) if granted[n] < cost]
        if not missing:
            return
        if any(granted):
            await self._lease(
                [
                    pb.TokenDemand(quota=rate.key.quota, limit=rate.key.limit, returned=tokens)
                    for rate, tokens in zip(rates, granted, strict=True)
                ]
            )
        rate = rates[missing[0]]
        if rate.key.limit in STOCK_LIMITS:
            raise Overloaded(rate.stock_text)
        text = LIMIT_TEXTS[rate.key.limit]
        raise Overloaded(f"{text} of {rate.subject} is used up; retry in a second")

    async def _lease(self, demands: list[pb.TokenDemand]) -> list[int]:
        """Ask the home. Return the granted tokens."""
        request = pb.LeaseTokensRequest(process_id=self._process_id, demands=demands)
        return list((await self._ask_home(request)).granted)


def lease_from(
    brokers: Brokers,
) -> Callable[[pb.LeaseTokensRequest], Awaitable[pb.LeaseTokensReply]]:
    """Return the function that leases tokens from the home."""

    async def lease(request: pb.LeaseTokensRequest) -> pb.LeaseTokensReply:
        return await (await brokers.home()).call(calls.LEASE_TOKENS, request)

    return lease
