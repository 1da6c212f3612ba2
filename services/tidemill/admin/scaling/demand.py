"""The demand of a consumer group: its parts by topic and their sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tidemill.admin.scaling.trigger import Trigger
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


class TopicDemand(NamedTuple):
    """The demand of one topic, summed over all broker groups."""

    topic: str
    ready: int  # includes messages in locked queues of a FIFO group
    in_flight: int
    scheduled: int  # overdue or due within the horizon


class Demand(NamedTuple):
    """The demand of a consumer group."""

    topics: Sequence[TopicDemand]

    @property
    def ready(self) -> int:
        """Messages that a consumer can receive now."""
        return sum(each.ready for each in self.topics)

    @property
    def in_flight(self) -> int:
        """Messages in flight."""
        return sum(each.in_flight for each in self.topics)

    @property
    def scheduled(self) -> int:
        """Delayed messages that are due soon."""
        return sum(each.scheduled for each in self.topics)

    def value(self, *, counts_in_flight: bool) -> int:
        """Return the demand as one number."""
        return self.ready + self.scheduled + (self.in_flight if counts_in_flight else 0)


def value_of(demand: Demand, trigger: Trigger) -> int:
    """Return the demand as a trigger counts it."""
    return demand.value(counts_in_flight=trigger.counts_in_flight)


def is_active(demand: Demand, trigger: Trigger) -> bool:
    """Whether the group needs at least one consumer."""
    return value_of(demand, trigger) > trigger.activation_messages


def replicas_of(value: int, messages_per_replica: int) -> int:
    """Return the number of consumers for a demand, rounded up as by a HorizontalPodAutoscaler."""
    return -(-value // messages_per_replica)


def topics_begun(progress: pb.GroupProgress) -> set[str]:
    """Return the topics that a group reads at one broker group."""
    return {queue.topic for queue in progress.queues}


def demand_of(
    topics: Sequence[str],
    progress: Sequence[pb.GroupProgress],
    unread: Mapping[str, int],
    scheduled: Mapping[str, int],
) -> Demand:
    """Sum the replies of all broker groups for some topics.

    `unread` counts the messages at broker groups where the group has not read the topic yet.
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
