"""One queue of one broker group, as requests that read without consuming name it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tidemill.common.errors import BadRequest, BrokerGroupNotFound, TopicNotFound
from tidemill.message.resource_names import check_topic

if TYPE_CHECKING:
    from tidemill.proxy.cluster.cluster import BrokerCluster, LinkedGroup

READER: Final = "/tidemill.broker.v1.BrokerReader/"
PULL_MAX: Final = 1_024  # messages per pull, even if a client requests more
# Log bytes per pull. A larger message is returned alone.
PULL_BYTES_MAX: Final = 1 << 20


class BrokerQueue(NamedTuple):
    """A queue at one broker."""

    broker: LinkedGroup
    topic_id: int
    queue_id: int


def find_broker(cluster: BrokerCluster, name: str) -> LinkedGroup:
    """Return a broker group by its name, which may be empty if there is only one.

    Raises BrokerGroupNotFound.
    """
    brokers = cluster.brokers
    if not name and len(brokers) == 1:
        return brokers[0]
    for broker in brokers:
        if broker.name == name:
            return broker
    known = ", ".join(broker.name for broker in brokers)
    raise BrokerGroupNotFound(f"unknown broker group {name!r}; known: {known}")


def find_queue(cluster: BrokerCluster, topic: str, broker_name: str, queue_id: int) -> BrokerQueue:
    """Return the queue of a topic at a broker.

    Raises BrokerGroupNotFound, TopicNotFound, IllegalTopic, BadRequest.
    """
    broker = find_broker(cluster, broker_name)
    own = broker.link.configuration.topics.get(topic)
    if own is not None and own.is_system:
        check_topic(topic)  # Some system topics are hidden.
    else:
        own = broker.find_topic(cluster.find_topic(topic))
    if own is None:
        raise TopicNotFound(f"{broker.name} does not know the topic {topic} yet; retry")
    if not 0 <= queue_id < own.queues:
        raise BadRequest(
            f"the topic {topic} has the queues 0 to {own.queues - 1} at {broker.name},"
            f" not {queue_id}"
        )
    return BrokerQueue(broker, own.id, queue_id)
