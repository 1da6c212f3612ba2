"""A receive at the only broker group of a cluster: one pop that is parked there."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from tidemill.message.client_key import ClientKey
    from tidemill.proxy.link import BrokerLink


@final
class SingleBrokerReceive:
    """A receive at the only broker group.

    It ends when another broker group joins, because a poll that is parked at one broker group does
    not see messages of another. It also ends when its consumer group gets a quota.
    """

    __slots__ = ("_link", "_request", "client", "group", "is_ended", "is_over")

    def __init__(self, link: BrokerLink, client: ClientKey, group: str) -> None:
        self.client = client
        self.group = group
        self.is_over = False
        self.is_ended = False  # because the client ends
        self._link = link
        self._request: link_pb2.PopRequest | None = None  # in flight

    async def pop(self, request: link_pb2.PopRequest, *, timeout_ms: int) -> link_pb2.PopReply:
        """Pop at the only broker group; return empty if the receive is over."""
        if self.is_over:
            return link_pb2.PopReply()
        self._request = request
        try:
            return await self._link.pop(request, timeout_ms=timeout_ms)
        finally:
            self._request = None

    def end(self) -> None:
        """Answer the receive empty, because its client ends."""
        self.is_ended = True
        self.stop()

    def stop(self) -> None:
        """End the pop in flight. The caller continues as a receive at several broker groups."""
        self.is_over = True
        if self._request is not None:
            self._link.stop_pop(self._request.request_id)
