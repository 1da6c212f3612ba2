"""Quotas on messages that the REST API sends (ADR 0078).

The process holds no permits: each send with a quota asks the home. A send over a limit is refused
at once. If the home does not answer, sends with a quota fail.
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
    """The permits of messages that the REST API sends."""

    def __init__(
        self,
        lease: Callable[[pb.LeasePermitsRequest], Awaitable[pb.LeasePermitsReply]],
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
        """Take the permits of a message, all or none. Raises Overloaded."""
        await self._copy.refresh()
        matched = (
            () if self._table.is_empty else self._table.limits_of(user, user_id, NO_CLIENT, topic)
        )
        limits = [
            limit
            for limit in matched
            if is_delayed or limit.key.limit is not QuotaLimit.PENDING_TIMERS
        ]
        if not limits:
            return
        costs = [
            limit.cost(messages=1, size_bytes=size_bytes, timers=int(is_delayed))
            for limit in limits
        ]
        granted = await self._lease(
            [
                pb.PermitDemand(
                    quota=limit.key.quota, limit=limit.key.limit, wanted=cost, first=cost
                )
                for limit, cost in zip(limits, costs, strict=True)
            ]
        )
        missing = [n for n, cost in enumerate(costs) if granted[n] < cost]
        if not missing:
            return
        if any(granted):
            await self._lease(
                [
                    pb.PermitDemand(quota=limit.key.quota, limit=limit.key.limit, returned=permits)
                    for limit, permits in zip(limits, granted, strict=True)
                ]
            )
        limit = limits[missing[0]]
        if limit.key.limit in STOCK_LIMITS:
            raise Overloaded(limit.stock_text)
        text = LIMIT_TEXTS[limit.key.limit]
        raise Overloaded(f"{text} of {limit.subject} is used up; retry in a second")

    async def _lease(self, demands: list[pb.PermitDemand]) -> list[int]:
        """Ask the home. Return the granted permits."""
        request = pb.LeasePermitsRequest(process_id=self._process_id, demands=demands)
        return list((await self._ask_home(request)).granted)


def lease_from(
    brokers: Brokers,
) -> Callable[[pb.LeasePermitsRequest], Awaitable[pb.LeasePermitsReply]]:
    """Return the function that leases permits from the home."""

    async def lease(request: pb.LeasePermitsRequest) -> pb.LeasePermitsReply:
        return await (await brokers.home()).call(calls.LEASE_PERMITS, request)

    return lease
