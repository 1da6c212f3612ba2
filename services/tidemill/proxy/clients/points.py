"""What an export of clients' metrics says: its points, one by one.

Clients send OTLP. A label is a topic or a consumer group, and what stands beside it is one of two
words; what is not collected here, or cannot be, is refused with a reason.
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

# Of a point: five hundred bytes, and twice that with names of their longest. Parsed it takes sixty
# times as much in the worst case, and is forgotten before the next one.
POINT_BYTES_MAX: Final = 2_048
NAME_BYTES_MAX: Final = 64  # of a metric's name; those that are collected are shorter
ATTRIBUTES_MAX: Final = 8  # of a point; clients send four
VALUE_MAX: Final = 1 << 53  # of a count or a sum: above it they are not exact
GAUGE_MAX: Final = 1 << 40  # bytes in one client, and more than its machine has

# Numbers of fields, from the messages' own descriptors.
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


class Shape(NamedTuple):
    """A histogram of the clients: its labels, and the upper bounds of its buckets, in ms."""

    documentation: str
    label_names: Labels
    bounds: tuple[int, ...]


HISTOGRAMS: Final[Mapping[str, Shape]] = {
    "rocketmq_send_cost_time": Shape(
        "Milliseconds of a send, as producers measure it.", _SEND, (1, 5, 10, 20, 50, 200, 500)
    ),
    "rocketmq_delivery_latency": Shape(
        "Milliseconds from the proxy to a consumer, by both clocks, as consumers measure it.",
        PAIR,
        (1, 5, 10, 20, 50, 200, 500),
    ),
    "rocketmq_await_time": Shape(
        "Milliseconds that a message waited in a push consumer.",
        PAIR,
        (1, 5, 20, 100, 1_000, 5_000, 10_000),
    ),
    "rocketmq_process_time": Shape(
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


class Refused(Exception):
    """Raised for a point that cannot be taken, with the reason."""


class Found(NamedTuple):
    """A point, not yet parsed, and what its metric says of it."""

    name: str
    kind: str
    temporality: int
    wire: bytes


def points_of(request: bytes) -> Iterator[Found | None]:
    """Yield each point of what is collected here, and None for whatever else is walked.

    So that whoever counts what is yielded has counted everything. An export of 128 KiB of empty
    points would be 8 MB parsed; so it is walked, and a point is parsed when it is its turn. Raises
    MalformedWire.
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


def _points_of_metric(request: bytes, metric: outline.WireField) -> Iterator[Found | None]:
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
        # One for all of its points, which nobody looks for then.
        yield Found(name, kind, 0, b"")
        return
    temporality = 0
    if kind == "histogram":
        # It stands behind the points: they are walked twice, so that none has to be kept.
        for entry in outline.entries(request, data.begin, data.end):
            yield None
            if entry.field == _TEMPORALITY and entry.wire_type == outline.VARINT:
                temporality = entry.value
    for entry in outline.entries(request, data.begin, data.end):
        if _is_part(entry, _POINTS):
            # One byte more of what is too large, so that it is seen to be.
            wire = request[entry.begin : min(entry.end, entry.begin + POINT_BYTES_MAX + 1)]
            yield Found(name, kind, temporality, wire)
        else:
            yield None


def _is_part(entry: outline.WireField, field_number: int) -> bool:
    return entry.field == field_number and entry.wire_type == outline.LENGTH_DELIMITED


def parsed(found: Found) -> Any:
    """Return a point of its kind; raise Refused for what is none."""
    if len(found.wire) > POINT_BYTES_MAX:
        raise Refused(f"a point has at most {POINT_BYTES_MAX} bytes")
    point_type = otlp.HistogramDataPoint if found.kind == "histogram" else otlp.NumberDataPoint
    try:
        return point_type.FromString(found.wire)
    except DecodeError:
        raise Refused("the point is no protobuf message of its kind") from None


def attributes_of(point: Any) -> dict[str, str]:
    """Return what a point is of; raise Refused for too many."""
    if len(point.attributes) > ATTRIBUTES_MAX:
        raise Refused(f"a point has at most {ATTRIBUTES_MAX} attributes")
    return {each.key: each.value.string_value for each in point.attributes}


def gauge_value(point: otlp.NumberDataPoint) -> int:
    """Return the value of a gauge; raise Refused for what no client can hold."""
    value = point.as_double if point.HasField("as_double") else point.as_int
    if not 0 <= value <= GAUGE_MAX:  # Not a number is neither.
        raise Refused("a gauge is 0 or more, and of what a client can hold")
    return int(value)


def buckets_of(point: otlp.HistogramDataPoint, bounds: tuple[int, ...]) -> tuple[array[int], float]:
    """Return the counts and the sum of a point; raise Refused for what does not fit together."""
    if tuple(point.explicit_bounds) != bounds or len(point.bucket_counts) != len(bounds) + 1:
        raise Refused("the buckets are not those of the official clients")
    if max(point.bucket_counts) > VALUE_MAX:
        raise Refused("a count is not exact any more")
    if not (math.isfinite(point.sum) and 0 <= point.sum <= VALUE_MAX):
        raise Refused("the sum is no sum of durations")
    return array("Q", point.bucket_counts), point.sum
