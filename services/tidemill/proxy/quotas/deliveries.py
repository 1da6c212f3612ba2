"""Polls and pulls that wait for the permits of their consumer group (ADR 0078).

A read takes permits before it asks the broker, and returns the unused ones afterwards. The number
of bytes is unknown then. A read takes permits for as many bytes as the last messages of its
consumer group had. If it gets more, the number of permits is negative, and later reads wait until
the home has granted the missing ones. A read is never refused.

A read that ends without permits leaves its demand for a short time. Otherwise, a client that polls
without waiting would never find permits, because the home grants them only if a read wants them.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Final, NamedTuple, final

from tidemill.proxy.quotas.leases import IDLE_MS, Lease
from tidemill.proxy.quotas.renewal import REQUEST_PAUSE_MS, Leased, LeaseRenewal
from tidemill.security.permit_buckets import RENEWAL_MS
from tidemill.security.quotas import MatchedLimit, QuotaLimit

if TYPE_CHECKING:
    from tidemill.security.permit_buckets import LeaseDemand
    from tidemill.security.quotas import QuotaTable

# Reads, about 1 KB each. Those of a consumer group wait only while they are at most as many as the
# free places, so that there is always a place for others. A further one gets no permits.
WAITING_MAX: Final = 10_000
# Demand of reads that have ended without permits, and the number of their consumer groups.
MISSED_MS: Final = IDLE_MS
MISSED_MAX: Final = 10_000  # about 200 bytes each; the oldest one is forgotten
SIZES_MAX: Final = 10_000  # consumer groups, about 200 bytes each; the oldest one is forgotten


class _MissedRead(NamedTuple):
    """The demand of a read that has ended without permits."""

    until_ms: int
    wanted: int  # messages


@final
class DeliveryPermits:
    """The permits of one read; the reader returns the unused ones."""

    __slots__ = ("_group", "_limits", "_quotas", "_size_bytes", "messages")

    def __init__(
        self,
        quotas: DeliveryQuotas,
        group: str,
        limits: Sequence[MatchedLimit],
        messages: int,
        size_bytes: int,
    ) -> None:
        self.messages = messages  # that the read may get
        self._quotas = quotas
        self._group = group
        self._limits = limits  # when the permits were taken
        self._size_bytes = size_bytes  # expected at first

    def spend(self, messages: int, size_bytes: int) -> None:
        """Note the messages that the read has got. Return the other permits."""
        if messages:
            self._quotas.note_size(self._group, size_bytes / messages)
        self._correct(messages, size_bytes)

    def give_back(self) -> None:
        """Return all permits, because no message reaches the client."""
        self._correct(0, 0)

    def _correct(self, messages: int, size_bytes: int) -> None:
        more_messages, more_bytes = messages - self.messages, size_bytes - self._size_bytes
        self.messages, self._size_bytes = messages, size_bytes
        self._quotas.charge(self._limits, more_messages, more_bytes)
        if more_messages < 0 or more_bytes < 0:
            self._quotas.serve_group(self._group)


@final
class WaitingRead:
    """A read that waits for permits, or has them."""

    __slots__ = ("group", "permits", "wanted")

    def __init__(self, group: str, wanted: int) -> None:
        self.group = group
        self.wanted = wanted  # messages
        # None: it has waited in vain.
        self.permits: asyncio.Future[DeliveryPermits | None] = (
            asyncio.get_running_loop().create_future()
        )

    def stop(self) -> None:
        """End the wait without permits."""
        if not self.permits.done():
            self.permits.set_result(None)


@final
class _GroupQueue:
    """The waiting reads of one consumer group, the first one first."""

    def __init__(self) -> None:
        self.reads: dict[WaitingRead, None] = {}
        self.wanted = 0  # messages of all reads

    def add(self, read: WaitingRead) -> None:
        """Append a read."""
        self.reads[read] = None
        self.wanted += read.wanted

    def remove(self, read: WaitingRead) -> bool:
        """Remove a read. Return False if it does not wait here."""
        if read not in self.reads:
            return False
        del self.reads[read]
        self.wanted -= read.wanted
        return True


@final
class DeliveryQuotas:
    """The quotas of all polls and pulls of this proxy."""

    def __init__(
        self,
        table: QuotaTable,
        lease: Callable[[Sequence[LeaseDemand]], Awaitable[Leased]],
        monotonic_ms: Callable[[], int],
    ) -> None:
        """`lease` asks the home. It raises ServiceError."""
        self._table = table
        self._monotonic_ms = monotonic_ms
        self.renewal = LeaseRenewal(lease, monotonic_ms, self)
        self._book = self.renewal.book
        # By consumer group. The first read of a consumer group gets permits first.
        self._queues: dict[str, _GroupQueue] = {}
        self._waiting_count = 0
        # By consumer group, the oldest one first.
        self._missed: OrderedDict[str, _MissedRead] = OrderedDict()
        # Bytes of a message of each consumer group, the oldest one first.
        self._sizes: OrderedDict[str, float] = OrderedDict()
        self._is_released = False
        table.add_listener(self._note_change)

    def _note_change(self) -> None:
        if self._queues:
            self.renewal.demand()  # Reads that wait for a deleted quota pass at the next renewal.

    def running(self) -> AbstractAsyncContextManager[None]:
        """Lease permits until the block ends."""
        return self.renewal.running()

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change of a quota."""
        self._table.add_listener(listener)

    def is_limited(self, group: str) -> bool:
        """Whether the deliveries of a consumer group have a limit."""
        return not self._table.is_empty and bool(self._table.group_limits(group))

    def request(self, group: str, wanted: int) -> WaitingRead:
        """Begin to wait for permits of 1 to `wanted` messages; the caller continues with `wait`."""
        read = WaitingRead(group, wanted)
        if group not in self._queues:
            self._pass(read)
        if not read.permits.done():
            if self._is_released or not self._has_place(group):
                read.stop()
            else:
                self._queues.setdefault(group, _GroupQueue()).add(read)
                self._waiting_count += 1
                for limit in self._table.group_limits(group):
                    self._book.ask_first(limit.key)
                self.renewal.demand()
        return read

    def _has_place(self, group: str) -> bool:
        """Whether a read may wait: a consumer group uses as many places as it leaves free."""
        queue = self._queues.get(group)
        return (len(queue.reads) if queue else 0) < WAITING_MAX - self._waiting_count

    async def wait(self, read: WaitingRead) -> DeliveryPermits | None:
        """Return the permits of a read; None if it has waited in vain."""
        try:
            permits = await read.permits
        except asyncio.CancelledError:
            # Both may happen in one turn of the loop.
            if not read.permits.cancelled() and (permits := read.permits.result()) is not None:
                permits.give_back()
            raise
        else:
            if permits is None:
                self._miss(read)
            return permits
        finally:
            self._remove(read)

    async def take(self, group: str, wanted: int, *, timeout_ms: int) -> DeliveryPermits | None:
        """Return permits of 1 to `wanted` messages; None if there are none within the time."""
        try:
            async with asyncio.timeout(timeout_ms / 1_000):
                read = self.request(group, wanted)
                return await self.wait(read)
        except TimeoutError:
            self._miss(read)
            return None

    def _miss(self, read: WaitingRead) -> None:
        """Keep the demand of a read that has ended without permits."""
        if self._is_released:
            return
        self._missed.pop(read.group, None)
        if len(self._missed) >= MISSED_MAX:
            self._missed.popitem(last=False)
        until_ms = self._monotonic_ms() + MISSED_MS
        self._missed[read.group] = _MissedRead(until_ms, read.wanted)
        self.renewal.demand()

    def _remove(self, read: WaitingRead) -> None:
        queue = self._queues.get(read.group)
        if queue is not None and queue.remove(read):
            self._waiting_count -= 1
            if not queue.reads:
                del self._queues[read.group]

    def release(self) -> None:
        """End every wait without permits, and every later one at once: the process stops."""
        self._is_released = True
        for queue in self._queues.values():
            for read in queue.reads:
                read.stop()

    def charge(self, limits: Sequence[MatchedLimit], messages: int, size_bytes: int) -> None:
        """Take permits, also those that are missing. Negative numbers return permits."""
        now_ms = self._monotonic_ms()
        for limit in limits:
            is_messages = limit.key.limit is QuotaLimit.DISPATCH_MESSAGES
            self._book.charge(limit, messages if is_messages else size_bytes, now_ms)

    def note_size(self, group: str, message_bytes: float) -> None:
        """Note the mean size of the messages of a read. A larger one counts at once."""
        known = self._sizes.pop(group, message_bytes)
        if len(self._sizes) >= SIZES_MAX:
            self._sizes.popitem(last=False)
        self._sizes[group] = max(message_bytes, (known + message_bytes) / 2)

    # ------------------------------------------------------------ for the renewal

    def pause_ms(self, leases: Sequence[Lease]) -> int:
        """Return the time until the limit has added the first missing permits of these leases."""
        if self._queues and len(leases) < len(self._book.leases):
            return REQUEST_PAUSE_MS  # for the other leases
        return min([each.missing_ms(1) for each in leases if each.waiting], default=RENEWAL_MS)

    def note_waiting(self, leases: Sequence[Lease]) -> None:
        """Set the demand of waiting reads at these leases: one permit first, and then more."""
        now_ms = self._monotonic_ms()
        while self._missed:
            oldest, missed = next(iter(self._missed.items()))
            if now_ms < missed.until_ms:
                break
            del self._missed[oldest]
        for lease in leases:
            group = _group_of(lease)
            if (queue := self._queues.get(group)) is not None:
                wanted = queue.wanted
            elif group in self._missed:
                wanted = self._missed[group].wanted
            else:
                lease.waiting = []
                continue
            if lease.key.limit is QuotaLimit.DISPATCH_BYTES:
                wanted = max(math.ceil(wanted * self._sizes.get(group, 0)), 1)
            lease.waiting = [1, wanted - 1]

    def serve(self, leases: Sequence[Lease]) -> None:
        """Let reads pass whose permits have arrived at these leases."""
        for lease in leases:
            self.serve_group(_group_of(lease))

    def serve_group(self, group: str) -> None:
        """Let reads of a consumer group pass whose permits have arrived."""
        queue = self._queues.get(group)
        while queue is not None and queue.reads:
            read = next(iter(queue.reads))
            if not read.permits.done():
                self._pass(read)
                if not read.permits.done():
                    return
            self._remove(read)

    def _pass(self, read: WaitingRead) -> None:
        """Give a read its permits, if there are any."""
        now_ms = self._monotonic_ms()
        limits = self._table.group_limits(read.group)
        leases = [self._book.lease_of(limit, now_ms) for limit in limits]
        if any(lease.permits < 1 for lease in leases):
            return
        messages, size = read.wanted, self._sizes.get(read.group)
        free_bytes = 0
        for lease in leases:
            if lease.key.limit is QuotaLimit.DISPATCH_MESSAGES:
                messages = min(messages, int(lease.permits))
            else:
                free_bytes = int(lease.permits)
                if size is not None:
                    messages = min(messages, max(int(free_bytes / max(size, 1)), 1))
        # If the size is unknown, the read takes all permits: no other one passes until it is known.
        size_bytes = free_bytes if size is None else math.ceil(messages * size)
        self.charge(limits, messages, size_bytes)
        read.permits.set_result(DeliveryPermits(self, read.group, limits, messages, size_bytes))


def _group_of(lease: Lease) -> str:
    """Return the consumer group of a lease."""
    _kind, _, group = lease.subject.partition(":")
    return group
