"""Metrics of delayed messages: counts of the engine by topic id, named at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tidemill.broker.engine.layout.message import TimerReason
from tidemill.broker.engine.layout.numbers import TopicId
from tidemill.broker.engine.timer.audit import NO_TOPIC
from tidemill.broker.engine.timer.census import BOUNDS_S, PEAK_WINDOWS_S
from tidemill.broker.metrics.metered_rounds import STORAGE, STORAGE_LABELS, MeteredRounds
from tidemill.common.histogram import Histogram
from tidemill.common.metrics import Labels, Registry, full_parts, histogram_parts

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.timer.delayed_messages import DelayedMessages

RECALL_RESULTS = ("recalled", "already_fired", "not_found", "duplicate")
RESCHEDULE_RESULTS = ("rescheduled", "already_fired", "not_found", "conflict")
FLOW_CONTROL_REASONS = ("slot_full", "backlog", "horizon")
DROP_REASONS = (TimerReason.TOPIC_DELETED, TimerReason.EXPIRED, TimerReason.DAMAGED)
UNKNOWN = ""  # the topic of a request for an unknown timer, and of timers of deleted topics
_DELAYED = (3, 7)  # types of topics that can have delayed messages: DELAY and MIXED


class TimerMetrics:
    """Metrics of the timers."""

    def __init__(self, registry: Registry, rounds: MeteredRounds) -> None:
        self._rounds = rounds
        self._topics = registry.label_sets("rocketmq_timing_messages", ("topic",))
        registry.register(self._collect)

    def _collect(self) -> Iterator[Metric]:
        engine = self._rounds.engine
        timers = engine.timers
        yield from self._collect_pipeline(engine)
        yield from self._collect_due(timers)
        yield from self._collect_commands(timers)
        yield from self._collect_dropped(timers)
        yield from self._collect_clock()
        yield from self._collect_files(engine)

    def _name(self, topic_id: TopicId) -> str | None:
        """Return the topic to show; None if it was deleted."""
        topic = self._rounds.engine.catalog.topics.get(topic_id)
        return None if topic is None else self._topics.admit((topic.name,))[0]

    def _by_topic(
        self, family: CounterMetricFamily | GaugeMetricFamily, counts: Mapping[TopicId, int]
    ) -> Iterator[Metric]:
        """Yield a count for each topic that had delayed messages or can have them."""
        for topic in list(self._rounds.engine.catalog.topics.values()):
            if topic.id in counts or topic.type in _DELAYED:
                name = self._topics.admit((topic.name,))[0]
                family.add_metric((*STORAGE, name), counts.get(topic.id, 0))
                yield from full_parts(family)
        yield family

    def _topics_seen(self, counted: Iterable[int] = ()) -> Iterator[tuple[TopicId, str]]:
        """Yield "no topic", the topics that had timers, and the topics of `counted`.

        They are yielded one by one: twenty thousand at once would be too long a slice.
        """
        timers = self._rounds.engine.timers
        delays, pending = timers.commands.delays, timers.index.counts.pending
        yield NO_TOPIC, UNKNOWN
        waiting = (topic_id for topic_id in list(pending) if topic_id not in delays)
        others = (
            topic_id
            for topic_id in map(TopicId, counted)
            if topic_id and topic_id not in delays and topic_id not in pending
        )
        for topic_id in chain(delays.labels, waiting, others):
            name = self._name(topic_id)
            if name is not None:
                yield topic_id, name

    def _collect_pipeline(self, engine: Engine) -> Iterator[Metric]:
        timers, labels = engine.timers, (*STORAGE_LABELS, "topic")
        yield from self._by_topic(
            GaugeMetricFamily("rocketmq_timing_messages", "Pending messages.", labels=labels),
            timers.index.counts.pending,
        )
        yield from self._by_topic(
            CounterMetricFamily("rocketmq_timer_enqueue_total", "Scheduled.", labels=labels),
            timers.commands.delays.totals(),
        )
        yield from self._by_topic(
            CounterMetricFamily("rocketmq_timer_dequeue_total", "Delivered.", labels=labels),
            timers.deliverer.delivered,
        )
        oldest_ms = timers.deliverer.oldest_due_ms()
        behind_ms = 0 if oldest_ms is None else max(self._rounds.now_ms - oldest_ms, 0)
        for name, help_, value in (
            ("enqueue_lag", "Messages not on the wheel; always 0, as a send adds them.", 0),
            ("enqueue_latency", "Ms that the oldest of them waits; always 0.", 0),
            (
                "dequeue_lag",
                "Messages that are loaded, due, and not delivered.",
                timers.deliverer.waiting_count,
            ),
            ("dequeue_latency", "Ms since the oldest undelivered message was due.", behind_ms),
        ):
            gauge = GaugeMetricFamily(f"rocketmq_timer_{name}", help_, labels=STORAGE_LABELS)
            gauge.add_metric(STORAGE, value)
            yield gauge
        yield from self._histogram(
            "rocketmq_delay_message_latency",
            "Requested delay in seconds.",
            timers.commands.delays,
            1,
        )
        yield from self._histogram(
            "rocketmq_timer_lateness_seconds",
            "Seconds from the due time of a message to its delivery into its topic.",
            timers.deliverer.lateness,
            1000,
        )

    def _histogram(
        self, name: str, help_: str, found: Histogram[TopicId], divisor: int
    ) -> Iterator[Metric]:
        def labels_of(topic_id: TopicId) -> Labels | None:
            topic = self._name(topic_id)
            return None if topic is None else (*STORAGE, topic)

        labels = (*STORAGE_LABELS, "topic")
        return histogram_parts(name, help_, labels, found, labels_of, divisor=divisor)

    def _collect_due(self, timers: DelayedMessages) -> Iterator[Metric]:
        census = timers.census
        snapshot = GaugeMetricFamily(
            "rocketmq_timer_message_snapshot",
            "Messages due between the next lower bound and this one, in seconds from now.",
            labels=(*STORAGE_LABELS, "timer_bound_s"),
        )
        for bound_s, count in zip(BOUNDS_S, census.due_within, strict=True):
            snapshot.add_metric((*STORAGE, str(bound_s)), count)
        peak = GaugeMetricFamily(
            "rocketmq_timer_due_peak_messages",
            "Messages due in the fullest second of the coming window.",
            labels=("window_s",),
        )
        for window_s, count in zip(PEAK_WINDOWS_S, census.peaks, strict=True):
            peak.add_metric((str(window_s),), count)
        yield from (snapshot, peak)

    def _collect_commands(self, timers: DelayedMessages) -> Iterator[Metric]:
        recalls = CounterMetricFamily(
            "rocketmq_timer_recall_total", "Cancellations.", labels=("topic", "result")
        )
        moves = CounterMetricFamily(
            "rocketmq_timer_reschedule_total",
            "Changes of the due time, including delivery at once.",
            labels=("topic", "result"),
        )
        for family, counts, results in (
            (recalls, timers.commands.recalled, RECALL_RESULTS),
            (moves, timers.commands.rescheduled, RESCHEDULE_RESULTS),
        ):
            for topic_id, topic in self._topics_seen(dict.fromkeys(one for one, _ in counts)):
                for result in results:
                    family.add_metric((topic, result), counts[topic_id, result])
                yield from full_parts(family)
        rejected = CounterMetricFamily(
            "rocketmq_timer_flow_control_total", "Rejected delayed sends.", labels=("reason",)
        )
        for reason in FLOW_CONTROL_REASONS:
            rejected.add_metric((reason,), timers.admission.refused[reason])
        yield from (recalls, moves, rejected)
        yield CounterMetricFamily(
            "rocketmq_timer_client_skew_total",
            "Delayed sends from clients with a clock that is off by more than two seconds.",
            value=timers.admission.skewed_count,
        )
        yield from self._counter(
            "shaped_total",
            "Messages delivered later by the policy spread.",
            timers.admission.spread,
        )
        yield from self._counter(
            "evacuated_total", "Messages copied out of old segments.", timers.evacuation.evacuated
        )
        yield from self._counter(
            "audit_drift_total", "Corrections of counts by the audit.", timers.janitor.audit.drift
        )
        yield CounterMetricFamily(
            "rocketmq_timer_early_total",
            "Messages found too early at the last check, and held back: a defect.",
            value=timers.deliverer.early_count,
        )

    def _collect_dropped(self, timers: DelayedMessages) -> Iterator[Metric]:
        dropped = CounterMetricFamily(
            "rocketmq_timer_dropped_total",
            "Timers given up and dead-lettered.",
            labels=("topic", "reason"),
        )
        quarantined = GaugeMetricFamily(
            "rocketmq_timer_quarantined_messages",
            "Timers set aside because their record is damaged.",
            labels=("topic",),
        )
        of_topics = timers.deliverer.dropped
        set_aside = Counter(timers.quarantined.values())
        shown = set()
        counted = dict.fromkeys((*(topic_id for topic_id, _ in of_topics), *set_aside))
        for topic_id, name in self._topics_seen(counted):
            if not topic_id:
                continue  # Comes last, together with deleted topics.
            shown.add(topic_id)
            for why in DROP_REASONS:
                dropped.add_metric((name, why.name.lower()), of_topics[topic_id, why])
            quarantined.add_metric((name,), set_aside[topic_id])
            yield from full_parts(dropped, quarantined)
        # The most frequent case: the timer was given up because its topic was deleted.
        others = [topic_id for topic_id in counted if topic_id not in shown]
        for why in DROP_REASONS:
            count = sum(of_topics[topic_id, why] for topic_id in others)
            dropped.add_metric((UNKNOWN, why.name.lower()), count)
        quarantined.add_metric((UNKNOWN,), sum(set_aside[topic_id] for topic_id in others))
        yield from (dropped, quarantined)

    def _counter(self, name: str, help_: str, counts: Mapping[TopicId, int]) -> Iterator[Metric]:
        family = CounterMetricFamily(f"rocketmq_timer_{name}", help_, labels=("topic",))
        # Topic 0 means no topic: a correction of the counts that guard the log.
        for topic_id, topic in self._topics_seen(list(counts)):
            family.add_metric((topic,), counts.get(topic_id, 0))
            yield from full_parts(family)
        yield family

    def _collect_clock(self) -> Iterator[Metric]:
        clock = self._rounds.firing_clock
        yield GaugeMetricFamily(
            "rocketmq_timer_clock_hold",
            "1 while firing is held back after a clock step.",
            value=int(clock.is_holding),
        )
        yield GaugeMetricFamily(
            "rocketmq_timer_clock_step_seconds",
            "The last jump of the wall clock.",
            value=clock.last_step_ms / 1000,
        )

    def _collect_files(self, engine: Engine) -> Iterator[Metric]:
        timers = engine.timers
        at_ms = timers.flusher.checkpoint_at_ms
        age_s = (self._rounds.now_ms - at_ms) / 1000 if at_ms else 0
        for name, help_, value in (
            (
                "pinned_bytes",
                "Bytes of the log kept for pending messages.",
                timers.index.counts.pinned_bytes,
            ),
            ("index_bytes", "Bytes of timer log, wheel and state table.", timers.files_bytes),
            ("wheel_slots_used", "Slots (seconds) with timers.", timers.census.slots_used),
            ("checkpoint_age_seconds", "Age of the newest checkpoint; 0: no checkpoint.", age_s),
            ("recover_seconds", "Duration of the last start.", engine.recovery_ms / 1000),
        ):
            yield GaugeMetricFamily(f"rocketmq_timer_{name}", help_, value=value)
