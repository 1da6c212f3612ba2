"""Metrics of clients: each count is added once, for existing resources, within limits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2 as otlp

from tests.support.clients.exports import a_metric, empty_points, nested
from tidemill.common.metrics import Registry
from tidemill.message.outline import MalformedWire
from tidemill.proxy.clients import metrics as client_metrics
from tidemill.proxy.clients.metrics import (
    COUNTED_A_SECOND_MAX,
    GAP_NS,
    PARTS_A_TURN,
    PARTS_MAX,
    SILENT_MS,
    ClientMetrics,
    ExportResult,
)
from tidemill.proxy.clients.points import ATTRIBUTES_MAX, HISTOGRAMS, POINT_BYTES_MAX

SEND = "rocketmq_send_cost_time"
AWAIT = "rocketmq_await_time"
CACHED = "rocketmq_consumer_cached_messages"
SENT_TO = {"topic": "orders", "invocation_status": "success"}
PAIR = {"topic": "orders", "consumer_group": "billing"}
SECOND_NS = 1_000_000_000
BORN_NS = 1_790_000_000 * SECOND_NS


class World:
    """The metrics of a proxy that knows one topic and one group."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.topics, self.groups = {"orders"}, {"billing"}
        self.registry = Registry(cluster="c", node_type="proxy", node_id="p")
        self.metrics = ClientMetrics(
            self.registry,
            lambda: self.now_ms,
            knows_topic=lambda topic: topic in self.topics,
            knows=lambda topic, group: topic in self.topics and group in self.groups,
        )

    def take(
        self, *metrics: otlp.Metric, client_id: str = "c", address: str = "10.0.0.1"
    ) -> ExportResult:
        return self.take_wire(export(*metrics), client_id=client_id, address=address)

    def take_wire(
        self, wire: bytes, *, client_id: str = "c", address: str = "10.0.0.1"
    ) -> ExportResult:
        slices = self.metrics.add(address, client_id, wire)
        while True:
            try:
                next(slices)
            except StopIteration as ended:
                taken: ExportResult = ended.value
                return taken

    def shown(self, sample_name: str, **labels: str) -> float | None:
        """Return a sample of a scrape; None if it is missing."""
        for family in self.registry.collect():
            for sample in family.samples:
                if sample.name == sample_name and labels.items() <= sample.labels.items():
                    return sample.value
        return None

    def count(self, name: str = SEND, **labels: str) -> float | None:
        return self.shown(f"{name}_count", **labels)


def export(*metrics: otlp.Metric) -> bytes:
    scope = otlp.ScopeMetrics(metrics=metrics)
    return ExportMetricsServiceRequest(
        resource_metrics=[otlp.ResourceMetrics(scope_metrics=[scope])]
    ).SerializeToString()


def attributes_of(attributes: dict[str, str]) -> list[KeyValue]:
    values = {**attributes, "client_id": "a name that nobody should see"}
    return [KeyValue(key=k, value=AnyValue(string_value=v)) for k, v in values.items()]


def histogram(
    *counts: int,
    name: str = SEND,
    attributes: dict[str, str] = SENT_TO,
    total: float = 10,
    start_ns: int = BORN_NS,
    age_ns: int = SECOND_NS,
    bounds: Sequence[float] | None = None,
    temporality: int = otlp.AGGREGATION_TEMPORALITY_CUMULATIVE,
) -> otlp.Metric:
    wanted = HISTOGRAMS[name].bounds if name in HISTOGRAMS else (1,)
    filled = [*counts, *[0] * (len(wanted) + 1 - len(counts))]
    point = otlp.HistogramDataPoint(
        attributes=attributes_of(attributes),
        bucket_counts=filled,
        sum=total,
        count=sum(filled),
        explicit_bounds=wanted if bounds is None else bounds,
        start_time_unix_nano=start_ns,
        time_unix_nano=start_ns + age_ns,
    )
    data = otlp.Histogram(
        data_points=[point],
        aggregation_temporality=otlp.AggregationTemporality.ValueType(temporality),
    )
    return otlp.Metric(name=name, histogram=data)


