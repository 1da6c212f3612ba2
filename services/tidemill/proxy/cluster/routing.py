"""What clients are told about where things are.

Clients see one thing only: their own access point, which leads to some proxy. So every route names
the endpoints that the client itself was configured with, and network address translation, port
mapping and load balancers between the two work unnoticed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tidemill.common.errors import IllegalAccessPoint
from tidemill.message import limits
from tidemill.message.rules import accepted_types
from tidemill.message.wire import bytes_field, varint_field
from tidemill.proxy.message_codec import OK_STATUS
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from tidemill.proxy.cluster.cluster import RouteQueues

MASTER_ID = 0  # clients send to and receive from nothing else
ANY_QUEUE = -1  # id in the assignments of a group that is not ordered


def access_point(endpoints: v2.Endpoints, advertised: v2.Endpoints | None) -> v2.Endpoints:
    """Return the endpoints to name in a route: the client's own, or those the proxy advertises."""
    if not endpoints.addresses:
        if advertised is None:
            raise IllegalAccessPoint(
                "the request names no endpoints, and this proxy advertises none of its own"
            )
        return advertised
    limits.ENDPOINTS.check_count(len(endpoints.addresses))
    for address in endpoints.addresses:
        limits.HOST.check_text(address.host)
        if not address.host.strip() or not 0 < address.port < 65_536:
            raise IllegalAccessPoint(f"no client can connect to {address.host!r}:{address.port}")
    limits.HOSTS.check_count(sum(len(address.host.encode()) for address in endpoints.addresses))
    scheme = endpoints.scheme or scheme_of(endpoints.addresses[0].host)
    # Clients refuse two addresses below a domain name.
    addresses = endpoints.addresses[:1] if scheme == v2.DOMAIN_NAME else endpoints.addresses
    return v2.Endpoints(scheme=scheme, addresses=addresses)


def scheme_of(host: str) -> v2.AddressScheme.ValueType:
    """Return the scheme under which clients can use `host`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return v2.DOMAIN_NAME
    return v2.IPv4 if address.version == 4 else v2.IPv6


def message_queues(
    topic: link_pb2.TopicConfig,
    resource: v2.Resource,
    readable: RouteQueues,
    *,
    endpoints: v2.Endpoints,
    queue_ids: Iterable[int] | None = None,
) -> list[bytes]:
    """Return each queue of `topic` at one broker group, as a route shows it, encoded.

    Or those that are named. They differ in their ids alone, so all else is encoded once: a topic of
    a thousand queues would take twenty milliseconds of a turn.
    """
    is_writable = readable.is_writable and not topic.is_system
    before = v2.MessageQueue(topic=resource).SerializeToString()
    behind = v2.MessageQueue(
        permission=v2.READ_WRITE if is_writable else v2.READ,
        broker=v2.Broker(name=readable.broker_name, id=MASTER_ID, endpoints=endpoints),
        accept_message_types=accepted_types(topic.type),
    ).SerializeToString()
    ids = range(readable.queues) if queue_ids is None else queue_ids
    return [before + varint_field(2, queue_id) + behind for queue_id in ids]


def encode_route(queues: Iterable[bytes]) -> bytes:
    """Return the response to QueryRoute."""
    return OK_STATUS + b"".join([bytes_field(2, queue) for queue in queues])


def encode_assignments(queues: Iterable[bytes]) -> bytes:
    """Return the response to QueryAssignment: what a push consumer should poll."""
    return OK_STATUS + b"".join([bytes_field(2, bytes_field(1, queue)) for queue in queues])
