"""The numbers of topics and consumer groups, summed over broker groups from two samples of each.

A counter of a broker begins at 0 with each run of its process, so a rate needs two samples of one
run. A number is None if it is unknown at a broker group that has answered. The numbers of broker
groups without an answer are missing from the sums; `ClusterNumbers.unreachable` lists them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple, TypeVar, final

from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

ROWS_A_SLICE: Final = 100  # a fraction of a millisecond
MS_PER_S: Final = 1_000

N = TypeVar("N", int, float)

NO_RATES: Final = "a rate needs two samples of a broker"
NO_PROGRESS: Final = "the progress of the group is not read yet"
NO_LAST_HOUR: Final = "a broker group does not know the dead letters of the last hour yet"
LAST_HOUR: Final = "dead_letters_last_hour"


class GroupState(StrEnum):
    """The state of a consumer group."""

    ACTIVE = "ACTIVE"
    IDLE = "IDLE"
    NEVER_POLLED = "NEVER_POLLED"
    PAUSED = "PAUSED"


class BrokerSample(NamedTuple):
    """The counts of one broker group at one time."""

    run: str
    read_ms: int  # monotonic time of the run
    topics: dict[str, pb.TopicActivity]
    groups: dict[str, pb.GroupActivity]


class SamplePair(NamedTuple):
    """The newest sample of a broker group, and the one before it of the same run, if any."""

    new: BrokerSample
    old: BrokerSample | None

    @property
    def seconds(self) -> float | None:
        """The time between the samples; None: there is no time."""
        if self.old is None or self.new.read_ms <= self.old.read_ms:
            return None
        return (self.new.read_ms - self.old.read_ms) / MS_PER_S


class Consumers(NamedTuple):
    """The number of connected consumers by group; None: unknown, for a reason."""

    by_group: Mapping[str, int] | None
    reason: str = ""


@final
@dataclass(slots=True)
class TopicNumbers:
    """The numbers of a topic."""

    messages: int = 0
    pending_timers: int = 0
    bytes: int | None = 0
    in_per_second: float | None = 0.0
    out_per_second: float | None = 0.0
    ack_per_second: float | None = 0.0
    oldest_unacked_at_ms: int | None = None
    lags: dict[str, int | None] = field(default_factory=dict)  # by consumer group; None: unknown
    has_all_groups: bool = True  # whether `lags` has all consumer groups

    @property
    def lag(self) -> int | None:
        """The sum of the lags of its consumer groups."""
        known = [lag for lag in self.lags.values() if lag is not None]
        return sum(known) if self.has_all_groups and len(known) == len(self.lags) else None

    @property
    def unknown(self) -> str:
        """Why numbers are missing; "": none is."""
        reasons = []
        if self.in_per_second is None:
            reasons.append(NO_RATES)
        if self.bytes is None:
            reasons.append("the broker has not counted the bytes yet")
        return "; ".join(reasons)


@final
@dataclass(slots=True)
class GroupNumbers:
    """The numbers of a consumer group."""

    ready: int | None = 0
    in_flight: int | None = 0
    blocked: int | None = 0
    locked_queues: int | None = 0
    oldest_unacked_at_ms: int | None = None
    in_per_second: float | None = 0.0
    out_per_second: float | None = 0.0
    ack_per_second: float | None = 0.0
    retry_per_second: float | None = 0.0
    consumers: int | None = None
    dead_letters: int = 0
    dead_letters_last_hour: int | None = 0
    has_polled: bool = False
    topics: set[str] = field(default_factory=set)  # the topics of its messages
    state: GroupState | None = None
    unknown: str = ""  # why numbers are missing

    @property
    def lag(self) -> int | None:
        """The sum of ready, blocked and in-flight messages."""
        if self.ready is None or self.blocked is None or self.in_flight is None:
            return None
        return self.ready + self.blocked + self.in_flight

    def forget_progress(self) -> None:
        """Make the progress unknown."""
        self.ready = self.in_flight = self.blocked = self.locked_queues = None
        self.oldest_unacked_at_ms = None


@final
class ClusterNumbers:
    """The numbers of all topics and consumer groups at one time."""

    def __init__(
        self,
        sampled_at_ms: int,
        unreachable: Mapping[str, str] | None = None,
        consumers: Consumers | None = None,
    ) -> None:
        self.sampled_at_ms = sampled_at_ms
        self.unreachable = dict(unreachable or {})  # the reason by broker group
        self.consumers = consumers or Consumers(None, "the clients are not counted yet")
        self.topics: dict[str, TopicNumbers] = {}
        self.groups: dict[str, GroupNumbers] = {}
        self._is_progress_complete = False

    def has_consumer(self, topic: str) -> bool | None:
        """Whether a consumer group reads a topic, or is subscribed to it; None: unknown."""
        if self.topics[topic].lags:
            return True
        return False if self._is_progress_complete else None

    def add_all(self, pairs: Mapping[str, SamplePair]) -> Iterator[None]:
        """Add the samples of all broker groups that answered; yield between slices."""
        for pair in pairs.values():
            for number, topic in enumerate(pair.new.topics.values()):
                self._add_topic(pair, topic)
                if number % ROWS_A_SLICE == 0:
                    yield
        lacking: set[str] = set()
        has_all_groups = True
        for pair in pairs.values():
            groups = pair.new.groups.values()
            # A group that alone has no progress is new: the topics that it has read are listed.
            has_all_groups &= not groups or any(group.has_progress for group in groups)
            for number, group in enumerate(groups):
                if not group.has_progress or not all(one.has_progress for one in group.topics):
                    lacking.add(group.name)
                self._add_group(pair, group)
                if number % ROWS_A_SLICE == 0:
                    yield
        self._is_progress_complete = not lacking and not self.unreachable
        for number, topic_numbers in enumerate(self.topics.values()):
            topic_numbers.has_all_groups = has_all_groups
            if number % ROWS_A_SLICE == 0:
                yield
        for number, (name, found) in enumerate(self.groups.items()):
            self._finish(name, found, has_progress=name not in lacking)
            if number % ROWS_A_SLICE == 0:
                yield

    def _add_topic(self, pair: SamplePair, topic: pb.TopicActivity) -> None:
        found = self.topics.setdefault(topic.name, TopicNumbers())
        found.messages += topic.messages
        found.pending_timers += topic.pending_timers
        found.bytes = _sum(found.bytes, topic.log_bytes if topic.HasField("log_bytes") else None)
        old = None if pair.old is None else pair.old.topics.get(topic.name)
        # A topic that the older sample lacks is new. A deleted and created topic has another id.
        before = old.stored if old is not None and old.id == topic.id else 0
        found.in_per_second = _sum(found.in_per_second, _rate(pair, topic.stored - before))
        if pair.seconds is None:
            found.out_per_second = found.ack_per_second = None

    def _add_group(self, pair: SamplePair, group: pb.GroupActivity) -> None:
        found = self.groups.setdefault(group.name, GroupNumbers())
        found.dead_letters += group.dead_letters
        last_hour = group.dead_letters_last_hour if group.HasField(LAST_HOUR) else None
        found.dead_letters_last_hour = _sum(found.dead_letters_last_hour, last_hour)
        found.has_polled |= group.has_polled
        known = None if pair.old is None else pair.old.groups.get(group.name)
        is_same = known is not None and known.id == group.id
        old = {one.topic: one for one in known.topics} if known is not None and is_same else {}
        if pair.seconds is None:
            found.out_per_second = found.ack_per_second = found.retry_per_second = None
        for one in group.topics:
            # A broker lists a topic from its first count on, so it has counted nothing before.
            self._add_pair(pair, found, group.name, one, old.get(one.topic, NO_COUNTS))

    def _add_pair(
        self,
        pair: SamplePair,
        group: GroupNumbers,
        name: str,
        new: pb.GroupTopicActivity,
        old: pb.GroupTopicActivity,
    ) -> None:
        group.topics.add(new.topic)
        group.ready = _sum(group.ready, new.ready)
        group.in_flight = _sum(group.in_flight, new.in_flight)
        group.blocked = _sum(group.blocked, new.blocked)
        group.locked_queues = _sum(group.locked_queues, new.locked_queues)
        group.oldest_unacked_at_ms = _earlier(group.oldest_unacked_at_ms, new.oldest_unacked_at_ms)
        out = _rate(pair, new.delivered - old.delivered)
        acked = _rate(pair, new.acked - old.acked)
        group.out_per_second = _sum(group.out_per_second, out)
        group.ack_per_second = _sum(group.ack_per_second, acked)
        retried = _rate(pair, new.redelivered - old.redelivered)
        group.retry_per_second = _sum(group.retry_per_second, retried)
        topic = self.topics.get(new.topic)
        if topic is not None:
            topic.out_per_second = _sum(topic.out_per_second, out)
            topic.ack_per_second = _sum(topic.ack_per_second, acked)
            lag = new.ready + new.blocked + new.in_flight if new.has_progress else None
            topic.lags[name] = _sum(topic.lags.get(name, 0), lag)
            topic.oldest_unacked_at_ms = _earlier(
                topic.oldest_unacked_at_ms, new.oldest_unacked_at_ms
            )

    def _finish(self, name: str, group: GroupNumbers, *, has_progress: bool) -> None:
        """Set the numbers that need all broker groups."""
        reasons = []
        if self.consumers.by_group is not None:
            group.consumers = self.consumers.by_group.get(name, 0)
        else:
            reasons.append(self.consumers.reason)
        for topic in group.topics & self.topics.keys():
            group.in_per_second = _sum(group.in_per_second, self.topics[topic].in_per_second)
        if group.out_per_second is None or group.in_per_second is None:
            reasons.append(NO_RATES)
        if group.dead_letters_last_hour is None:
            reasons.append(NO_LAST_HOUR)
        if not has_progress or (group.has_polled and not group.topics):
            reasons.append(NO_PROGRESS)
            group.forget_progress()
            group.in_per_second = None  # More topics may be its topics.
        elif not group.topics:
            group.forget_progress()
            if self.unreachable:
                names = ", ".join(self.unreachable)
                reasons.append(f"the other broker groups have no progress of it, but {names} may")
            else:
                group.state = GroupState.NEVER_POLLED
        if group.state is None:
            group.state = _state_of(group)
        group.unknown = "; ".join(reasons)


NO_COUNTS: Final = pb.GroupTopicActivity()


def _state_of(group: GroupNumbers) -> GroupState | None:
    if group.consumers or group.out_per_second or group.ack_per_second:
        return GroupState.ACTIVE
    rates = group.out_per_second, group.ack_per_second
    is_known = group.consumers is not None and None not in rates and group.lag is not None
    return GroupState.IDLE if is_known else None


def _rate(pair: SamplePair, difference: int) -> float | None:
    seconds = pair.seconds
    return None if seconds is None or difference < 0 else difference / seconds


def _sum(one: N | None, other: N | None) -> N | None:
    return None if one is None or other is None else one + other


def _earlier(one_ms: int | None, other_ms: int) -> int | None:
    """Return the earlier of two times; 0 and None mean that there is none."""
    return min(filter(None, (one_ms, other_ms)), default=None)
