"""QueryRoute and QueryAssignment: where clients find topics, and what consumers should poll."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from tidemill.message import limits
from tidemill.proxy import routing
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

if TYPE_CHECKING:
    from tidemill.proxy.cluster import Cluster
    from tidemill.proxy.server.call import Call
    from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

_OK = v2.Status(code=v2.OK, message="OK")


class Routes:
    """Answers where things are."""

    def __init__(self, cluster: Cluster, advertised: v2.Endpoints | None) -> None:
        self._cluster = cluster
        self._advertised = advertised

    async def query_route(self, call: Call, request: bytes) -> bytes:
        """Name the queues of a topic, all behind the client's own access point."""
        parsed = service.QueryRouteRequest.FromString(request)
        topic = await self._cluster.use_topic(parsed.topic.name, call)
        queues = self._queues(topic, parsed.topic, parsed.endpoints)
        return service.QueryRouteResponse(status=_OK, message_queues=queues).SerializeToString()

    async def query_assignment(self, call: Call, request: bytes) -> bytes:
        """Name what a consumer of the group should poll."""
        parsed = service.QueryAssignmentRequest.FromString(request)
        group = await self._cluster.use_group(parsed.group.name, call)
        topic = await self._cluster.use_topic(parsed.topic.name, call)
        queues = self._queues(topic, parsed.topic, parsed.endpoints)
        assignments = routing.assignments(queues, group.delivery_order)
        return service.QueryAssignmentResponse(
            status=_OK, assignments=assignments
        ).SerializeToString()

    def _queues(
        self, topic: link_pb2.TopicConfig, resource: v2.Resource, endpoints: v2.Endpoints
    ) -> list[v2.MessageQueue]:
        limits.NAMESPACE.check_text(resource.resource_namespace)
        access_point = routing.access_point(endpoints, self._advertised)
        of_each = [
            routing.message_queues(topic, resource, readable, endpoints=access_point)
            for readable in self._cluster.readable(topic)
        ]
        # Clients go round the queues in this order, and so round the broker groups.
        together = itertools.zip_longest(*of_each)
        return [queue for queues in together for queue in queues if queue is not None]
