"""Metrics of the space of the log: bytes by state, derived and freed bytes, and the state floor."""

from __future__ import annotations

from tests.support.worlds.round_world import RoundWorld
from tidemill.broker.engine.upkeep.freed_bytes import Freeing
from tidemill.broker.metrics.store_metrics import StoreMetrics, TopicSizes
from tidemill.common.metrics import Registry


def test_the_log_and_its_freed_bytes_are_shown_by_state() -> None:
    world = RoundWorld()
    registry = Registry(cluster="test", node_type="broker", node_id="broker-0")
    StoreMetrics(registry, TopicSizes(), world.rounds)
    engine = world.world.engine

    def shown(name: str, label: str) -> dict[str, float]:
        return {
            sample.labels.get(label, ""): sample.value
            for metric in registry.collect()
            for sample in metric.samples
            if sample.name == f"rocketmq_storage_{name}"
        }

    world.world.send("a", size=1_000)
    assert shown("derived_bytes", "kind") == {"queues": 0, "index": 0}
    assert shown("log_bytes", "state") == {}, "nothing is counted yet"
    world.world.background()
    states = shown("log_bytes", "state")
    assert list(states) == ["live", "dead", "stub", "control", "pinned"]
    assert sum(states.values()) == engine.log.log_end - engine.log.min_offset
    assert states["live"] > 1_000
    engine.live_bytes.freed.counts[Freeing.PACKED] += 7
    assert shown("freed_bytes_total", "how") == {"deleted": 0, "packed": 7, "emptied": 0}
    assert shown("floor_offset", "") == {"": engine.log.min_offset}
    (age_s,) = shown("floor_age_seconds", "").values()
    first_ms = engine.log_space.floor_stored_at_ms()
    assert first_ms is not None
    assert age_s == max(world.rounds.now_ms - first_ms, 0) / 1_000
    world.world.checkpoint()
    derived = engine.log_space.derived_bytes
    assert shown("derived_bytes", "kind") == {"queues": derived.queues, "index": derived.index}
    assert 0 < derived.queues != derived.index > 0
