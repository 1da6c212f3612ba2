"""Metrics of a controller, with the names of RocketMQ's controllers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeVar, final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tidemill.common.histogram import Histogram
from tidemill.common.metrics import histogram_family
from tidemill.controller.election.history import FAILOVER_REASONS
from tidemill.controller.election.retirement import staying
from tidemill.controller.meta_store import StoreUnreachable, WriteFailure

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tidemill.controller.election.swap import StoredRecord

# Microseconds of a request or a store call, from a local file to a time-out.
LATENCY_BOUNDS_US: Final = (
    100,
    300,
    1_000,
    3_000,
    10_000,
    30_000,
    100_000,
    300_000,
    1_000_000,
    3_000_000,
)
# Seconds without sends: a transfer, a crash, a silence, and failures that needed an operator.
FAILOVER_BOUNDS_S: Final = (0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 3, 5, 10, 30, 60, 300)
ROLE_FOLLOWER: Final = 2
ROLE_LEADER: Final = 3

Election = Literal["new_master_elected", "keep_current_master", "no_master_elected"]
T = TypeVar("T")


class MeasuredGroup(Protocol):
    """The state of a broker group that the metrics report."""

    @property
    def stored(self) -> StoredRecord | None:
        """The group record; None: unknown yet."""

    @property
    def alarm(self) -> str:
        """The reason why the group needs an operator, or nothing."""

    @property
    def live_count(self) -> int:
        """Registered replicas that are live."""

    @property
    def full_count(self) -> int:
        """Live replicas with a full disk."""

    def diverged_replicas(self) -> Collection[object]:
        """Return replicas whose log differs from their master's and must not be cut."""

    def unheard_pairs(self) -> Collection[object]:
        """Return pairs of live replicas that do not hear each other."""


