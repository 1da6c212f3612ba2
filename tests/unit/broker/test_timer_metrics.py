"""The metrics of delayed messages in a few scenarios."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from tests.support.worlds.timer_world import DAY_MS, HOUR_MS, SECOND_MS, TimerWorld
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.layout.numbers import TimerId, TopicId
from tidemill.broker.engine.timer.audit import NO_TOPIC
from tidemill.broker.engine.timer.firing_clock import FiringClock
from tidemill.broker.metrics.timer_metrics import RECALL_RESULTS, TimerMetrics
from tidemill.common.errors import IllegalDeliveryTime, MessageNotFound
from tidemill.common.histogram import Histogram
from tidemill.common.metrics import Registry

LABELS = {"cluster": "test", "node_type": "broker", "node_id": "broker-0"}
STORAGE = {"storage_type": "local", "storage_medium": "disk"}


@dataclass
class Source:
    """An engine and its clock, as the rounds have them."""

    engine: Engine
    now_ms: int
    firing_clock: FiringClock
    pending_count: int = 0
    revive_latencies: Histogram[tuple[()]] = field(default_factory=Histogram)
    append_times_us: Histogram[tuple[()]] = field(default_factory=Histogram)
    sync_times_us: Histogram[tuple[()]] = field(default_factory=Histogram)
    disk_full_in_s: float = math.inf
    failed_read_count: int = 0


def value(world: TimerWorld, clock: FiringClock, name: str, **labels: str) -> float | None:
    """Scrape, and return one sample; None if it is missing."""
    registry = Registry(cluster="test", node_type="broker", node_id="broker-0")
    TimerMetrics(registry, Source(world.engine, world.now_ms, clock))
    expected = {**LABELS, **labels}
    for metric in registry.collect():
        for sample in metric.samples:
            if sample.name == f"rocketmq_{name}" and sample.labels == expected:
                return sample.value
    return None


def orders(world: TimerWorld, name: str) -> float | None:
    return value(world, FiringClock(), name, topic="orders", **STORAGE)


def test_schedules_deliveries_and_recalls_are_counted_once() -> None:
    world = TimerWorld()
    first = world.schedule("first", delay_ms=2 * SECOND_MS)
    second = world.schedule("second", delay_ms=HOUR_MS)
    world.schedule("third", delay_ms=20 * DAY_MS)
    world.background()
    assert orders(world, "timing_messages") == 3
    assert orders(world, "timer_enqueue_total") == 3
    assert orders(world, "delay_message_latency_count") == 3
    assert orders(world, "delay_message_latency_sum") == 2 + 3600 + 20 * 86_400

    world.sleep(2 * SECOND_MS)
    world.cancel(second.queue_offset)
    world.cancel(second.queue_offset)
    with pytest.raises(MessageNotFound):
        world.cancel(first.queue_offset)
    assert orders(world, "timing_messages") == 1
    assert orders(world, "timer_dequeue_total") == 1
    assert orders(world, "timer_lateness_seconds_count") == 1
    for result, count in (("recalled", 1), ("duplicate", 1), ("already_fired", 1)):
        labels = {"topic": "orders", "result": result}
        assert value(world, FiringClock(), "timer_recall_total", **labels) == count
    assert value(world, FiringClock(), "timer_early_total") == 0


def test_lateness_is_measured_in_seconds() -> None:
    world = TimerWorld()
    world.schedule("late", delay_ms=SECOND_MS)
    world.now_ms += 3 * SECOND_MS
    world.run_due()
    assert orders(world, "timer_lateness_seconds_sum") == 2.0
    labels = {"topic": "orders", **STORAGE}
    for bound, count in (("1.0", 0), ("2.5", 1), ("+Inf", 1)):
        found = value(world, FiringClock(), "timer_lateness_seconds_bucket", le=bound, **labels)
        assert found == count, bound


def test_due_messages_are_shown_by_buckets_and_peak() -> None:
    world = TimerWorld()
    for delay_ms in (3_000, 50_000, 50_000, 2 * HOUR_MS, 10 * DAY_MS, 300 * DAY_MS):
        world.schedule(f"in {delay_ms}", due_at_ms=world.now_ms + delay_ms)
    world.now_ms += 15 * SECOND_MS  # The next census is due.
    world.run_due()
    world.background()
    for bound_s, count in (
        (5, 0),
        (60, 2),
        (300, 0),
        (14_400, 1),
        (604_800, 0),
        (2_592_000, 1),
        (34_560_000, 1),
    ):
        labels = {"timer_bound_s": str(bound_s), **STORAGE}
        found = value(world, FiringClock(), "timer_message_snapshot", **labels)
        assert found == count, bound_s
    assert value(world, FiringClock(), "timer_due_peak_messages", window_s="60") == 2


def test_rejections_and_drops_have_a_reason() -> None:
    world = TimerWorld()
    with pytest.raises(IllegalDeliveryTime):
        world.schedule("too far", delay_ms=401 * DAY_MS)
    assert value(world, FiringClock(), "timer_flow_control_total", reason="horizon") == 1
    world.schedule("orphan", delay_ms=SECOND_MS)
    world.engine.administration.delete_topic("orders", world.now_ms)
    world.commit()
    world.sleep(SECOND_MS)
    deliverer = world.engine.timers.deliverer
    assert deliverer.take_notices() == {("orders", "topic_deleted"): (1, 0)}
    assert not deliverer.take_notices()
    labels = {"topic": "", "reason": "topic_deleted"}
    assert value(world, FiringClock(), "timer_dropped_total", **labels) == 1
    assert orders(world, "timing_messages") is None


def test_a_jump_of_the_clock_is_shown() -> None:
    world, clock = TimerWorld(), FiringClock()
    clock.read(1_000_000, 0)
    assert value(world, clock, "timer_clock_hold") == 0
    clock.read(1_000_000 + HOUR_MS, 10)
    assert value(world, clock, "timer_clock_hold") == 1
    assert value(world, clock, "timer_clock_step_seconds") == pytest.approx(3599.99)


def test_a_correction_without_a_topic_is_shown() -> None:
    world = TimerWorld()
    world.engine.timers.janitor.audit.drift[NO_TOPIC] += 1
    assert value(world, FiringClock(), "timer_audit_drift_total", topic="") == 1


def test_known_topics_begin_at_zero_and_each_series_appears_once() -> None:
    world = TimerWorld()
    world.schedule("waits", delay_ms=HOUR_MS)
    timers = world.engine.timers
    timers.quarantined[TimerId(7)] = TopicId(12_345)
    timers.commands.recalled[TopicId(12_345), "recalled"] += 1
    registry = Registry(cluster="test", node_type="broker", node_id="broker-0")
    TimerMetrics(registry, Source(world.engine, world.now_ms, FiringClock()))
    samples = [
        (sample.name, tuple(sorted(sample.labels.items())))
        for metric in registry.collect()
        for sample in metric.samples
    ]
    assert len(samples) == len(set(samples))
    assert orders(world, "timer_lateness_seconds_count") == 0
    for name in ("timer_shaped_total", "timer_evacuated_total", "timer_audit_drift_total"):
        assert value(world, FiringClock(), name, topic="orders") == 0
    for reason in ("topic_deleted", "expired", "damaged"):
        labels = {"topic": "orders", "reason": reason}
        assert value(world, FiringClock(), "timer_dropped_total", **labels) == 0
    for result in RECALL_RESULTS:
        labels = {"topic": "orders", "result": result}
        assert value(world, FiringClock(), "timer_recall_total", **labels) == 0
    assert value(world, FiringClock(), "timer_quarantined_messages", topic="") == 1
