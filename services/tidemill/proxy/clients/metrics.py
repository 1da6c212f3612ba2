"""Metrics that official clients measure, merged for a scrape. Clients are not labels.

If `Settings.metric` is on, a client exports its cumulative histograms every minute by OTLP. The
proxy stores the last values of each series, so each export adds only the difference. The first
export of a series adds nothing if it includes counts from before this proxy or at another proxy.
Series expire one by one. One user or address gets at most as many as are free. A label set ends
with its last series.

A label is an existing topic or consumer group. The answer contains the number of rejected points
(`partial_success`).
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, final

from opentelemetry.proto.metrics.v1 import metrics_pb2 as otlp
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tidemill.common.histogram import Histogram
from tidemill.common.metrics import Labels, histogram_parts
from tidemill.message.namespaces import full_name
from tidemill.proxy.clients.gauges import ExporterKey, Gauge, GaugeSums
from tidemill.proxy.clients.points import (
    COLLECTED,
    GAUGES,
    HISTOGRAMS,
    NAME_BYTES_MAX,
    PAIR,
    STATUSES,
    PointRejection,
    RawPoint,
    attributes_of,
    buckets_of,
    gauge_value,
    parse_point,
    points_of,
)
from tidemill.proxy.shares import Shares

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tidemill.common.metrics import Registry

# A series expires if it was missing in four exports.
SILENT_MS: Final = 300_000
# One and a half export periods. After a longer gap, the client may have exported to another proxy.
# To avoid counting twice, such an export only sets the start of counting.
GAP_NS: Final = 90_000_000_000
# Stored series of all clients, about 400 bytes each: 20 MB. One sharer gets at most as many as are
# free. Beyond the limit, new series are rejected and stored ones continue.
SERIES_MAX: Final = 50_000
SERIES_A_CLIENT_MAX: Final = 1_000  # a client has a few per topic
# Label sets of one metric, each ten samples and 1.2 KB of a scrape: 5 MB. Shared like the series.
LABEL_SETS_MAX: Final = 4_000
# Plausible counts per second: ten times the sends of the fastest client in one process.
COUNTED_A_SECOND_MAX: Final = 1_000_000
# Plausible new total of durations in one export: ten thousand listeners of a day each.
NEW_TOTAL_MS_MAX: Final = 1_000_000_000_000
# Parts of one export: metrics, points (walked twice) and their wrappers. An export has at most 128
# KiB and a point more than 200 bytes, so there are at most 600 points.
PARTS_MAX: Final = 2_000
PARTS_A_TURN: Final = 16  # half a millisecond, and twice that for the largest points
EXPIRED_A_TURN: Final = 500  # series removed by one export or scrape: a millisecond
_COUNTED_AT_ONCE_MAX: Final = COUNTED_A_SECOND_MAX * GAP_NS // 1_000_000_000


class ExportResult(NamedTuple):
    """Numbers of accepted and rejected points of an export."""

    accepted: int
    rejected: int
    reason: str  # of the first rejection


@dataclass(slots=True)
class _Series:
    """The last values of one cumulative histogram of a client."""

    labels: Labels
    start_ns: int
    counts: array[int]
    total: float
    time_ns: int  # of the client, at the export
    seen_at_ms: int  # of the proxy, at the export
    allowance: int  # further plausible counts at that time


@dataclass(slots=True)
class _Exporter:
    """One client with stored series."""

    exported_ns: int = 0  # the client's time of its last export; 0 during its first
    series_count: int = 0  # including gauges


@dataclass(slots=True)
class _Export:
    """One export in progress."""

    key: ExporterKey
    now_ms: int
    namespace: str
    accepted: int = 0
    rejected: int = 0
    reason: str = ""
    time_ns: int = 0
    # Gathered until the end of the export, because a client may send two at the same time.
    gauges: Counter[Gauge] = field(default_factory=Counter)

    def reject(self, reason: str) -> None:
        self.rejected += 1
        self.reason = self.reason or reason


@final
class _LabelSets:
    """The label sets of one metric that have at least one series."""

    def __init__(self) -> None:
        self._series_counts: Counter[Labels] = Counter()
        self._owners: dict[Labels, str] = {}  # the user or address of its first series
        self._shares = Shares(LABEL_SETS_MAX)

    def check_room(self, labels: Labels, sharer: str) -> None:
        if labels not in self._owners and not self._shares.has_room(sharer):
            raise PointRejection(f"the limit of {LABEL_SETS_MAX} label sets is reached")

    def add(self, labels: Labels, sharer: str) -> None:
        if labels not in self._owners:
            self._owners[labels] = sharer
            self._shares.take(sharer)
        self._series_counts[labels] += 1

    def remove(self, labels: Labels) -> bool:
        """Count one series less. Return whether it was the last one."""
        self._series_counts[labels] -= 1
        if self._series_counts[labels]:
            return False
        del self._series_counts[labels]
        self._shares.give_back(self._owners.pop(labels))
        return True


@final
class ClientMetrics:
    """The metrics of all clients of this proxy."""

    def __init__(
        self,
        registry: Registry,
        monotonic_ms: Callable[[], int],
        *,
        knows_topic: Callable[[str], bool],
        knows: Callable[[str, str], bool],
    ) -> None:
        self._monotonic_ms = monotonic_ms
        self._knows_topic = knows_topic
        self._knows = knows
        # Each has at least one series or gauge.
        self._exporters: dict[ExporterKey, _Exporter] = {}
        self._rooms = Shares(SERIES_MAX)
        # By metric and hash of the attributes, the oldest export first.
        self._series: OrderedDict[tuple[ExporterKey, str, int], _Series] = OrderedDict()
        self._points: Counter[str] = Counter()
        self._histograms: dict[str, Histogram[Labels]] = {
            name: Histogram(shape.bounds) for name, shape in HISTOGRAMS.items()
        }
        self._gauges = GaugeSums(self._reserve, self._release)
        self._sets = {name: _LabelSets() for name in (*HISTOGRAMS, *GAUGES)}
        registry.register(self._collect)

    def add(
        self, sharer: str, client_id: str, request: bytes, *, namespace: str = ""
    ) -> Generator[None, None, ExportResult]:
        """Add the new counts of an export, in slices. Raises MalformedWire.

        `namespace` is that of the client, whose labels are bare names.
        """
        export = _Export((sharer, client_id), self._monotonic_ms(), namespace)
        self._expire(export.now_ms)
        for part_count, raw in enumerate(points_of(request)):
            if part_count >= PARTS_MAX:
                export.reject(f"an export has at most {PARTS_MAX} parts")
                break
            if raw is not None:
                try:
                    self._add_point(export, raw)
                except PointRejection as rejection:
                    export.reject(str(rejection))
                else:
                    export.accepted += 1
            if part_count % PARTS_A_TURN == PARTS_A_TURN - 1:
                yield
        for reason in self._gauges.swap(export.key, export.gauges, now_ms=export.now_ms):
            export.accepted -= 1
            export.reject(reason)
        exporter = self._exporters.get(export.key)
        if exporter is not None:
            exporter.exported_ns = max(exporter.exported_ns, export.time_ns)
        self._points.update(accepted=export.accepted, rejected=export.rejected)
        return ExportResult(export.accepted, export.rejected, export.reason)

    def _add_point(self, export: _Export, raw: RawPoint) -> None:
        name, kind = raw.name, raw.kind
        if name not in COLLECTED.get(kind, ()):
            raise PointRejection(f"the {kind} {name[:NAME_BYTES_MAX]!r} is not collected")
        point = parse_point(raw)
        attributes = _with_full_names(attributes_of(point), export.namespace)
        if kind == "gauge":
            value = gauge_value(point)
            export.gauges[name, self._labels(PAIR, attributes)] += value
        elif raw.temporality != otlp.AGGREGATION_TEMPORALITY_CUMULATIVE:
            # No official client sends deltas. The proxy could not check if they are plausible.
            raise PointRejection("the histogram is not cumulative")
        else:
            self._add_histogram(export, name, attributes, point)
        export.time_ns = max(export.time_ns, point.time_unix_nano)

    def _labels(self, names: Sequence[str], attributes: Mapping[str, str]) -> Labels:
        """Return the values of the labels; raise PointRejection for an unknown resource."""
        labels = tuple(attributes.get(name, "") for name in names)
        topic = attributes.get("topic", "")
        if "consumer_group" in names:
            if not self._knows(topic, attributes.get("consumer_group", "")):
                raise PointRejection("the topic or the consumer group of the point is unknown")
        elif not self._knows_topic(topic):
            raise PointRejection("the topic of the point is unknown")
        if "invocation_status" in names and attributes.get("invocation_status") not in STATUSES:
            raise PointRejection("invocation_status must be success or failure")
        return labels

    # ------------------------------------------------------------ histograms

    def _add_histogram(
        self,
        export: _Export,
        name: str,
        attributes: Mapping[str, str],
        point: otlp.HistogramDataPoint,
    ) -> None:
        shape = HISTOGRAMS[name]
        labels = self._labels(shape.label_names, attributes)
        counts, total = buckets_of(point, shape.bounds)
        key = export.key, name, hash(tuple(sorted(attributes.items())))
        series = self._series.get(key)
        new, new_total = self._new_in(export, series, point, counts, total)
        allowance = _COUNTED_AT_ONCE_MAX
        if series is not None:
            since_ms = export.now_ms - series.seen_at_ms
            refilled = series.allowance + COUNTED_A_SECOND_MAX * since_ms // 1_000
            allowance = min(refilled, _COUNTED_AT_ONCE_MAX)
        new_count = sum(new)
        if new_count > allowance or new_total > NEW_TOTAL_MS_MAX:
            raise PointRejection("the count is implausibly high for the time since the last export")
        if series is None:
            self._reserve(export.key, name, labels)
        self._series[key] = _Series(
            labels,
            point.start_time_unix_nano,
            counts,
            total,
            point.time_unix_nano,
            export.now_ms,
            allowance - new_count,
        )
        self._series.move_to_end(key)
        if new_count:
            self._histograms[name].merge(labels, new, new_total)

    def _new_in(
        self,
        export: _Export,
        before: _Series | None,
        point: otlp.HistogramDataPoint,
        counts: array[int],
        total: float,
    ) -> tuple[array[int], float]:
        """Return the counts and the total since the last export."""
        zeros = array("Q", bytes(8 * len(counts)))
        if before is not None and before.start_ns == point.start_time_unix_nano:
            since_ns, since_counts, since_total = before.time_ns, before.counts, before.total
        else:
            # The series has restarted or is new. A new series may have an old start time. If the
            # client exported other series a minute ago, no other proxy has counted this one.
            exporter = self._exporters.get(export.key)
            exported_ns = 0 if exporter is None else exporter.exported_ns
            since_ns, since_counts, since_total = (
                max(point.start_time_unix_nano, exported_ns),
                zeros,
                0.0,
            )
        has_gap = point.time_unix_nano - since_ns > GAP_NS
        # If a count has decreased, its base is unknown.
        if has_gap or any(map(int.__lt__, counts, since_counts)):
            return zeros, 0.0
        return array("Q", map(int.__sub__, counts, since_counts)), max(total - since_total, 0.0)

    # ------------------------------------------------------------ room and expiry

    def _reserve(self, key: ExporterKey, name: str, labels: Labels) -> None:
        """Reserve room for a series or a gauge of a client; raise PointRejection if it is full."""
        sharer = key[0]
        exporter = self._exporters.get(key) or _Exporter()
        if exporter.series_count >= SERIES_A_CLIENT_MAX:
            raise PointRejection(f"a client exports at most {SERIES_A_CLIENT_MAX} series")
        if not self._rooms.has_room(sharer):
            raise PointRejection(f"the limit of {SERIES_MAX} series of all clients is reached")
        self._sets[name].check_room(labels, sharer)
        self._sets[name].add(labels, sharer)
        self._rooms.take(sharer)
        exporter.series_count += 1
        self._exporters[key] = exporter

    def _release(self, key: ExporterKey, name: str, labels: Labels) -> bool:
        """Release the room. Return whether no series has the labels any longer."""
        exporter = self._exporters[key]
        exporter.series_count -= 1
        if not exporter.series_count:
            del self._exporters[key]
        self._rooms.give_back(key[0])
        return self._sets[name].remove(labels)

    def _expire(self, now_ms: int) -> None:
        for _ in range(min(EXPIRED_A_TURN, len(self._series))):
            series_key, series = next(iter(self._series.items()))
            if now_ms - series.seen_at_ms <= SILENT_MS:
                break
            del self._series[series_key]
            key, name, _ = series_key
            if self._release(key, name, series.labels):
                self._histograms[name].drop(series.labels)
        self._gauges.expire(silent_since_ms=now_ms - SILENT_MS, count_max=EXPIRED_A_TURN)

    def _is_known(self, label_names: Labels, labels: Labels) -> bool:
        """Whether the topic and the consumer group of the labels exist."""
        if "consumer_group" in label_names:
            return self._knows(labels[0], labels[1])
        return self._knows_topic(labels[0])

    # ------------------------------------------------------------ a scrape

    def _collect(self) -> Iterator[Metric]:
        self._expire(self._monotonic_ms())
        points = CounterMetricFamily(
            "rocketmq_proxy_client_metric_points_total",
            "Points of clients' metrics that were accepted or rejected.",
            labels=("result",),
        )
        for result in ("accepted", "rejected"):
            points.add_metric((result,), self._points[result])
        yield points
        exporters = GaugeMetricFamily(
            "rocketmq_proxy_client_metric_exporters",
            "Clients that sent metrics within five minutes.",
        )
        exporters.add_metric((), len(self._exporters))
        yield exporters
        for name, shape in HISTOGRAMS.items():
            # Deleted topics and consumer groups are hidden until their series expire.
            def shown(labels: Labels, names: Labels = shape.label_names) -> Labels | None:
                return labels if self._is_known(names, labels) else None

            yield from histogram_parts(
                name, shape.documentation, shape.label_names, self._histograms[name], shown
            )
        yield from self._gauges.collect(self._is_known)


def _with_full_names(attributes: dict[str, str], namespace: str) -> dict[str, str]:
    """Return the attributes of a client's point with the full names of topic and group."""
    for label in PAIR if namespace else ():
        if label in attributes:
            attributes[label] = full_name(namespace, attributes[label])
    return attributes
