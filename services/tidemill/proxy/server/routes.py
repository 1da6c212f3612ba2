"""QueryRoute and QueryAssignment: the queues of a topic for producers and for consumers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidemill.proxy.cluster import routing
from tidemill.proxy.filters import check_filters
from tidemill.security.acl import Action
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from tidemill.proxy.clients.clients import Clients
    from tidemill.proxy.cluster.cluster import BrokerCluster, RouteQueues
    from tidemill.proxy.server.call import Call


class Routes:
    """The methods QueryRoute and QueryAssignment."""

    def __init__(
        self, cluster: BrokerCluster, clients: Clients, advertised: v2.Endpoints | None
    ) -> None:
        self._cluster = cluster
        self._clients = clients
        self._advertised = advertised

    async def query_route(self, call: Call, request: bytes) -> bytes:
        """Return the queues of a topic, all with the client's own access point."""
        parsed = service.QueryRouteRequest.FromString(request)
        name = call.resource_name(parsed.topic)
        call.require_topic(name.full, Action.PUB, Action.SUB)
        topic = await self._cluster.use_topic(name.full, call)
        readables = self._cluster.route_queues(topic)
        queues = self._queues(topic, name.resource(), parsed.endpoints, readables)
        return routing.encode_route(queues)

    async def query_assignment(self, call: Call, request: bytes) -> bytes:
        """Return the entries that a consumer polls: each queue of an ordered group, else brokers.

        Every client of the group gets the same list. The broker decides which client pops a
        message, so clients may come and go without rebalancing. With one entry per broker group, a
        push consumer polls once per entry. Any broker group may serve such a poll.

        Raises the error of the filter that the client announced for the topic.
        """
        parsed = service.QueryAssignmentRequest.FromString(request)
        name = call.resource_name(parsed.topic)
        group_name = call.name_of(parsed.group)
        call.require_consumer(group_name, name.full)
        client = self._clients.find(call.client)
        if client is not None and client.settings:
            check_filters(v2.Settings.FromString(client.settings), name.full)
        group = await self._cluster.use_group(group_name, call)
        topic = await self._cluster.use_topic(name.full, call)
        # If an entry changes, clients drop the queue and its cached messages. A draining broker
        # group still has messages, so its queues stay writable here.
        readables = [
            queues._replace(is_writable=True) for queues in self._cluster.route_queues(topic)
        ]
        any_queue = (
            None
            if group.delivery_order == link_pb2.DELIVERY_ORDER_ORDERED
            else (routing.ANY_QUEUE,)
        )
        queues = self._queues(topic, name.resource(), parsed.endpoints, readables, any_queue)
        return routing.encode_assignments(queues)

    def _queues(
        self,
        topic: link_pb2.TopicConfig,
        resource: v2.Resource,
        endpoints: v2.Endpoints,
        readables: Sequence[RouteQueues],
        queue_ids: Sequence[int] | None = None,
    ) -> list[bytes]:
        access_point = routing.access_point(endpoints, self._advertised)
        of_each = [
            routing.message_queues(
                topic, resource, queues, endpoints=access_point, queue_ids=queue_ids
            )
            for queues in readables
        ]
        # Clients rotate over the queues in this order, and thereby over the broker groups.
        together = itertools.zip_longest(*of_each)
        return [queue for queues in together for queue in queues if queue is not None]