@final
class ControllerMetrics:
    """The counters of one controller. Groups, requests and operations are few label values."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str]] = Counter()  # by type, status
        self._request_us: Histogram[str] = Histogram(LATENCY_BOUNDS_US)
        self._operations: Counter[tuple[str, str]] = Counter()  # of the store, by kind, status
        self._operation_us: Histogram[str] = Histogram(LATENCY_BOUNDS_US)
        self._elections: Counter[tuple[str, str]] = Counter()  # by group, result
        self._failovers: Histogram[tuple[str, str]] = Histogram(FAILOVER_BOUNDS_S)  # and reason

    async def time_call(self, operation: str, call: Awaitable[T]) -> T:
        """Count a store call and observe its duration."""
        began_ns, status = time.monotonic_ns(), "failed"
        try:
            result = await call
            status = "conflict" if isinstance(result, WriteFailure) else "success"
        except StoreUnreachable:
            status = "timeout"
            raise
        finally:
            self._operations[operation, status] += 1
            took_us = (time.monotonic_ns() - began_ns) // 1_000
            self._operation_us.observe(operation, took_us)
        return result

    def count_request(self, kind: str, status: str, took_ns: int | None = None) -> None:
        """Count a request of a replica, a proxy or an operator, and observe its duration."""
        self._requests[kind, status] += 1
        if took_ns is not None:
            self._request_us.observe(kind, took_ns // 1_000)

    def count_election(self, group: str, result: Election) -> None:
        """Count an election or a failure to elect."""
        self._elections[group, result] += 1

    def observe_failover(self, group: str, reason: str, away_ms: int) -> None:
        """Observe the outage of a group that took sends before and takes them again."""
        self._failovers.observe((group, reason), away_ms / 1_000)

    def collector(
        self, groups: Callable[[], Mapping[str, MeasuredGroup]], is_leading: Callable[[], bool]
    ) -> Callable[[], Iterator[Metric]]:
        """Return the function that yields the metrics.

        It is one function, because it is a list of metrics without decisions.
        """

        def collect() -> Iterator[Metric]:
            role = GaugeMetricFamily(
                "rocketmq_controller_role", "3 if this controller leads, 2 if it is a deputy."
            )
            role.add_metric((), ROLE_LEADER if is_leading() else ROLE_FOLLOWER)
            yield role
            active = GaugeMetricFamily(
                "rocketmq_controller_active_broker_number",
                "Registered replicas of a broker group that are live.",
                labels=("broker_set",),
            )
            alarmed = GaugeMetricFamily(
                "rocketmq_controller_group_alarm",
                "1 if a broker group has no working master or needs an operator.",
                labels=("broker_set",),
            )
            epochs = GaugeMetricFamily(
                "rocketmq_controller_group_epoch",
                "The epoch of a broker group, which grows with each election.",
                labels=("broker_set",),
            )
            in_sync = GaugeMetricFamily(
                "rocketmq_controller_in_sync_replicas",
                "Members of the sync state set of a broker group.",
                labels=("broker_set",),
            )
            registered = GaugeMetricFamily(
                "rocketmq_controller_registered_replicas",
                "Registered replicas of a broker group that are not retired, so should be in sync.",
                labels=("broker_set",),
            )
            diverged = GaugeMetricFamily(
                "rocketmq_controller_diverged_replicas",
                "Replicas of a broker group with a log that differs from the master's and must not"
                " be cut.",
                labels=("broker_set",),
            )
            full = GaugeMetricFamily(
                "rocketmq_controller_full_replicas",
                "Live replicas with a full disk, which accept no messages as master.",
                labels=("broker_set",),
            )
            unheard = GaugeMetricFamily(
                "rocketmq_controller_unheard_replicas",
                "Pairs of live replicas where one does not hear the other.",
                labels=("broker_set",),
            )
            for name, group in groups().items():
                for reason in FAILOVER_REASONS:
                    self._failovers.declare((name, reason))
                active.add_metric((name,), group.live_count)
                diverged.add_metric((name,), len(group.diverged_replicas()))
                full.add_metric((name,), group.full_count)
                unheard.add_metric((name,), len(group.unheard_pairs()))
                alarmed.add_metric((name,), int(bool(group.alarm)))
                if group.stored is not None:
                    epochs.add_metric((name,), group.stored.record.epoch)
                    in_sync.add_metric((name,), len(group.stored.record.sss))
                    registered.add_metric((name,), len(staying(group.stored.record)))
            yield from (active, alarmed, epochs, in_sync, registered, diverged, full, unheard)
            yield from self._collect_counts()

        return collect

    def _collect_counts(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "rocketmq_controller_request_total",
            "Requests of replicas, proxies and operators.",
            labels=("request_type", "request_handle_status"),
        )
        for labels, count in self._requests.items():
            requests.add_metric(labels, count)
        yield requests
        operations = CounterMetricFamily(
            "rocketmq_controller_log_op_total",
            "Calls of the store of group records.",
            labels=("operation", "operation_status"),
        )
        for labels, count in self._operations.items():
            operations.add_metric(labels, count)
        yield operations
        elections = CounterMetricFamily(
            "rocketmq_controller_election_total",
            "Elections of this controller, by result.",
            labels=("broker_set", "election_result"),
        )
        for labels, count in self._elections.items():
            elections.add_metric(labels, count)
        yield elections
        yield histogram_family(
            "rocketmq_ha_failover_seconds",
            "Seconds from the loss of a master to the first commit of the next one.",
            ("broker_group", "reason"),
            self._failovers,
            lambda labels: labels,
        )
        yield histogram_family(
            "rocketmq_controller_request_latency",
            "Microseconds from a request to its answer.",
            ("request_type",),
            self._request_us,
            lambda kind: (kind,),
        )
        yield histogram_family(
            "rocketmq_controller_log_op_latency",
            "Microseconds of a call of the store of group records.",
            ("operation",),
            self._operation_us,
            lambda kind: (kind,),
        )
