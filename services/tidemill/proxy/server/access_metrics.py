"""The metrics of the checks of calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tidemill.security.table import Mode


def access_metrics(
    authentications: Mapping[tuple[str, str], int],
    accesses: Mapping[tuple[str, str], int],
    undecryptable_count: int,
    in_force: Mode,
) -> Iterator[Metric]:
    """Yield the metrics of credentials by method and result, and of rights by call and result."""
    logins = CounterMetricFamily(
        "rocketmq_auth", "Checks of credentials.", labels=("method", "result")
    )
    for labels, count in authentications.items():
        logins.add_metric(labels, count)
    yield logins
    checked = CounterMetricFamily("rocketmq_access", "Checks of rights.", labels=("call", "result"))
    for labels, count in accesses.items():
        checked.add_metric(labels, count)
    yield checked
    undecryptable = GaugeMetricFamily(
        "rocketmq_auth_undecryptable_secrets", "Secrets that no key of the key file decrypts."
    )
    undecryptable.add_metric((), undecryptable_count)
    yield undecryptable
    mode = GaugeMetricFamily(
        "rocketmq_security_mode", "The mode in force: 0 off, 1 permissive, 2 on."
    )
    mode.add_metric((), in_force)
    yield mode
