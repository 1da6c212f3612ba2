"""The sums of the gauges in the newest export of each client."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias, final

from prometheus_client.core import GaugeMetricFamily

from tidemill.common.metrics import Labels, full_parts
from tidemill.proxy.clients.points import GAUGES, PAIR, PointRejection

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# Address and client id. The id alone is not enough, because other clients may know it.
ExporterKey: TypeAlias = tuple[str, str]
Gauge: TypeAlias = tuple[str, Labels]  # name and labels


@final
class GaugeSums:
    """The sums by gauge, and the newest values of each client."""

    def __init__(
        self,
        reserve: Callable[[ExporterKey, str, Labels], None],
        release: Callable[[ExporterKey, str, Labels], bool],
    ) -> None:
        """Use `reserve` and `release` for the room of a gauge.

        `reserve` raises PointRejection. `release` returns whether no client reports the gauge now.
        """
        self._reserve = reserve
        self._release = release
        self._sums: Counter[Gauge] = Counter()
        # Time and gauges of the newest export of each client, the oldest first.
        self._newest: OrderedDict[ExporterKey, tuple[int, dict[Gauge, int]]] = OrderedDict()

    def swap(self, key: ExporterKey, newest: Mapping[Gauge, int], *, now_ms: int) -> list[str]:
        """Replace the gauges of a client. Return the reasons of rejections."""
        _, values = self._newest.get(key, (0, {}))
        for gauge in values.keys() - newest.keys():
            self._drop(key, values, gauge)
        rejections = []
        for gauge, value in newest.items():
            if gauge not in values:
                try:
                    self._reserve(key, *gauge)
                except PointRejection as rejection:
                    rejections.append(str(rejection))
                    continue
            self._sums[gauge] += value - values.get(gauge, 0)
            values[gauge] = value
        if values:
            self._newest[key] = now_ms, values
            self._newest.move_to_end(key)
        else:
            self._newest.pop(key, None)
        return rejections

    def _drop(self, key: ExporterKey, values: dict[Gauge, int], gauge: Gauge) -> None:
        self._sums[gauge] -= values.pop(gauge)
        if self._release(key, *gauge):
            del self._sums[gauge]

    def expire(self, *, silent_since_ms: int, count_max: int) -> None:
        """Drop the gauges of clients without an export since then, up to about `count_max`."""
        count = 0
        while self._newest and count < count_max:
            key, (exported_at_ms, values) = next(iter(self._newest.items()))
            if exported_at_ms >= silent_since_ms:
                break
            count += len(values)
            self.swap(key, {}, now_ms=exported_at_ms)

    def collect(self, is_known: Callable[[Labels, Labels], bool]) -> Iterator[Metric]:
        """Yield the sums. `is_known` gets label names and labels and hides deleted resources."""
        families = {
            name: GaugeMetricFamily(name, documentation, labels=PAIR)
            for name, documentation in GAUGES.items()
        }
        for (name, labels), value in list(self._sums.items()):
            if is_known(PAIR, labels):
                families[name].add_metric(labels, value)
                yield from full_parts(families[name])
        yield from families.values()
