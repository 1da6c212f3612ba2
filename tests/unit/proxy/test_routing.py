"""Routes: every client can use the queues and endpoints that it gets."""

from __future__ import annotations

import pytest

from tidemill.common.errors import IllegalAccessPoint
from tidemill.proxy.cluster import routing
from tidemill.proxy.cluster.cluster import RouteQueues
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

TOPIC = link_pb2.TopicConfig(id=1, name="topic", type=link_pb2.TOPIC_TYPE_MIXED, queues=8)
ACCESS_POINT = v2.Endpoints(
    scheme=v2.DOMAIN_NAME, addresses=[v2.Address(host="broker.example.org", port=18081)]
)


def queues(topic: link_pb2.TopicConfig = TOPIC) -> list[v2.MessageQueue]:
    resource = v2.Resource(resource_namespace="space", name=topic.name)
    readable = RouteQueues("broker-0", topic.queues, is_writable=True)
    encoded = routing.message_queues(topic, resource, readable, endpoints=ACCESS_POINT)
    route = service.QueryRouteResponse.FromString(routing.encode_route(encoded))
    assert route.status == v2.Status(code=v2.OK, message="OK")
    return list(route.message_queues)


def test_a_route_lists_every_queue_behind_the_clients_own_access_point() -> None:
    route = queues()
    assert [queue.id for queue in route] == list(range(8))
    for queue in route:
        assert queue.topic == v2.Resource(resource_namespace="space", name="topic")
        assert queue.permission == v2.READ_WRITE
        assert (queue.broker.name, queue.broker.id) == ("broker-0", 0)
        assert queue.broker.endpoints == ACCESS_POINT


def test_the_total_size_of_hosts_of_an_access_point_is_limited() -> None:
    """Each of 1,024 queues of a route repeats the hosts."""
    some = [v2.Address(host="1" * 40, port=1)] * 16
    assert routing.access_point(v2.Endpoints(scheme=v2.IPv4, addresses=some), None).addresses
    more = [*some[1:], v2.Address(host="1" * 41, port=1)]
    with pytest.raises(
        IllegalAccessPoint, match="the host list of an access point has at most 640 bytes, not 641"
    ):
        routing.access_point(v2.Endpoints(scheme=v2.IPv4, addresses=more), None)


def test_a_system_topic_is_read_only() -> None:
    topic = link_pb2.TopicConfig(id=2, name="%DLQ%group", queues=1, is_system=True)
    assert [queue.permission for queue in queues(topic)] == [v2.READ]


@pytest.mark.parametrize(
    ("kind", "accepted"),
    [
        (link_pb2.TOPIC_TYPE_NORMAL, [v2.NORMAL]),
        (link_pb2.TOPIC_TYPE_FIFO, [v2.FIFO]),
        (link_pb2.TOPIC_TYPE_DELAY, [v2.DELAY]),
        (link_pb2.TOPIC_TYPE_TRANSACTION, [v2.TRANSACTION]),
        (link_pb2.TOPIC_TYPE_LITE, [v2.LITE]),
        (link_pb2.TOPIC_TYPE_PRIORITY, [v2.PRIORITY, v2.NORMAL, v2.DELAY]),
        (link_pb2.TOPIC_TYPE_MIXED, [v2.NORMAL, v2.FIFO, v2.DELAY, v2.TRANSACTION]),
        (link_pb2.TOPIC_TYPE_UNSPECIFIED, [v2.NORMAL]),
    ],
)
def test_a_route_names_the_served_message_types_of_the_topic(
    kind: link_pb2.TopicType.ValueType, accepted: list[int]
) -> None:
    topic = link_pb2.TopicConfig(id=1, name="topic", type=kind, queues=1)
    assert list(queues(topic)[0].accept_message_types) == accepted


def test_an_assignment_may_name_a_broker_without_a_queue() -> None:
    readable = RouteQueues("broker-0", 8, is_writable=True)
    encoded = routing.message_queues(
        TOPIC,
        v2.Resource(name="topic"),
        readable,
        endpoints=ACCESS_POINT,
        queue_ids=(routing.ANY_QUEUE, 300),
    )
    response = service.QueryAssignmentResponse.FromString(routing.encode_assignments(encoded))
    assert response.status.code == v2.OK
    assert [one.message_queue.id for one in response.assignments] == [-1, 300]
    assert response.assignments[0].message_queue.broker.endpoints == ACCESS_POINT


def test_the_clients_access_point_is_echoed() -> None:
    assert routing.access_point(ACCESS_POINT, None) == ACCESS_POINT


@pytest.mark.parametrize(
    ("host", "scheme"),
    [("10.0.0.1", v2.IPv4), ("fd00::1", v2.IPv6), ("broker.example.org", v2.DOMAIN_NAME)],
)
def test_an_access_point_without_a_scheme_gets_the_one_of_its_host(
    host: str, scheme: v2.AddressScheme.ValueType
) -> None:
    endpoints = v2.Endpoints(addresses=[v2.Address(host=host, port=8081)])
    assert routing.access_point(endpoints, None).scheme == scheme


def test_a_domain_name_is_echoed_with_one_address() -> None:
    endpoints = v2.Endpoints(scheme=v2.DOMAIN_NAME, addresses=[*ACCESS_POINT.addresses] * 2)
    assert len(routing.access_point(endpoints, None).addresses) == 1


def test_a_request_without_an_access_point_gets_the_advertised_one() -> None:
    assert routing.access_point(v2.Endpoints(), ACCESS_POINT) == ACCESS_POINT
    with pytest.raises(IllegalAccessPoint):
        routing.access_point(v2.Endpoints(), None)


@pytest.mark.parametrize(("host", "port"), [("", 8081), (" ", 1), ("a", 0), ("a", 65_536)])
def test_an_invalid_access_point_is_rejected(host: str, port: int) -> None:
    endpoints = v2.Endpoints(scheme=v2.IPv4, addresses=[v2.Address(host=host, port=port)])
    with pytest.raises(IllegalAccessPoint):
        routing.access_point(endpoints, ACCESS_POINT)
