"""BrokerLink: the gRPC service of the links."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from tidemill.broker.server.link.proxy_link import LinkRemoval, ProxyLink
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.metrics.traffic import Traffic
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.common.replica_group import ReplicationView
    from tidemill.transport.aio.call import RpcCall


class BrokerLinkService:
    """The links of all proxies."""

    def __init__(
        self,
        rounds: Rounds,
        traffic: Traffic,
        *,
        view: Callable[[], ReplicationView | None] = lambda: None,
    ) -> None:
        """`view` returns the newest view of the replicas of this broker group, if it has any."""
        self._rounds = rounds
        self._traffic = traffic
        self._view = view
        self._newest: dict[bytes, ProxyLink] = {}

    async def exchange(self, call: RpcCall) -> None:
        """Serve one proxy until its stream ends; answer all its requests before that.

        A replica that is not the master only names the master, as far as it knows.
        """
        if not self._rounds.is_master:
            frame = pb.ReplyFrame(not_master=_not_master(self._view()))
            await call.send(frame.SerializeToString())
            return
        link = ProxyLink(self._rounds, self._traffic, call, newest=self._newest)
        view = self._view()
        link.epoch = 0 if view is None else view.epoch
        offering = asyncio.create_task(link.pops.offer_room(), name="offer room")
        paging = asyncio.create_task(link.security.send_pages(), name="send security items")
        reading = asyncio.create_task(link.read(call), name="read frames")
        refusing = asyncio.create_task(link.is_refused.wait(), name="refuse an old proxy")
        try:
            await asyncio.wait([reading, refusing], return_when=asyncio.FIRST_COMPLETED)
            if link.is_refused.is_set():
                raise link.refusal()
            await reading
            await link.flush()
        finally:
            reading.cancel()
            refusing.cancel()
            offering.cancel()
            paging.cancel()
            link.end()
            self._rounds.put(LinkRemoval(link))


def _not_master(view: ReplicationView | None) -> pb.NotMaster:
    if view is None:
        return pb.NotMaster()
    address = "" if view.master is None else view.address_of(view.master.replica_id)
    return pb.NotMaster(epoch=view.epoch, version=view.version, address=address)