def gauge(value: float, *, name: str = CACHED, attributes: dict[str, str] = PAIR) -> otlp.Metric:
    point = otlp.NumberDataPoint(attributes=attributes_of(attributes))
    if isinstance(value, int):
        point.as_int = value
    else:
        point.as_double = value
    return otlp.Metric(name=name, gauge=otlp.Gauge(data_points=[point]))


def test_an_export_adds_only_new_counts() -> None:
    world = World()
    assert world.take(histogram(1, 2)) == ExportResult(1, 0, "")
    assert world.count() == 3
    world.take(histogram(1, 2, age_ns=61 * SECOND_NS))
    assert world.count() == 3
    world.take(histogram(1, 5, total=25, age_ns=121 * SECOND_NS))
    assert world.count(**SENT_TO) == 6
    assert world.shown(f"{SEND}_sum") == 25
    assert world.shown(f"{SEND}_bucket", le="1.0") == 1
    assert world.shown(f"{SEND}_bucket", le="5.0") == 6


def test_clients_are_summed_and_are_not_labels() -> None:
    world = World()
    for n in range(3):
        world.take(histogram(1), client_id=f"c{n}")
    assert world.count() == 3
    assert b"nobody should see" not in b"".join(text_of(world.registry))


def text_of(registry: Registry) -> list[bytes]:
    from prometheus_client.exposition import generate_latest

    slices = registry.text(generate_latest)
    while True:
        try:
            next(slices)
        except StopIteration as ended:
            return list(ended.value)


def test_a_restarted_client_is_counted_from_zero() -> None:
    world = World()
    world.take(histogram(5))
    world.take(histogram(2, start_ns=BORN_NS + SECOND_NS))
    assert world.count() == 7


def test_counts_exported_to_another_proxy_are_not_added() -> None:
    world = World()
    world.take(histogram(100, age_ns=GAP_NS + 1))
    assert world.count() is None
    world.take(histogram(101, age_ns=GAP_NS + 60 * SECOND_NS))
    assert world.count() == 1
    # A series of a topic that the client uses later has the client's old start time.
    world.topics.add("later")
    later = {"topic": "later", "invocation_status": "success"}
    world.take(histogram(4, attributes=later, age_ns=GAP_NS + 120 * SECOND_NS))
    assert world.count(**later) == 4


def test_a_decreasing_count_adds_nothing() -> None:
    world = World()
    world.take(histogram(5))
    world.take(histogram(4))
    assert world.count() == 5
    world.take(histogram(6))
    assert world.count() == 7


@pytest.mark.parametrize(
    "bad",
    [
        histogram(1, attributes={**SENT_TO, "topic": "no such"}),
        histogram(1, attributes={**SENT_TO, "invocation_status": "perhaps"}),
        histogram(1, attributes={"topic": "orders"}),
        histogram(1, name=AWAIT, attributes={**PAIR, "consumer_group": "no such"}),
        histogram(1, name="of my own"),
        histogram(1, bounds=(1, 2, 3)),
        histogram(1, 1, 1, 1, 1, 1, 1, 1, 1),
        histogram(1 << 60),
        histogram(1, total=float("nan")),
        histogram(1, total=-1),
        histogram(1, temporality=otlp.AGGREGATION_TEMPORALITY_UNSPECIFIED),
        histogram(1, temporality=otlp.AGGREGATION_TEMPORALITY_DELTA),
        histogram(1 << 50),
        histogram(1, total=1 << 50),
        histogram(1, attributes={**SENT_TO, **{str(n): "x" for n in range(ATTRIBUTES_MAX)}}),
        gauge(-1),
        gauge(float("inf")),
        gauge(float("nan")),
        gauge(1, name="of my own"),
        gauge(1, attributes={"topic": "orders"}),
        otlp.Metric(name=SEND, gauge=otlp.Gauge(data_points=[otlp.NumberDataPoint()])),
    ],
)
def test_invalid_points_are_rejected_and_valid_ones_accepted(bad: otlp.Metric) -> None:
    world = World()
    taken = world.take(bad, histogram(1))
    assert (taken.accepted, taken.rejected) == (1, 1)
    assert taken.reason
    assert world.count() == 1
    result = "rocketmq_proxy_client_metric_points_total"
    assert world.shown(result, result="rejected") == 1


