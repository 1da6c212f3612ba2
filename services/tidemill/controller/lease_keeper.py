"""The lease of the leading controller: renewed while this one leads, taken when it is free.

The lease only avoids competing writes. A controller that cannot reach the store no longer leads. It
still receives heartbeats and sends routes.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final, final

import structlog

from tidemill.controller.election.leadership import Leadership, LeaseTiming
from tidemill.controller.meta_store import MetaStore, StoreUnreachable, WriteFailure

if TYPE_CHECKING:
    from tidemill.common.clock import Clock

LEASE: Final = "controller"
RELEASE_TIMEOUT_S: Final = 1.0  # at a stop; without a release the others wait four seconds

log = structlog.get_logger()


@final
class LeaseKeeper:
    """The part of this controller in the lease."""

    def __init__(
        self,
        name: str,
        store: MetaStore,
        clock: Clock,
        *,
        timing: LeaseTiming | None = None,
        deputy_rank: int = 1,
    ) -> None:
        self._name = name
        self._store = store
        self._clock = clock
        self._leadership = Leadership(name, timing or LeaseTiming())
        self._deputy_rank = deputy_rank
        self._was_leading = False

    def is_leading(self) -> bool:
        """Return whether this controller leads now."""
        return self._leadership.is_leading(self._clock.monotonic_ms())

    def rank(self) -> int:
        """Return 0 for the leader, and for a deputy the number of steps that it waits."""
        return 0 if self.is_leading() else self._deputy_rank

    async def run(self) -> None:
        """Read, take and renew the lease until cancelled."""
        while True:
            with contextlib.suppress(StoreUnreachable):
                await self.step()
            is_leading = self.is_leading()
            if is_leading != self._was_leading:
                self._was_leading = is_leading
                log.info("this controller leads" if is_leading else "this controller leads no more")
            now_ms = self._clock.monotonic_ms()
            await asyncio.sleep((self._leadership.next_try_ms(now_ms) - now_ms) / 1000)

    async def step(self) -> None:
        """Read the lease, and take or renew it if this is allowed. Raises StoreUnreachable."""
        seen = await self._store.read_lease(LEASE)
        if seen is not None:
            self._leadership.note_lease(seen, self._clock.monotonic_ms())
            if seen.holder != self._name:
                self._leadership.note_loss()
        if not self._leadership.may_take(self._clock.monotonic_ms()):
            return
        sent_at_ms = self._clock.monotonic_ms()
        result = await self._store.write_lease(LEASE, seen, self._name)
        if isinstance(result, WriteFailure):
            self._leadership.note_loss()
        else:
            self._leadership.note_renewal(result, sent_at_ms)

    async def release(self) -> None:
        """Release the lease, unless the store takes longer than RELEASE_TIMEOUT_S."""
        if not self.is_leading():
            return
        self._leadership.note_loss()
        with contextlib.suppress(StoreUnreachable, TimeoutError):
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                seen = await self._store.read_lease(LEASE)
                if seen is not None and seen.holder == self._name:
                    await self._store.write_lease(LEASE, seen, "")
