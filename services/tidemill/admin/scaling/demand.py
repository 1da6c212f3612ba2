"""How much there is to do for a group: parts by topic, and the number they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tidemill.admin.scaling.trigger import Trigger
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


class TopicDemand(NamedTuple):
    """What one topic has for the group, at all broker groups."""

    topic: str
    ready: int  # what waits behind a locked queue of a FIFO group among it
    in_flight: int
    scheduled: int  # due within the horizon, and what is overdue


class Demand(NamedTuple):
    """What there is to do."""

    topics: Sequence[TopicDemand]

    @property
    def ready(self) -> int:
        """Messages that wait for a consumer."""
        return sum(each.ready for each in self.topics)

    @property
    def in_flight(self) -> int:
        """Messages that consumers have."""
        return sum(each.in_flight for each in self.topics)

    @property
    def scheduled(self) -> int:
        """Messages that will wait soon."""
        return sum(each.scheduled for each in self.topics)

    def value(self, *, counts_in_flight: bool) -> int:
        """Return the number that consumers are scaled by."""
        return self.ready + self.scheduled + (self.in_flight if counts_in_flight else 0)


def value_of(demand: Demand, trigger: Trigger) -> int:
    """Return the number that a trigger's consumers are scaled by."""
    return demand.value(counts_in_flight=trigger.counts_in_flight)


def is_active(demand: Demand, trigger: Trigger) -> bool:
    """Whether there should be a consumer at all."""
    return value_of(demand, trigger) > trigger.activation_messages


def replicas_of(value: int, messages_per_replica: int) -> int:
    """Return how many consumers that is work for, as a HorizontalPodAutoscaler counts them."""
    return -(-value // messages_per_replica)


def topics_begun(progress: pb.GroupProgress) -> set[str]:
    """Return the topics that a group has begun to read at one broker group."""
    return {queue.topic for queue in progress.queues}


def demand_of(
    topics: Sequence[str],
    progress: Sequence[pb.GroupProgress],
    unread: Mapping[str, int],
    scheduled: Mapping[str, int],
) -> Demand:
    """Add up what broker groups have said of some topics.

    `unread` is what lies where the group has not begun to read the topic, and would.
    """
    ready, in_flight = dict.fromkeys(topics, 0), dict.fromkeys(topics, 0)
    for of_broker in progress:
        for queue in of_broker.queues:
            if queue.topic in ready:
                ready[queue.topic] += queue.ready_count
                in_flight[queue.topic] += queue.in_flight_count
    return Demand(
        [
            TopicDemand(
                topic,
                ready[topic] + unread.get(topic, 0),
                in_flight[topic],
                scheduled.get(topic, 0),
            )
            for topic in topics
        ]
    )
