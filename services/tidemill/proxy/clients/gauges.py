"""The gauges of clients, added up: of each client those that its newest export told of."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias, final

from prometheus_client.core import GaugeMetricFamily

from tidemill.common.metrics import Labels, full_parts
from tidemill.proxy.clients.points import GAUGES, PAIR, Refused

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# Address and client id: who knows the id only is somebody else.
ExporterKey: TypeAlias = tuple[str, str]
Gauge: TypeAlias = tuple[str, Labels]  # name and labels


@final
class GaugeSums:
    """The sums, and what each client has told of."""

    def __init__(
        self,
        enter: Callable[[ExporterKey, str, Labels], None],
        leave: Callable[[ExporterKey, str, Labels], bool],
    ) -> None:
        """Ask `enter` for room, which raises Refused; `leave` says if nobody tells any more."""
        self._enter = enter
        self._leave = leave
        self._sums: Counter[Gauge] = Counter()
        # When each client told of its gauges, and of which; silent longest first.
        self._told: OrderedDict[ExporterKey, tuple[int, dict[Gauge, int]]] = OrderedDict()

    def swap(self, key: ExporterKey, newest: Mapping[Gauge, int], *, now_ms: int) -> list[str]:
        """Have a client's gauges be those of its newest export; return why some were refused."""
        _, known = self._told.get(key, (0, {}))
        for gauge in known.keys() - newest.keys():
            self._drop(key, known, gauge)
        refusals = []
        for gauge, value in newest.items():
            if gauge not in known:
                try:
                    self._enter(key, *gauge)
                except Refused as refused:
                    refusals.append(str(refused))
                    continue
            self._sums[gauge] += value - known.get(gauge, 0)
            known[gauge] = value
        if known:
            self._told[key] = now_ms, known
            self._told.move_to_end(key)
        else:
            self._told.pop(key, None)
        return refusals

    def _drop(self, key: ExporterKey, known: dict[Gauge, int], gauge: Gauge) -> None:
        self._sums[gauge] -= known.pop(gauge)
        if self._leave(key, *gauge):
            del self._sums[gauge]

    def expire(self, *, silent_since_ms: int, count_max: int) -> None:
        """Forget clients that have told of none since, until so many gauges are dropped."""
        count = 0
        while self._told and count < count_max:
            key, (told_at_ms, known) = next(iter(self._told.items()))
            if told_at_ms >= silent_since_ms:
                break
            count += len(known)
            self.swap(key, {}, now_ms=told_at_ms)

    def collect(self, is_known: Callable[[Labels, Labels], bool]) -> Iterator[Metric]:
        """Yield the sums of what is still there, by label names and labels."""
        families = {
            name: GaugeMetricFamily(name, documentation, labels=PAIR)
            for name, documentation in GAUGES.items()
        }
        for (name, labels), value in list(self._sums.items()):
            if is_known(PAIR, labels):
                families[name].add_metric(labels, value)
                yield from full_parts(families[name])
        yield from families.values()
