"""Routes for clients: queues, and the endpoints to reach them.

Every route names the access point of the client, the endpoints of its own configuration. They lead
to some proxy. Address translation, port mapping and load balancers therefore need no settings.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tidemill.common.errors import IllegalAccessPoint
from tidemill.message import limits
from tidemill.message.rules import advertised_types
from tidemill.message.wire import bytes_field, varint_field
from tidemill.proxy.message_codec import OK_STATUS
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from tidemill.proxy.cluster.cluster import RouteQueues

MASTER_ID = 0  # clients use only brokers with this id
ANY_QUEUE = -1  # queue id in assignments of a consumer group that is not ordered


def access_point(endpoints: v2.Endpoints, advertised: v2.Endpoints | None) -> v2.Endpoints:
    """Return the endpoints of a route: those of the client, or those that the proxy advertises."""
    if not endpoints.addresses:
        if advertised is None:
            raise IllegalAccessPoint(
                "the request names no endpoints, and this proxy advertises none: set"
                " advertised_address"
            )
        return advertised
    limits.ENDPOINTS.check_count(len(endpoints.addresses))
    for address in endpoints.addresses:
        limits.HOST.check_text(address.host)
        if not address.host.strip() or not 0 < address.port < 65_536:
            raise IllegalAccessPoint(
                f"{address.host!r}:{address.port} is not a valid address; use host and port"
            )
    limits.HOSTS.check_count(sum(len(address.host.encode()) for address in endpoints.addresses))
    scheme = endpoints.scheme or scheme_of(endpoints.addresses[0].host)
    # Clients reject two addresses with the scheme of domain names.
    addresses = endpoints.addresses[:1] if scheme == v2.DOMAIN_NAME else endpoints.addresses
    return v2.Endpoints(scheme=scheme, addresses=addresses)


def scheme_of(host: str) -> v2.AddressScheme.ValueType:
    """Return the address scheme of `host`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return v2.DOMAIN_NAME
    return v2.IPv4 if address.version == 4 else v2.IPv6


def message_queues(
    topic: link_pb2.TopicConfig,
    resource: v2.Resource,
    group_queues: RouteQueues,
    *,
    endpoints: v2.Endpoints,
    queue_ids: Iterable[int] | None = None,
) -> list[bytes]:
    """Return the encoded queues of `topic` at one broker group: all, or those of `queue_ids`.

    Queues differ only in their ids, so the other fields are encoded once. Otherwise a topic with a
    thousand queues would block the event loop for 20 ms.
    """
    is_writable = group_queues.is_writable and not topic.is_system
    before = v2.MessageQueue(topic=resource).SerializeToString()
    behind = v2.MessageQueue(
        permission=v2.READ_WRITE if is_writable else v2.READ,
        broker=v2.Broker(name=group_queues.broker_name, id=MASTER_ID, endpoints=endpoints),
        accept_message_types=advertised_types(topic.type),
    ).SerializeToString()
    ids = range(group_queues.queues) if queue_ids is None else queue_ids
    return [before + varint_field(2, queue_id) + behind for queue_id in ids]


def encode_route(queues: Iterable[bytes]) -> bytes:
    """Return the response to QueryRoute."""
    return OK_STATUS + b"".join([bytes_field(2, queue) for queue in queues])


def encode_assignments(queues: Iterable[bytes]) -> bytes:
    """Return the response to QueryAssignment: the queues that a push consumer polls."""
    return OK_STATUS + b"".join([bytes_field(2, bytes_field(1, queue)) for queue in queues])
