"""One queue of one broker group, as those name it who read beside consumers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tidemill.common.errors import BadRequest, BrokerGroupNotFound, TopicNotFound
from tidemill.message.resource_names import check_topic

if TYPE_CHECKING:
    from tidemill.proxy.cluster.cluster import BrokerGroup, Cluster

READER: Final = "/tidemill.broker.v1.BrokerReader/"
PULL_MAX: Final = 1_024  # messages of one pull, whatever is asked for
# Of the log, that one pull gives; a message that is larger is given alone.
PULL_BYTES_MAX: Final = 1 << 20


class Queue(NamedTuple):
    """A queue at one broker."""

    broker: BrokerGroup
    topic_id: int
    queue_id: int


def find_broker(cluster: Cluster, name: str) -> BrokerGroup:
    """Return a broker group by its name, which may be left out where there is one.

    Raises BrokerGroupNotFound.
    """
    brokers = cluster.brokers
    if not name and len(brokers) == 1:
        return brokers[0]
    for broker in brokers:
        if broker.name == name:
            return broker
    known = ", ".join(broker.name for broker in brokers)
    raise BrokerGroupNotFound(f"there is no broker group {name!r}; there are {known}")


def find_queue(cluster: Cluster, topic: str, broker_name: str, queue_id: int) -> Queue:
    """Return the queue of a topic at a broker.

    Raises BrokerGroupNotFound, TopicNotFound, IllegalTopic, BadRequest.
    """
    broker = find_broker(cluster, broker_name)
    own = broker.link.configuration.topics.get(topic)
    if own is not None and own.is_system:
        check_topic(topic)  # Of the broker's own some are hidden.
    else:
        own = broker.find_topic(cluster.find_topic(topic))
    if own is None:
        raise TopicNotFound(f"{broker.name} has not heard of the topic {topic} yet; repeat")
    if not 0 <= queue_id < own.queues:
        raise BadRequest(
            f"the topic {topic} has the queues 0 to {own.queues - 1} at {broker.name},"
            f" not {queue_id}"
        )
    return Queue(broker, own.id, queue_id)
