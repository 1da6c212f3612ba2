"""Metrics of dead letters by state, of their replays and discards, and of operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tidemill.broker.engine.dead_letter.letters import LetterOutcome
from tidemill.broker.engine.layout.operation import OperationKind, OperationState
from tidemill.common.metrics import full_parts

if TYPE_CHECKING:
    from tidemill.broker.metrics.metered_rounds import MeteredRounds
    from tidemill.common.metrics import Registry

STATE_LABELS: Final = ("consumer_group", "state")
REPLAY_LABELS: Final = ("consumer_group", "result")
DISCARD_LABELS: Final = ("consumer_group",)


@final
class DeadLetterMetrics:
    """Metrics of dead letters of consumer groups."""

    def __init__(self, registry: Registry, rounds: MeteredRounds) -> None:
        self._rounds = rounds
        self._states = registry.label_sets("rocketmq_dlq_messages", STATE_LABELS)
        self._replays = registry.label_sets("rocketmq_dlq_replayed_total", REPLAY_LABELS)
        self._discards = registry.label_sets("rocketmq_dlq_discarded_total", DISCARD_LABELS)
        registry.register(self._collect)

    def _collect(self) -> Iterator[Metric]:
        yield from self._collect_states()
        yield from self._collect_settled()
        yield from self._collect_operations()

    def _collect_states(self) -> Iterator[Metric]:
        engine = self._rounds.engine
        gauge = GaugeMetricFamily(
            "rocketmq_dlq_messages",
            "Messages in a group's dead-letter topic by state: open, replayed or discarded.",
            labels=STATE_LABELS,
        )
        letters = engine.dead_letters
        for group in list(engine.catalog.groups.values()):
            topic = letters.topic_of(group)
            open_count, settled = (0, (0, 0)) if topic is None else letters.counts_of(topic)
            counts = {"open": open_count, "replayed": settled[0], "discarded": settled[1]}
            for state, count in counts.items():
                gauge.add_metric(self._states.admit((group.name, state)), count)
            yield from full_parts(gauge)
        yield gauge

    def _collect_settled(self) -> Iterator[Metric]:
        engine = self._rounds.engine
        groups, letters = engine.catalog.groups, engine.dead_letters
        replays = CounterMetricFamily(
            "rocketmq_dlq_replayed_total",
            "Replays of dead letters by result.",
            labels=REPLAY_LABELS,
        )
        discards = CounterMetricFamily(
            "rocketmq_dlq_discarded_total", "Discarded dead letters.", labels=DISCARD_LABELS
        )
        for key in [key for key in letters.replays if key[0] not in groups]:
            del letters.replays[key]
        for group_id in [group_id for group_id in letters.discards if group_id not in groups]:
            del letters.discards[group_id]
        for group in list(groups.values()):
            if letters.topic_of(group) is None:
                continue
            for result in LetterOutcome:
                count = letters.replays[group.id, result]
                if count or result is LetterOutcome.REPLAYED:
                    replays.add_metric(self._replays.admit((group.name, result.lower())), count)
            discards.add_metric(self._discards.admit((group.name,)), letters.discards[group.id])
            yield from full_parts(replays, discards)
        yield from (replays, discards)

    def _collect_operations(self) -> Iterator[Metric]:
        gauge = GaugeMetricFamily(
            "rocketmq_operations",
            "Operations that run, or ended in the last 7 days, by kind and state.",
            labels=("kind", "state"),
        )
        known = self._rounds.engine.catalog.operations.known(self._rounds.now_ms)
        counts = Counter([(one.kind, one.state) for one in known])
        for kind in OperationKind:
            for state in OperationState:
                labels = kind.name.lower(), state.name.lower()
                gauge.add_metric(labels, counts[kind, state])
        yield gauge
