"""The points of an OTLP export of a client, read one by one.

Labels are a topic, a consumer group, and a status of two values. Other points are rejected with a
reason.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as collector
from opentelemetry.proto.metrics.v1 import metrics_pb2 as otlp

from tidemill.common.metrics import Labels
from tidemill.message import outline

# A point has about 500 bytes, and twice that with the longest names. A parsed point takes up to
# sixty times as much; it is freed before the next one is parsed.
POINT_BYTES_MAX: Final = 2_048
NAME_BYTES_MAX: Final = 64  # of a metric; the names of collected metrics are shorter
ATTRIBUTES_MAX: Final = 8  # per point; clients send four
VALUE_MAX: Final = 1 << 53  # of a count or a sum, which are exact up to this value
GAUGE_MAX: Final = 1 << 40  # bytes; more than the memory of a client

# Field numbers from the descriptors of the messages.
_RESOURCE_METRICS: Final = collector.ExportMetricsServiceRequest.RESOURCE_METRICS_FIELD_NUMBER
_SCOPE_METRICS: Final = otlp.ResourceMetrics.SCOPE_METRICS_FIELD_NUMBER
_METRICS: Final = otlp.ScopeMetrics.METRICS_FIELD_NUMBER
_NAME: Final = otlp.Metric.NAME_FIELD_NUMBER
_POINTS: Final = otlp.Histogram.DATA_POINTS_FIELD_NUMBER
assert _POINTS == otlp.Gauge.DATA_POINTS_FIELD_NUMBER, "both kinds are walked alike"
_TEMPORALITY: Final = otlp.Histogram.AGGREGATION_TEMPORALITY_FIELD_NUMBER
_KINDS: Final[Mapping[int, str]] = {
    otlp.Metric.GAUGE_FIELD_NUMBER: "gauge",
    otlp.Metric.SUM_FIELD_NUMBER: "sum",
    otlp.Metric.HISTOGRAM_FIELD_NUMBER: "histogram",
    otlp.Metric.EXPONENTIAL_HISTOGRAM_FIELD_NUMBER: "exponential histogram",
    otlp.Metric.SUMMARY_FIELD_NUMBER: "summary",
}

_SEND: Final = ("topic", "invocation_status")
PAIR: Final = ("topic", "consumer_group")
_PROCESS: Final = (*PAIR, "invocation_status")
STATUSES: Final = frozenset({"success", "failure"})


class HistogramShape(NamedTuple):
    """A histogram of clients: its labels, and the upper bounds of its buckets in ms."""

    documentation: str
    label_names: Labels
    bounds: tuple[int, ...]


HISTOGRAMS: Final[Mapping[str, HistogramShape]] = {
    "rocketmq_send_cost_time": HistogramShape(
        "Milliseconds of a send, as producers measure it.", _SEND, (1, 5, 10, 20, 50, 200, 500)
    ),
    "rocketmq_delivery_latency": HistogramShape(
        "Milliseconds from the proxy to a consumer, by both clocks, as consumers measure it.",
        PAIR,
        (1, 5, 10, 20, 50, 200, 500),
    ),
    "rocketmq_await_time": HistogramShape(
        "Milliseconds that a message waited in a push consumer.",
        PAIR,
        (1, 5, 20, 100, 1_000, 5_000, 10_000),
    ),
    "rocketmq_process_time": HistogramShape(
        "Milliseconds that the listener of a push consumer took.",
        _PROCESS,
        (1, 5, 10, 100, 1_000, 10_000, 60_000),
    ),
}
GAUGES: Final[Mapping[str, str]] = {
    "rocketmq_consumer_cached_messages": "Messages that wait in push consumers.",
    "rocketmq_consumer_cached_bytes": "Bytes of messages that wait in push consumers.",
}
COLLECTED: Final[Mapping[str, Collection[str]]] = {"histogram": HISTOGRAMS, "gauge": GAUGES}


class PointRejection(Exception):
    """The reason why a point is rejected."""


class RawPoint(NamedTuple):
    """An unparsed point with the name, kind and temporality of its metric."""

    name: str
    kind: str
    temporality: int
    wire: bytes


def points_of(request: bytes) -> Iterator[RawPoint | None]:
    """Yield each point of a collected metric, and None for every other part.

    The number of items is therefore the number of parts. The export is walked and not parsed,
    because an export of 128 KiB of empty points would take 8 MB. Raises MalformedWire.
    """
    for resource in outline.entries(request, 0, len(request)):
        yield None
        if not _is_part(resource, _RESOURCE_METRICS):
            continue
        for scope in outline.entries(request, resource.begin, resource.end):
            yield None
            if not _is_part(scope, _SCOPE_METRICS):
                continue
            for metric in outline.entries(request, scope.begin, scope.end):
                yield None
                if _is_part(metric, _METRICS):
                    yield from _points_of_metric(request, metric)


def _points_of_metric(request: bytes, metric: outline.WireField) -> Iterator[RawPoint | None]:
    name, data = "", None
    for entry in outline.entries(request, metric.begin, metric.end):
        yield None
        if _is_part(entry, _NAME):
            name_end = min(entry.end, entry.begin + NAME_BYTES_MAX + 1)
            name = request[entry.begin : name_end].decode(errors="replace")
        elif entry.wire_type == outline.LENGTH_DELIMITED and entry.field in _KINDS:
            data = entry
    if data is None:
        return
    kind = _KINDS[data.field]
    if name not in COLLECTED.get(kind, ()):
        # One item stands for all points of the metric.
        yield RawPoint(name, kind, 0, b"")
        return
    temporality = 0
    if kind == "histogram":
        # The temporality follows the points. Walking them twice avoids storing them.
        for entry in outline.entries(request, data.begin, data.end):
            yield None
            if entry.field == _TEMPORALITY and entry.wire_type == outline.VARINT:
                temporality = entry.value
    for entry in outline.entries(request, data.begin, data.end):
        if _is_part(entry, _POINTS):
            # One byte more than the limit shows that a point is too large.
            wire = request[entry.begin : min(entry.end, entry.begin + POINT_BYTES_MAX + 1)]
            yield RawPoint(name, kind, temporality, wire)
        else:
            yield None


def _is_part(entry: outline.WireField, field_number: int) -> bool:
    return entry.field == field_number and entry.wire_type == outline.LENGTH_DELIMITED


def parse_point(raw: RawPoint) -> Any:
    """Return the parsed point of its kind. Raises PointRejection."""
    if len(raw.wire) > POINT_BYTES_MAX:
        raise PointRejection(f"a point has at most {POINT_BYTES_MAX} bytes")
    point_type = otlp.HistogramDataPoint if raw.kind == "histogram" else otlp.NumberDataPoint
    try:
        return point_type.FromString(raw.wire)
    except DecodeError:
        raise PointRejection("the point is not a protobuf message of its kind") from None


def attributes_of(point: Any) -> dict[str, str]:
    """Return the attributes of a point; raise PointRejection if there are too many."""
    if len(point.attributes) > ATTRIBUTES_MAX:
        raise PointRejection(f"a point has at most {ATTRIBUTES_MAX} attributes")
    return {each.key: each.value.string_value for each in point.attributes}


def gauge_value(point: otlp.NumberDataPoint) -> int:
    """Return the value of a gauge; raise PointRejection if it is not plausible."""
    value = point.as_double if point.HasField("as_double") else point.as_int
    if not 0 <= value <= GAUGE_MAX:  # Rejects NaN, too.
        raise PointRejection(f"a gauge must be between 0 and {GAUGE_MAX}")
    return int(value)


def buckets_of(point: otlp.HistogramDataPoint, bounds: tuple[int, ...]) -> tuple[array[int], float]:
    """Return the counts and the sum of a point; raise PointRejection if they are not valid."""
    if tuple(point.explicit_bounds) != bounds or len(point.bucket_counts) != len(bounds) + 1:
        raise PointRejection("the buckets are not those of the official clients")
    if max(point.bucket_counts) > VALUE_MAX:
        raise PointRejection(f"a count is above {VALUE_MAX} and not exact")
    if not (math.isfinite(point.sum) and 0 <= point.sum <= VALUE_MAX):
        raise PointRejection(f"the sum of durations must be between 0 and {VALUE_MAX}")
    return array("Q", point.bucket_counts), point.sum