def test_gauges_are_summed_over_clients_and_end_with_them() -> None:
    world = World()
    world.take(gauge(3), client_id="a")
    world.take(gauge(4.0), client_id="b")
    assert world.shown(CACHED, **PAIR) == 7
    world.take(gauge(5), client_id="a")
    assert world.shown(CACHED) == 9
    world.take(client_id="b")
    assert world.shown(CACHED) == 5
    world.now_ms += SILENT_MS + 1
    assert world.shown(CACHED) is None
    assert world.shown("rocketmq_proxy_client_metric_exporters") == 0


def test_deleted_resources_disappear_from_the_metrics() -> None:
    world = World()
    world.take(histogram(1), gauge(1))
    world.topics.clear()
    assert world.count() is None
    assert world.shown(CACHED) is None


def test_an_export_is_processed_in_slices_up_to_its_limit() -> None:
    world = World()
    slices = world.metrics.add("10.0.0.1", "c", export(*[histogram(1) for _ in range(PARTS_MAX)]))
    turns = 0
    while True:
        try:
            next(slices)
            turns += 1
        except StopIteration as ended:
            taken = ended.value
            break
    assert turns == PARTS_MAX // PARTS_A_TURN
    assert taken.rejected == 1
    assert taken.accepted < PARTS_MAX


@pytest.mark.parametrize("kind", [5, 7, 9, 10, 11])
@pytest.mark.parametrize("name", [SEND, CACHED, "x"])
def test_an_export_of_empty_points_is_walked_up_to_its_limit(kind: int, name: str) -> None:
    wire = empty_points(kind, name)
    world = World()
    slices = world.metrics.add("10.0.0.1", "c", wire)
    turns = sum(1 for _ in slices)
    assert turns <= PARTS_MAX // PARTS_A_TURN
    result = "rocketmq_proxy_client_metric_points_total"
    assert world.shown(result, result="accepted") == 0
    assert (world.shown(result, result="rejected") or 0) >= 1


def test_a_too_large_point_is_not_parsed() -> None:
    attributes = b"\x4a\x00" * (POINT_BYTES_MAX // 2 + 1)
    data = nested(9, 1, content=attributes)
    wire = a_metric(nested(1, content=SEND.encode()) + data)
    taken = World().take_wire(wire)
    assert taken.rejected == 1
    assert taken.reason == f"a point has at most {POINT_BYTES_MAX} bytes"


def test_every_prefix_of_an_export_is_rejected_or_accepted() -> None:
    wire = export(histogram(1), gauge(1))
    assert World().take_wire(wire) == ExportResult(2, 0, "")
    for end in range(1, len(wire)):
        with pytest.raises(MalformedWire):
            World().take_wire(wire[:end])


def test_an_address_gets_at_most_the_free_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_metrics, "SERIES_MAX", 4)
    world = World()
    for n in range(4):
        taken = world.take(histogram(1), client_id=f"stranger-{n}")
        assert taken.accepted == (n < 2)
    assert world.take(histogram(1), client_id="honest", address="10.0.0.2").accepted == 1
    # Stored series continue.
    assert world.take(histogram(2), client_id="stranger-0").accepted == 1
    assert world.count() == 4
    world.now_ms += SILENT_MS + 1
    assert world.take(histogram(1), client_id="stranger-3").accepted == 1


def test_a_client_without_points_is_not_stored() -> None:
    world = World()
    world.take()
    world.take(histogram(1, name="of my own"), client_id="b")
    assert world.shown("rocketmq_proxy_client_metric_exporters") == 0


def test_each_series_expires_on_its_own() -> None:
    """A series that is missing in exports expires."""
    world = World()
    world.topics.add("later")
    later = histogram(1, attributes={"topic": "later", "invocation_status": "success"})
    world.take(histogram(1), later)
    world.now_ms += SILENT_MS
    world.take(later)
    world.now_ms += 1
    assert world.count(topic="orders") is None
    assert world.count(topic="later") == 1


