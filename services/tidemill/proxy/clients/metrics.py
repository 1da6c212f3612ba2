"""What official clients measure of themselves, merged for a scrape: the clients are no labels.

Clients that are told to (`Settings.metric`) export every minute, by OTLP, what they have counted
since they began: cumulative histograms. What a client has told is remembered, so that each export
adds what is new in it; one that tells of a past that we do not know, of before this proxy or of
another one, adds nothing the first time. Each series ages by itself, an address has as many as are
free, and a label set ends with the last series that tells of it.

A label is a topic or a consumer group that exists. What is refused of an export is told by number
in the answer (`partial_success`).
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
from tidemill.proxy.clients.gauges import ExporterKey, Gauge, GaugeSums
from tidemill.proxy.clients.points import (
    COLLECTED,
    GAUGES,
    HISTOGRAMS,
    NAME_BYTES_MAX,
    PAIR,
    STATUSES,
    Found,
    Refused,
    attributes_of,
    buckets_of,
    gauge_value,
    parsed,
    points_of,
)
from tidemill.proxy.shares import AddressShares

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tidemill.common.metrics import Registry

# What a client has missed to tell of in four exports is forgotten, and with the last client that
# told of a label set, the label set.
SILENT_MS: Final = 300_000
# An export and a half. A client that did not tell us for longer may have told somebody else, and
# nobody should count twice: what it tells then is only where counting begins.
GAP_NS: Final = 90_000_000_000
# What is remembered of clients, some 400 bytes each: 20 MB. An address has at most as many as are
# free; beyond it new ones are refused, and what is known goes on.
SERIES_MAX: Final = 50_000
SERIES_A_CLIENT_MAX: Final = 1_000  # of the former; a client has a handful for each topic
# Label sets of one metric, each ten samples and 1.2 KB of a scrape: 5 MB. Shared as the former.
LABEL_SETS_MAX: Final = 4_000
# What nobody counts: ten times the sends of the fastest client in one process.
COUNTED_A_SECOND_MAX: Final = 1_000_000
# Of durations, new in one export: ten thousand listeners of a day each.
NEW_TOTAL_MS_MAX: Final = 1_000_000_000_000
# Of one export: metrics, points, which are walked twice, and what they are wrapped in. It has 128
# KiB, a point over 200: so it has at most 600 of those.
PARTS_MAX: Final = 2_000
PARTS_A_TURN: Final = 16  # half a millisecond, and twice that for points of their largest
EXPIRED_A_TURN: Final = 500  # series forgotten by one export or scrape: a millisecond
_COUNTED_AT_ONCE_MAX: Final = COUNTED_A_SECOND_MAX * GAP_NS // 1_000_000_000

_FULL: Final = "as many series of clients are remembered as there is room for"


class Taken(NamedTuple):
    """What became of an export."""

    accepted: int
    rejected: int
    reason: str  # of the first that was rejected


@dataclass(slots=True)
class _Series:
    """What a client has told of one cumulative histogram."""

    labels: Labels
    start_ns: int
    counts: array[int]
    total: float
    time_ns: int  # of the client, when it told
    seen_at_ms: int  # of ours
    allowance: int  # how much more it may have counted then


@dataclass(slots=True)
class _Exporter:
    """One client that has told something which is remembered."""

    told_ns: int = 0  # the client's time of its last export; 0 during its first
    series_count: int = 0  # the gauges among them


@dataclass(slots=True)
class _Export:
    """One export that is being taken."""

    key: ExporterKey
    now_ms: int
    accepted: int = 0
    rejected: int = 0
    reason: str = ""
    time_ns: int = 0
    # Of this export, until all of it is there: a client may have two under way.
    gauges: Counter[Gauge] = field(default_factory=Counter)

    def refuse(self, reason: str) -> None:
        self.rejected += 1
        self.reason = self.reason or reason


@final
class _LabelSets:
    """The label sets of one metric, each for as long as a series tells of it."""

    def __init__(self) -> None:
        self._tellers: Counter[Labels] = Counter()
        self._owners: dict[Labels, str] = {}  # the address that told of it first
        self._shares = AddressShares(LABEL_SETS_MAX)

    def check_room(self, labels: Labels, address: str) -> None:
        if labels not in self._owners and not self._shares.has_room(address):
            raise Refused("as many topics and consumer groups are told of as there is room for")

    def add(self, labels: Labels, address: str) -> None:
        if labels not in self._owners:
            self._owners[labels] = address
            self._shares.take(address)
        self._tellers[labels] += 1

    def remove(self, labels: Labels) -> bool:
        """Count one series less; return whether nobody tells of them any more."""
        self._tellers[labels] -= 1
        if self._tellers[labels]:
            return False
        del self._tellers[labels]
        self._shares.give_back(self._owners.pop(labels))
        return True


@final
class ClientMetrics:
    """The measures of all clients of this proxy."""

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
        self._rooms = AddressShares(SERIES_MAX)
        # By name and hash of the attributes; silent longest first.
        self._series: OrderedDict[tuple[ExporterKey, str, int], _Series] = OrderedDict()
        self._points: Counter[str] = Counter()
        self._histograms: dict[str, Histogram[Labels]] = {
            name: Histogram(shape.bounds) for name, shape in HISTOGRAMS.items()
        }
        self._gauges = GaugeSums(self._enter, self._leave)
        self._sets = {name: _LabelSets() for name in (*HISTOGRAMS, *GAUGES)}
        registry.register(self._collect)

    def take(self, address: str, client_id: str, request: bytes) -> Generator[None, None, Taken]:
        """Add what is new in an export, in slices. Raises MalformedWire for what is none."""
        export = _Export((address, client_id), self._monotonic_ms())
        self._expire(export.now_ms)
        for part_count, found in enumerate(points_of(request)):
            if part_count >= PARTS_MAX:
                export.refuse(f"an export has at most {PARTS_MAX} parts")
                break
            if found is not None:
                try:
                    self._take_point(export, found)
                except Refused as refused:
                    export.refuse(str(refused))
                else:
                    export.accepted += 1
            if part_count % PARTS_A_TURN == PARTS_A_TURN - 1:
                yield
        for refusal in self._gauges.swap(export.key, export.gauges, now_ms=export.now_ms):
            export.accepted -= 1
            export.refuse(refusal)
        exporter = self._exporters.get(export.key)
        if exporter is not None:
            exporter.told_ns = max(exporter.told_ns, export.time_ns)
        return self._count(Taken(export.accepted, export.rejected, export.reason))

    def _count(self, taken: Taken) -> Taken:
        self._points.update(accepted=taken.accepted, rejected=taken.rejected)
        return taken

    def _take_point(self, export: _Export, found: Found) -> None:
        name, kind = found.name, found.kind
        if name not in COLLECTED.get(kind, ()):
            raise Refused(f"no {kind} {name[:NAME_BYTES_MAX]!r} is collected here")
        point = parsed(found)
        attributes = attributes_of(point)
        if kind == "gauge":
            value = gauge_value(point)
            export.gauges[name, self._labels(PAIR, attributes)] += value
        elif found.temporality != otlp.AGGREGATION_TEMPORALITY_CUMULATIVE:
            # No official client sends differences, of which nobody could tell what is too many.
            raise Refused("the histogram does not count from a beginning on")
        else:
            self._take_histogram(export, name, attributes, point)
        export.time_ns = max(export.time_ns, point.time_unix_nano)

    def _labels(self, names: Sequence[str], attributes: Mapping[str, str]) -> Labels:
        """Return the values of the labels; raise Refused for what does not exist here."""
        labels = tuple(attributes.get(name, "") for name in names)
        topic = attributes.get("topic", "")
        if "consumer_group" in names:
            if not self._knows(topic, attributes.get("consumer_group", "")):
                raise Refused("the point is of a topic or a consumer group that is not here")
        elif not self._knows_topic(topic):
            raise Refused("the point is of a topic that is not here")
        if "invocation_status" in names and attributes.get("invocation_status") not in STATUSES:
            raise Refused("invocation_status is success or failure")
        return labels

    # ------------------------------------------------------------ histograms

    def _take_histogram(
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
            raise Refused("nobody counts so much in that time")
        if series is None:
            self._enter(export.key, name, labels)
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
        """Return what a point has counted since the client told of it last."""
        zeros = array("Q", bytes(8 * len(counts)))
        if before is not None and before.start_ns == point.start_time_unix_nano:
            since_ns, since_counts, since_total = before.time_ns, before.counts, before.total
        else:
            # It began anew, or we hear of it first. Of what a client uses later it has told nobody,
            # though it began long ago, when it told us of all that it had a minute before.
            exporter = self._exporters.get(export.key)
            told_ns = 0 if exporter is None else exporter.told_ns
            since_ns, since_counts, since_total = (
                max(point.start_time_unix_nano, told_ns),
                zeros,
                0.0,
            )
        is_told_elsewhere = point.time_unix_nano - since_ns > GAP_NS
        # Where it counts backwards, nobody knows from where.
        if is_told_elsewhere or any(map(int.__lt__, counts, since_counts)):
            return zeros, 0.0
        return array("Q", map(int.__sub__, counts, since_counts)), max(total - since_total, 0.0)

    # ------------------------------------------------------------ remembering, and forgetting

    def _enter(self, key: ExporterKey, name: str, labels: Labels) -> None:
        """Take room for a series or a gauge of a client; raise Refused where there is none."""
        address = key[0]
        exporter = self._exporters.get(key) or _Exporter()
        if exporter.series_count >= SERIES_A_CLIENT_MAX:
            raise Refused(f"a client tells of at most {SERIES_A_CLIENT_MAX} series")
        if not self._rooms.has_room(address):
            raise Refused(_FULL)
        self._sets[name].check_room(labels, address)
        self._sets[name].add(labels, address)
        self._rooms.take(address)
        exporter.series_count += 1
        self._exporters[key] = exporter

    def _leave(self, key: ExporterKey, name: str, labels: Labels) -> bool:
        """Give the room back; return whether nobody tells of the labels any more."""
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
            if self._leave(key, name, series.labels):
                self._histograms[name].drop(series.labels)
        self._gauges.expire(silent_since_ms=now_ms - SILENT_MS, count_max=EXPIRED_A_TURN)

    def _is_known(self, label_names: Labels, labels: Labels) -> bool:
        """Whether what labels name is still there."""
        if "consumer_group" in label_names:
            return self._knows(labels[0], labels[1])
        return self._knows_topic(labels[0])

    # ------------------------------------------------------------ a scrape

    def _collect(self) -> Iterator[Metric]:
        self._expire(self._monotonic_ms())
        points = CounterMetricFamily(
            "rocketmq_proxy_client_metric_points_total",
            "Points of clients' metrics that were taken, or refused.",
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
            # What is deleted is hidden, until nobody tells of it any more.
            def shown(labels: Labels, names: Labels = shape.label_names) -> Labels | None:
                return labels if self._is_known(names, labels) else None

            yield from histogram_parts(
                name, shape.documentation, shape.label_names, self._histograms[name], shown
            )
        yield from self._gauges.collect(self._is_known)
