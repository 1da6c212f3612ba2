"""The age of the users and roles of this proxy: the time since the home answered (ADR 0071).

Without the home, the last known rights stay in force. A limit may end that, because a user that was
disabled meanwhile keeps its rights here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, final

import structlog
from prometheus_client.core import GaugeMetricFamily

from tidemill.common.errors import SecurityStale

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tidemill.proxy.cluster.cluster import BrokerCluster

log = structlog.get_logger()


@final
class SecurityAge:
    """The age of the security items, and its limit."""

    def __init__(self, cluster: BrokerCluster, limit_ms: int) -> None:
        """`limit_ms` 0: none."""
        self._cluster = cluster
        self._limit_s = limit_ms / 1000
        self._is_reported = False  # the log has a line about this outage

    @property
    def version(self) -> int:
        """The version of the security items of this proxy."""
        return self._cluster.home.link.configuration.security.version

    @property
    def age_s(self) -> float:
        """The time without an answer of the home; 0 while it answers."""
        return self._cluster.home.link.state().since_s

    def check(self) -> None:
        """Raise SecurityStale above the limit."""
        if not self._limit_s:
            return
        age_s = self.age_s
        if age_s <= self._limit_s:
            self._is_reported = False
            return
        if not self._is_reported:
            self._is_reported = True
            log.warning("security tables stale", age_s=round(age_s), limit_s=self._limit_s)
        raise SecurityStale(
            f"the home has not answered for {age_s:.0f} s, so users and rights are too old"
            f" (security_stale_max_ms); try again later"
        )

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the security items."""
        version = GaugeMetricFamily(
            "rocketmq_security_version", "Number of changes of users, roles and the mode."
        )
        version.add_metric((), self.version)
        yield version
        age = GaugeMetricFamily(
            "rocketmq_security_stale_seconds",
            "Time without an answer of the home, which stores users and roles; 0 while it answers.",
        )
        age.add_metric((), self.age_s)
        yield age
