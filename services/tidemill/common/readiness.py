"""The readiness of a process and the state of the brokers that it needs, for `/readyz`.

A process is ready while it serves. If it needs brokers, at least one of them must have been
reachable a short time ago. The state of each broker is the current one. The status waits, because
otherwise the restart of one broker would take every proxy out of its load balancer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, final

import structlog
from prometheus_client.core import GaugeMetricFamily

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = structlog.get_logger()

CHECK_PERIOD_S: Final = 0.5  # between two checks of the status

Phase = Literal["starting", "serving", "draining"]


class PeerStatus(NamedTuple):
    """The current state of a process that this one needs."""

    name: str  # "" until the process has reported its name
    address: str
    state: str  # "up", or another state
    since_s: float  # time for which it has been unreachable; 0 while it is up
    reason: str  # why it is unreachable

    def describe(self) -> str:
        """Return a line of text for people."""
        name = f"{self.name} at {self.address}" if self.name else self.address
        if self.state == "up":
            return f"[+] {name}: up"
        return f"[-] {name}: {self.state} for {self.since_s:.1f} s ({self.reason})"


class ReadinessReport(NamedTuple):
    """The readiness at one moment."""

    is_ready: bool
    lines: list[str]  # the reason, then one line per peer and per problem


@final
class ProcessReadiness:
    """The phase of this process and the state of its peers."""

    def __init__(
        self,
        peers: Callable[[], Sequence[PeerStatus]] = lambda: (),
        *,
        unready_after_ms: int = 0,
        find_missing: Callable[[], str] = lambda: "",
        find_problems: Callable[[], Sequence[str]] = lambda: (),
    ) -> None:
        """Be not ready if all `peers` have been unreachable for longer than `unready_after_ms`.

        Also be not ready while `find_missing` returns the name of something missing. The problems
        are lines for people. They do not change the status.
        """
        self._find_missing = find_missing
        self._find_problems = find_problems
        self.phase: Phase = "starting"
        self._peers = peers
        self._unready_after_s = unready_after_ms / 1000

    def report(self) -> ReadinessReport:
        """Return whether the process is ready, and why."""
        peers = self._peers()
        lines = [peer.describe() for peer in peers]
        lines += [f"[!] {problem}" for problem in self._find_problems()]
        if self.phase != "serving":
            return ReadinessReport(False, [f"not ready: {self.phase}", *lines])
        if missing := self._find_missing():
            return ReadinessReport(False, [f"not ready: {missing}", *lines])
        if peers and all(peer.since_s > self._unready_after_s for peer in peers):
            return ReadinessReport(False, ["not ready: no broker is reachable", *lines])
        return ReadinessReport(True, ["ready", *lines])

    async def report_changes(self, notify: Callable[[bool], None]) -> None:
        """Report and log each change of the status until cancelled."""
        was_ready = False
        while True:
            is_ready, lines = self.report()
            if is_ready != was_ready:
                was_ready = is_ready
                notify(is_ready)
                if self.phase == "serving":
                    (log.info if is_ready else log.warning)("readiness changed", status=lines)
            await asyncio.sleep(CHECK_PERIOD_S)

    def collect(self) -> Iterator[Metric]:
        """Yield the status and the reachability of each peer."""
        ready = GaugeMetricFamily(
            "rocketmq_ready", "1 while /readyz reports this process as ready."
        )
        ready.add_metric((), int(self.report().is_ready))
        yield ready
        reachable = GaugeMetricFamily(
            "rocketmq_broker_reachable",
            "1 while this process reaches the broker.",
            labels=("broker", "address"),
        )
        for peer in self._peers():
            reachable.add_metric((peer.name, peer.address), int(peer.state == "up"))
        yield reachable
