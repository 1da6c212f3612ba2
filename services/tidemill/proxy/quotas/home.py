"""Requests for permits to the home, on the connection beside the link."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

from tidemill.common.errors import BrokerUnreachable
from tidemill.proxy.quotas.renewal import Leased
from tidemill.security.permit_buckets import RENEWAL_MS, LeaseDemand
from tidemill.security.stock_buckets import UNKNOWN_ROOM
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.proxy.cluster.broker_calls import BrokerCalls
    from tidemill.proxy.cluster.cluster import BrokerCluster

LEASE: Final = "/tidemill.broker.v1.BrokerQuotas/LeasePermits"
PROCESS_ID_BYTES: Final = 16  # random, so unique per process


def lease_from(
    cluster: BrokerCluster, calls: BrokerCalls
) -> Callable[[Sequence[LeaseDemand]], Awaitable[Leased]]:
    """Return the function that leases permits from the home. It raises ServiceError."""
    process_id = os.urandom(PROCESS_ID_BYTES)

    async def lease(demands: Sequence[LeaseDemand]) -> Leased:
        request = pb.LeasePermitsRequest(
            process_id=process_id,
            number=demands[0].number if demands else 0,
            demands=[
                pb.PermitDemand(
                    quota=each.key.quota,
                    limit=each.key.limit,
                    wanted=each.wanted,
                    first=each.first,
                    returned=each.returned,
                    confirmed=each.confirmed,
                    used_locally=each.used_locally,
                )
                for each in demands
            ],
        )
        encoded = request.SerializeToString()
        answer = await calls.call(cluster.home, LEASE, encoded, timeout_ms=RENEWAL_MS)
        reply = pb.LeasePermitsReply.FromString(answer)
        if len(reply.granted) != len(demands):
            raise BrokerUnreachable("the home answered other demands than those of this proxy")
        rooms = [None if room == UNKNOWN_ROOM else room for room in reply.rooms]
        return Leased(reply.granted, reply.proxies, rooms)

    return lease
