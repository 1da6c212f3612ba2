"""Metrics of long polling.

receives that may wait            is_long_polling="true" of rocketmq_rpc_latency, and
                                  rocketmq_proxy_long_polling_total
notifications at brokers          rocketmq_proxy_notification_total, and request_code
                                  "notification" of the brokers' rocketmq_rpc_latency
receives with messages at once    is_short_polling_hit="true", and
                                  rocketmq_proxy_short_polling_hit_total
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tidemill.common.metrics import Labels, full_parts, histogram_family

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prometheus_client.core import Metric

    from tidemill.common.metrics import Registry
    from tidemill.proxy.polling.shell import PollingShell

_PAIR: Final = ("topic", "consumer_group")
# Metric, help, labels after topic and group, and the counter of `PollCounts`.
_COUNTERS: Final = (
    ("proxy_long_polling", "Receives that may wait.", ("polling_mode",), "long_polls"),
    ("proxy_receive", "Receives that have ended.", ("polling_mode", "outcome"), "receives"),
    ("proxy_short_polling_hit", "Receives with messages in the first pop.", (), "first_hits"),
    (
        "proxy_notification",
        "Answers of brokers asked for a hint.",
        ("has_message",),
        "notifications",
    ),
    (
        "proxy_notification_failed",
        "Hints that failed: rejected by the broker, or lost with the link.",
        (),
        "notification_failures",
    ),
    (
        "proxy_notification_coalesced",
        "Polls that joined a hint already asked for.",
        (),
        "coalesced",
    ),
    (
        "proxy_notified_pop",
        "Pops at the broker of a hint; a miss: another consumer was faster.",
        ("outcome",),
        "notified_pops",
    ),
    (
        "proxy_false_empty",
        "Receives answered empty while a hint of a broker had waited for over 200 ms.",
        (),
        "false_empties",
    ),
    (
        "priority_inversions",
        "Receives with a lower level than another broker group was known to have.",
        (),
        "inversions",
    ),
)


@final
class PollingMetrics:
    """The metrics of polls."""

    def __init__(
        self, registry: Registry, polling: PollingShell, is_known: Callable[[str, str], bool]
    ) -> None:
        """Use `is_known` to drop the counters of deleted topics and groups."""
        self._polling = polling
        self._is_known = is_known
        self._idle = registry.idle_pairs  # topic and group
        self._sets = {
            name: registry.label_sets(f"rocketmq_{name}_total", (*_PAIR, *labels))
            for name, _, labels, _ in _COUNTERS
        }
        registry.register(self._collect)

    def _collect(self) -> Iterator[Metric]:
        self._idle.forget_unless(lambda pair: self._is_known(*pair))
        counts, polling = self._polling.counts, self._polling.polling
        for name, help_, labels, field in _COUNTERS:
            yield from self._collect_pairs(name, help_, labels, getattr(counts, field))
        inflight = GaugeMetricFamily(
            "rocketmq_proxy_long_polling_inflight", "Receives that wait.", labels=("polling_mode",)
        )
        switches = CounterMetricFamily(
            "rocketmq_proxy_polling_mode_switch_total",
            "Changes of the wait mode of a topic and group.",
            labels=("to",),
        )
        modes = GaugeMetricFamily(
            "rocketmq_proxy_polling_mode", "Topics and groups in this wait mode.", labels=("mode",)
        )
        of_pairs: Counter[str] = Counter(mode.name for mode in polling.modes.values())
        for name in ("notify", "direct"):
            inflight.add_metric((name,), counts.inflight[name])
            switches.add_metric((name,), counts.switches[name])
            modes.add_metric((name,), of_pairs[name])
        yield from (inflight, switches, modes)
        now_ms = self._polling.now_ms()
        yield GaugeMetricFamily(
            "rocketmq_proxy_pop_request_rate",
            "Receives a second over the last ten, of those that the adaptive switch decides on.",
            value=sum(mode.rate(now_ms) for mode in polling.modes.values()),
        )
        yield histogram_family(
            "rocketmq_proxy_long_polling_wait_seconds",
            "Seconds from a receive that may wait to its end.",
            ("polling_mode", "outcome"),
            counts.waits,
            lambda labels: labels,
            divisor=1000,
        )

    def _collect_pairs(
        self, name: str, help_: str, labels: Labels, counts: Counter[Labels]
    ) -> Iterator[Metric]:
        family = CounterMetricFamily(f"rocketmq_{name}_total", help_, labels=(*_PAIR, *labels))
        folded: Counter[Labels] = Counter()
        for key, count in self._living(name, counts).items():
            if self._idle.note(key[:2], (name, *key[2:]), count):
                continue
            admitted = self._sets[name].admit(key)
            if admitted == key:
                family.add_metric(key, count)
                yield from full_parts(family)
            else:
                folded[admitted] += count
        for key, count in folded.items():
            family.add_metric(key, count)
        yield family

    def _living(self, name: str, counts: Counter[Labels]) -> Mapping[Labels, int]:
        for key in [key for key in counts if not self._is_known(key[0], key[1])]:
            del counts[key]
            self._sets[name].forget(key)
        return dict(counts)
