"""Sends that wait for the tokens of their quotas (ADR 0078).

Sends with the same quotas pass in the order of their arrival. A send that has waited for WAIT_MS is
refused, because some clients do not back off.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, final

from tidemill.common.errors import Overloaded, ServiceError
from tidemill.proxy.quotas.leases import Cost, LeaseBook
from tidemill.security.quotas import LIMIT_TEXTS, MatchedRate, QuotaLimit, RateKey
from tidemill.security.token_buckets import RENEWAL_MS, LeaseDemand

if TYPE_CHECKING:
    from tidemill.security.quotas import QuotaTable

WAIT_MS: Final = 500  # of a send; then it is refused
# Sends that wait, and the bytes of their messages. Sends with the same quotas wait only while they
# are at most as many as the free places, so that there is always a place for others.
WAITING_MAX: Final = 1_000
WAITING_BYTES_MAX: Final = 64 << 20
REQUEST_PAUSE_MS: Final = 20  # at least, between two requests to the home

QueueKey: TypeAlias = tuple[RateKey, ...]


class Leased(NamedTuple):
    """The answer of the home: granted tokens in the order of the demands."""

    granted: Sequence[int]
    proxies: int  # that are connected to the home


@final
class _WaitingSend:
    """A send that waits for tokens."""

    __slots__ = ("costs", "message_groups", "passed", "size_bytes")

    def __init__(
        self, costs: Sequence[Cost], message_groups: frozenset[str], size_bytes: int
    ) -> None:
        self.costs = costs
        self.size_bytes = size_bytes
        self.message_groups = message_groups
        self.passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()


@final
class SendQuotas:
    """The quotas of all sends of this proxy."""

    def __init__(
        self,
        table: QuotaTable,
        lease: Callable[[Sequence[LeaseDemand]], Awaitable[Leased]],
        monotonic_ms: Callable[[], int],
        *,
        wait_ms: int = WAIT_MS,
    ) -> None:
        """`lease` asks the home. Raises ServiceError."""
        self._table = table
        self._lease = lease
        self._monotonic_ms = monotonic_ms
        self._wait_s = wait_ms / 1_000
        self._book = LeaseBook(monotonic_ms())
        # Waiting sends by their quotas. The queue that was served last is the last one.
        self._queues: OrderedDict[QueueKey, deque[_WaitingSend]] = OrderedDict()
        self._waiting_of: dict[QueueKey, tuple[int, int]] = {}  # sends and bytes of each queue
        self._waiting_count = 0
        self._waiting_bytes = 0
        self._has_demand = asyncio.Event()
        self._period_began_ms = monotonic_ms()
        self.is_active = not table.is_empty  # the only check of a send without quotas
        table.on_change = self._note_change

    def _note_change(self) -> None:
        self.is_active = not self._table.is_empty

    async def admit(
        self,
        *,
        user: str,
        client_id: str,
        topic: str,
        messages: int,
        size_bytes: int,
        message_groups: frozenset[str],
    ) -> None:
        """Take the tokens of a send, all or none, or wait for them. Raises Overloaded."""
        rates = self._table.rates_of(user, client_id, topic)
        if not rates:
            return
        now_ms = self._monotonic_ms()
        costs = [
            Cost(
                self._book.lease_of(rate, now_ms),
                messages if rate.key.limit is QuotaLimit.PUBLISH_MESSAGES else size_bytes,
            )
            for rate in rates
        ]
        is_first = not any(cost.lease.waiting_count for cost in costs)
        if is_first and self._book.take(costs):
            return
        waiting = _WaitingSend(costs, message_groups, size_bytes)
        key = tuple([rate.key for rate in rates])
        if not self._has_place(key, waiting):
            raise self._refusal(rates, costs)
        await self._wait(key, rates, waiting)

    def _has_place(self, key: QueueKey, waiting: _WaitingSend) -> bool:
        """Whether a send may wait: its quotas may use as many places as they leave free."""
        used_count, used_bytes = self._waiting_of.get(key, (0, 0))
        free_count = WAITING_MAX - self._waiting_count
        free_bytes = WAITING_BYTES_MAX - self._waiting_bytes
        return used_count < free_count and used_bytes + waiting.size_bytes <= free_bytes

    async def _wait(
        self, key: QueueKey, rates: Sequence[MatchedRate], waiting: _WaitingSend
    ) -> None:
        queue = self._queues.setdefault(key, deque())
        queue.append(waiting)
        self._count(key, waiting, 1)
        self._has_demand.set()
        try:
            async with asyncio.timeout(self._wait_s):
                await waiting.passed
        except TimeoutError:
            if not waiting.passed.cancelled():
                # Its tokens, or the refusal of an earlier send, came in the turn of the time-out. A
                # later send of its message group may have its tokens, too.
                waiting.passed.result()
                return
            refusal = self._refusal(rates, waiting.costs)
            # Later messages of a message group may not overtake a refused one.
            for later in queue:
                is_behind = later is not waiting and not later.passed.done()
                if is_behind and later.message_groups & waiting.message_groups:
                    later.passed.set_exception(refusal)
            raise refusal from None
        finally:
            self._count(key, waiting, -1)
            if waiting in queue:
                queue.remove(waiting)
            if not queue and self._queues.get(key) is queue:
                del self._queues[key]

    def _count(self, key: QueueKey, waiting: _WaitingSend, change: int) -> None:
        size_bytes = waiting.size_bytes * change
        self._waiting_count += change
        self._waiting_bytes += size_bytes
        count, sum_bytes = self._waiting_of.get(key, (0, 0))
        if count + change:
            self._waiting_of[key] = count + change, sum_bytes + size_bytes
        else:
            del self._waiting_of[key]
        for cost in waiting.costs:
            cost.lease.waiting_count += change

    def _refusal(self, rates: Sequence[MatchedRate], costs: Sequence[Cost]) -> Overloaded:
        missing = self._book.find_missing(costs) or costs[0]
        [subject] = [rate.subject for rate in rates if rate.key == missing.lease.key]
        text = LIMIT_TEXTS[missing.lease.key.limit]
        wait_ms = missing.lease.missing_ms(missing.tokens)
        return Overloaded(f"{text} of {subject} is used up; retry in {wait_ms} ms")

    # ------------------------------------------------------------ renewals

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Lease tokens until the block ends."""
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(self._run(), name="quota leases")
            yield
            run.cancel()

    async def _run(self) -> None:
        while True:
            if not self._book.leases:
                await self._has_demand.wait()
            self._has_demand.clear()
            await self._renew()
            await asyncio.sleep(REQUEST_PAUSE_MS / 1_000)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout((RENEWAL_MS - REQUEST_PAUSE_MS) / 1_000):
                    await self._has_demand.wait()

    async def _renew(self) -> None:
        """Ask the home for tokens; without an answer, use the local buckets after a time."""
        self._note_waiting()
        demands = self._book.plan(self._monotonic_ms())
        if self._monotonic_ms() - self._period_began_ms >= RENEWAL_MS:
            self._period_began_ms = self._monotonic_ms()
            self._book.end_period()
        try:
            leased = await self._lease(demands)
        except ServiceError:
            # The link logs that the home is down.
            if self._book.is_local(self._monotonic_ms()):
                self._book.renew_local(self._monotonic_ms())
        else:
            self._book.apply(demands, leased.granted, leased.proxies, self._monotonic_ms())
        self._serve()
        if self._waiting_count:
            self._has_demand.set()

    def _note_waiting(self) -> None:
        for lease in self._book.leases.values():
            lease.waiting = []
        for queue in self._queues.values():
            for waiting in queue:
                for lease, tokens in waiting.costs:
                    lease.waiting.append(tokens)

    def _serve(self) -> None:
        """Let sends pass whose tokens have arrived, one of each queue in turn."""
        remaining = list(self._queues.items())
        while remaining:
            served = []
            for key, queue in remaining:
                while queue and queue[0].passed.done():
                    queue.popleft()  # Its task has not run yet.
                if queue and self._book.take(queue[0].costs):
                    queue.popleft().passed.set_result(None)
                    self._queues.move_to_end(key)
                    served.append((key, queue))
            remaining = served
