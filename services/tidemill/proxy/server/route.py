"""QueryRoute and QueryAssignment: where clients find topics, and what consumers should poll."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidemill.message import limits
from tidemill.proxy.cluster import routing
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from tidemill.proxy.cluster.cluster import Cluster, Readable
    from tidemill.proxy.server.call import Call


class Routes:
    """Answers where things are."""

    def __init__(self, cluster: Cluster, advertised: v2.Endpoints | None) -> None:
        self._cluster = cluster
        self._advertised = advertised

    async def query_route(self, call: Call, request: bytes) -> bytes:
        """Name the queues of a topic, all behind the client's own access point."""
        parsed = service.QueryRouteRequest.FromString(request)
        topic = await self._cluster.use_topic(parsed.topic.name, call)
        readables = self._cluster.readable(topic)
        queues = self._queues(topic, parsed.topic, parsed.endpoints, readables)
        return routing.encode_route(queues)

    async def query_assignment(self, call: Call, request: bytes) -> bytes:
        """Name what a consumer of the group should poll: each queue in order, or whole brokers.

        Every client of the group gets the same list: who pops what is decided by the broker, so
        nothing has to be moved when clients come and go. An entry a broker group has a push
        consumer wait for each of them; which one serves a receive is not bound to what it names.
        """
        parsed = service.QueryAssignmentRequest.FromString(request)
        group = await self._cluster.use_group(parsed.group.name, call)
        topic = await self._cluster.use_topic(parsed.topic.name, call)
        # Clients drop a queue, and what they have of it, when it is not named just as before: one
        # of a group that drains has messages still.
        readables = [
            readable._replace(is_writable=True) for readable in self._cluster.readable(topic)
        ]
        any_queue = (
            None
            if group.delivery_order == link_pb2.DELIVERY_ORDER_ORDERED
            else (routing.ANY_QUEUE,)
        )
        queues = self._queues(topic, parsed.topic, parsed.endpoints, readables, any_queue)
        return routing.encode_assignments(queues)

    def _queues(
        self,
        topic: link_pb2.TopicConfig,
        resource: v2.Resource,
        endpoints: v2.Endpoints,
        readables: Sequence[Readable],
        queue_ids: Sequence[int] | None = None,
    ) -> list[bytes]:
        limits.NAMESPACE.check_text(resource.resource_namespace)
        access_point = routing.access_point(endpoints, self._advertised)
        of_each = [
            routing.message_queues(
                topic, resource, readable, endpoints=access_point, queue_ids=queue_ids
            )
            for readable in readables
        ]
        # Clients go round the queues in this order, and so round the broker groups.
        together = itertools.zip_longest(*of_each)
        return [queue for queues in together for queue in queues if queue is not None]
