"""The loop that renews the leases of a proxy at the home (ADR 0078)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, NamedTuple, Protocol, final

from tidemill.common.errors import ServiceError
from tidemill.proxy.quotas.leases import Lease, LeaseBook
from tidemill.security.permit_buckets import RENEWAL_MS, LeaseDemand

REQUEST_PAUSE_MS: Final = 20  # at least, between two requests to the home
LEASES_A_SLICE: Final = 100  # a millisecond


class Leased(NamedTuple):
    """The answer of the home: granted permits in the order of the demands."""

    granted: Sequence[int]
    proxies: int  # that are connected to the home
    # In the order of the demands: the room that limits of stocks have left. Empty: all unknown.
    rooms: Sequence[int | None] = ()


class PermitWaiters(Protocol):
    """Calls that wait for permits."""

    def note_waiting(self, leases: Sequence[Lease]) -> None:
        """Set `waiting` of these leases to the present costs."""

    def serve(self, leases: Sequence[Lease]) -> None:
        """Let calls pass whose permits have arrived at these leases."""

    def pause_ms(self, leases: Sequence[Lease]) -> int:
        """Return the time until the next request to the home, after one with these leases."""


@final
class LeaseRenewal:
    """The leases of calls that wait for permits, renewed by their demand."""

    def __init__(
        self,
        lease: Callable[[Sequence[LeaseDemand]], Awaitable[Leased]],
        monotonic_ms: Callable[[], int],
        waiters: PermitWaiters,
    ) -> None:
        """`lease` asks the home. It raises ServiceError."""
        self._lease = lease
        self._monotonic_ms = monotonic_ms
        self._waiters = waiters
        self.book = LeaseBook(monotonic_ms())
        self._has_demand = asyncio.Event()
        self._period_began_ms = monotonic_ms()
        self._leases: Sequence[Lease] = ()  # of the last request

    def demand(self) -> None:
        """Ask the home soon, because a call waits."""
        self._has_demand.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Lease permits until the block ends."""
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(self._run(), name="quota leases")
            yield
            run.cancel()

    async def _run(self) -> None:
        while True:
            if not self.book.leases:
                await self._has_demand.wait()
            self._has_demand.clear()
            await self.renew()
            await asyncio.sleep(REQUEST_PAUSE_MS / 1_000)
            with contextlib.suppress(TimeoutError):
                pause_ms = self._waiters.pause_ms(self._leases)
                pause_ms = min(max(pause_ms, REQUEST_PAUSE_MS), RENEWAL_MS)
                async with asyncio.timeout((pause_ms - REQUEST_PAUSE_MS) / 1_000):
                    await self._has_demand.wait()

    async def renew(self) -> None:
        """Ask the home for permits; without an answer, use the local buckets after a time."""
        self._leases = self.book.next_leases()
        demands: list[LeaseDemand] = []
        async for part in _slices(self._leases):
            self._waiters.note_waiting(part)
            demands += self.book.plan(self._monotonic_ms(), part)
        if self._monotonic_ms() - self._period_began_ms >= RENEWAL_MS:
            self._period_began_ms = self._monotonic_ms()
            self.book.end_period()
        try:
            leased = await self._lease(demands)
        except ServiceError:
            # The link logs that the home is down.
            leased = None
        begin = 0
        async for part in _slices(self._leases):
            now_ms = self._monotonic_ms()
            if leased is not None:
                end = begin + len(part)
                rooms = leased.rooms[begin:end]
                granted = leased.granted[begin:end]
                self.book.apply(demands[begin:end], granted, leased.proxies, now_ms, rooms)
                begin = end
            elif self.book.is_local(now_ms):
                self.book.renew_local(now_ms, part)
            self._waiters.serve(part)


async def _slices(leases: Sequence[Lease]) -> AsyncIterator[Sequence[Lease]]:
    """Yield leases in parts, at least one, and let other tasks run between them."""
    for begin in range(0, max(len(leases), 1), LEASES_A_SLICE):
        if begin:
            await asyncio.sleep(0)
        yield leases[begin : begin + LEASES_A_SLICE]
