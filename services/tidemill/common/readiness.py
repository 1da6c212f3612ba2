"""Whether a process can do its work, and who it needs for that: the truth behind `/readyz`.

A process is ready while it serves and, where it needs others, while at least one of them could be
reached a short while ago. What is said of each of them is of this moment; the status is patient, or
one broker's restart would take every proxy out of its balancer.
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

WATCH_PERIOD_S: Final = 0.5  # between two looks for those who are told of changes

Phase = Literal["starting", "serving", "draining"]


class PeerStatus(NamedTuple):
    """A process that this one needs, at this moment."""

    name: str  # "" as long as it has not told
    address: str
    word: str  # "up", or what it is instead
    since_s: float  # for how long it cannot be reached; 0 while it is up
    reason: str  # why it cannot be reached

    def describe(self) -> str:
        """Return a line for people."""
        name = f"{self.name} at {self.address}" if self.name else self.address
        if self.word == "up":
            return f"[+] {name}: up"
        return f"[-] {name}: {self.word} for {self.since_s:.1f} s ({self.reason})"


class ReadinessReport(NamedTuple):
    """What is true at one moment."""

    is_ready: bool
    lines: list[str]  # why, and each peer


@final
class ProcessReadiness:
    """The phase of this process, and its peers."""

    def __init__(
        self,
        peers: Callable[[], Sequence[PeerStatus]] = lambda: (),
        *,
        unready_after_ms: int = 0,
        lacks: Callable[[], str] = lambda: "",
    ) -> None:
        """Be unready when none of `peers` could be reached for longer than `unready_after_ms`.

        Also while `lacks` says what else is not there yet.
        """
        self._lacks = lacks
        self.phase: Phase = "starting"
        self._peers = peers
        self._unready_after_s = unready_after_ms / 1000

    def report(self) -> ReadinessReport:
        """Say whether the process is ready, and why."""
        peers = self._peers()
        lines = [peer.describe() for peer in peers]
        if self.phase != "serving":
            return ReadinessReport(False, [f"not ready: {self.phase}", *lines])
        if missing := self._lacks():
            return ReadinessReport(False, [f"not ready: {missing}", *lines])
        if peers and all(peer.since_s > self._unready_after_s for peer in peers):
            return ReadinessReport(False, ["not ready: no broker can be reached", *lines])
        return ReadinessReport(True, ["ready", *lines])

    async def watch(self, tell: Callable[[bool], None]) -> None:
        """Tell of each change of the status, and log it, until cancelled."""
        was_ready = False
        while True:
            is_ready, lines = self.report()
            if is_ready != was_ready:
                was_ready = is_ready
                tell(is_ready)
                if self.phase == "serving":
                    (log.info if is_ready else log.warning)("readiness changed", status=lines)
            await asyncio.sleep(WATCH_PERIOD_S)

    def collect(self) -> Iterator[Metric]:
        """Yield the status, and whether each peer can be reached."""
        ready = GaugeMetricFamily("rocketmq_ready", "1 while /readyz says that this is ready.")
        ready.add_metric((), int(self.report().is_ready))
        yield ready
        reachable = GaugeMetricFamily(
            "rocketmq_broker_reachable",
            "1 while this process can reach the broker, at this moment.",
            labels=("broker", "address"),
        )
        for peer in self._peers():
            reachable.add_metric((peer.name, peer.address), int(peer.word == "up"))
        yield reachable
