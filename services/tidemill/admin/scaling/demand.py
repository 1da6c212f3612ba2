"""The demand of a consumer group: its parts by topic and their sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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

    def paused(self) -> Demand:
        """Return the demand without messages that wait for the end of a pause."""
        return Demand([each._replace(ready=0, scheduled=0) for each in self.topics])

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


def topics_of(progress: Iterable[pb.GroupProgress]) -> set[str]:
    """Return the topics in the replies of all broker groups."""
    return {queue.topic for of_broker in progress for queue in of_broker.queues}


class DueCounts(NamedTuple):
    """Timers by due time at all broker groups, as counted once."""

    within_s: Sequence[int]  # ascending; the horizons of all triggers, and ages of a count
    begun_at_s: float  # by the monotonic clock of this process
    counts: Mapping[str, Mapping[str, pb.TimerCount]]  # by broker group and topic

    def scheduled(
        self, broker: str, topic: str, horizon_s: int, *, delivered: int, now_s: float
    ) -> int:
        """Return the counted timers within the horizon that are still pending.

        `delivered` is the present number of delivered messages. Timers that have become due since
        the count have been delivered, and count as ready, unless the broker is late.
        """
        count = self.counts.get(broker, {}).get(topic)
        if count is None:
            return 0
        due = count.counts[self.within_s.index(horizon_s)]
        age_s = now_s - self.begun_at_s
        # The next age would include timers that are not due yet. Messages with a short delay, sent
        # after the count, are delivered before them.
        past = [n for n, s in enumerate(self.within_s) if s <= age_s]
        became_due = min(count.counts[past[-1]], due) if past else 0
        # After a restart of the broker, its number begins at 0 again.
        return due - min(became_due, max(delivered - count.delivered, 0))


def demand_of(
    topics: Sequence[str],
    progress: Mapping[str, pb.GroupProgress],
    due: DueCounts,
    horizon_s: int,
    *,
    now_s: float,
) -> Demand:
    """Sum the replies of all broker groups for some topics."""
    ready, in_flight = dict.fromkeys(topics, 0), dict.fromkeys(topics, 0)
    scheduled = dict.fromkeys(topics, 0)
    for broker, of_broker in progress.items():
        delivered = of_broker.delivered_timers
        for topic in topics:
            scheduled[topic] += due.scheduled(
                broker, topic, horizon_s, delivered=delivered.get(topic, 0), now_s=now_s
            )
        for queue in of_broker.queues:
            if queue.topic in ready:
                ready[queue.topic] += queue.ready_count
                in_flight[queue.topic] += queue.in_flight_count
    return Demand(
        [TopicDemand(topic, ready[topic], in_flight[topic], scheduled[topic]) for topic in topics]
    )