def test_the_address_is_part_of_the_key_of_a_client() -> None:
    world = World()
    world.take(histogram(5), gauge(3))
    world.take(histogram(1), address="10.0.0.2")
    assert world.take(histogram(6)).accepted == 1
    assert world.count() == 7


def test_a_label_set_ends_with_its_last_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_metrics, "LABEL_SETS_MAX", 4)
    world = World()
    world.groups = {f"g{n}" for n in range(4)}
    for life in range(3):
        for name in (AWAIT, CACHED):
            for n in range(4):
                labels = {"topic": "orders", "consumer_group": f"g{n}"}
                metric = (
                    gauge(1, attributes=labels)
                    if name == CACHED
                    else histogram(1, name=AWAIT, attributes=labels)
                )
                taken = world.take(metric, client_id=f"{name}-{life}-{n}")
                assert taken.accepted == (n < 2), (life, name, n)
        # Another address finds room.
        assert (
            world.take(
                histogram(1, name=AWAIT, attributes={**PAIR, "consumer_group": "g3"}),
                address="10.0.0.2",
            ).accepted
            == 1
        )
        world.now_ms += SILENT_MS + 1
        assert world.count(AWAIT) is None
        assert world.shown(CACHED) is None


def test_a_client_of_two_proxies_is_counted_once() -> None:
    """A client that switches proxies has exported the counts of the gap to the other proxy."""
    worlds = World(), World()
    for minute in range(1, 21):
        world = worlds[minute % 2]
        for each in worlds:
            each.now_ms = minute * 60_000
        world.take(histogram(100 * minute, age_ns=minute * 60 * SECOND_NS))
    assert sum(world.count() or 0 for world in worlds) <= 2_000
    for minute in range(21, 23):
        worlds[0].take(histogram(100 * minute, age_ns=minute * 60 * SECOND_NS))
    assert worlds[0].count() == 200


def test_a_series_that_starts_in_a_gap_sets_the_start_of_counting() -> None:
    world = World()
    world.topics.add("later")
    later = {"topic": "later", "invocation_status": "success"}
    world.take(histogram(1))
    world.take(histogram(7, attributes=later, age_ns=2 * SECOND_NS + GAP_NS))
    world.take(histogram(8, attributes=later, age_ns=62 * SECOND_NS + GAP_NS))
    assert world.count(**later) == 1


def test_a_series_after_a_gap_sets_the_start_of_counting() -> None:
    world = World()
    world.take(histogram(1))
    world.take(histogram(10, age_ns=2 * SECOND_NS + GAP_NS))
    assert world.count() == 1
    world.take(histogram(12, age_ns=62 * SECOND_NS + GAP_NS))
    assert world.count() == 3


def test_implausibly_fast_counts_are_rejected() -> None:
    """The rate uses the proxy's clock, because the client's clock may be wrong."""
    world = World()
    most = 90 * COUNTED_A_SECOND_MAX
    assert world.take(histogram(most)).accepted == 1
    assert world.take(histogram(most + 1, age_ns=60 * SECOND_NS)).rejected == 1
    world.now_ms += 1_000
    at_most = most + COUNTED_A_SECOND_MAX
    assert world.take(histogram(at_most + 1, age_ns=60 * SECOND_NS)).rejected == 1
    assert world.take(histogram(at_most, age_ns=60 * SECOND_NS)).accepted == 1
    assert world.count() == at_most


def test_two_exports_of_a_client_do_not_double_its_gauges() -> None:
    world = World()
    wire = export(*[histogram(1) for _ in range(PARTS_A_TURN)], gauge(3))
    both = [world.metrics.add("10.0.0.1", "c", wire) for _ in range(2)]
    while both:
        both = [slices for slices in both if next(slices, "ended") is None]
    assert world.shown(CACHED) == 3


def test_the_series_of_one_client_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_metrics, "SERIES_A_CLIENT_MAX", 1)
    world = World()
    taken = world.take(histogram(1), histogram(1, name=AWAIT, attributes=PAIR), gauge(1))
    assert (taken.accepted, taken.rejected) == (1, 2)
