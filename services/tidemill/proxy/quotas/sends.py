"""Sends that wait for the permits of their quotas (ADR 0078).

Sends with the same quotas pass in the order of their arrival. A send that has waited for WAIT_MS is
refused, because some clients do not back off.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, final

from tidemill.common.errors import Overloaded
from tidemill.proxy.quotas.leases import Cost, Lease
from tidemill.proxy.quotas.renewal import REQUEST_PAUSE_MS, Leased, LeaseRenewal
from tidemill.security.permit_buckets import RENEWAL_MS
from tidemill.security.quotas import LIMIT_TEXTS, LimitKey, MatchedLimit, QuotaLimit

if TYPE_CHECKING:
    from tidemill.security.permit_buckets import LeaseDemand
    from tidemill.security.quotas import QuotaTable

WAIT_MS: Final = 500  # of a send; then it is refused
# Sends that wait, and the bytes of their messages. Sends with the same quotas wait only while they
# are at most as many as the free places, so that there is always a place for others.
WAITING_MAX: Final = 1_000
WAITING_BYTES_MAX: Final = 64 << 20

QueueKey: TypeAlias = tuple[LimitKey, ...]
Sender: TypeAlias = tuple[str, int, str, str]  # name and id of the user, client id, topic


class _SendRequest(NamedTuple):
    """A send, as far as its quotas depend on it."""

    sender: Sender
    messages: int
    size_bytes: int
    timers: int
    message_groups: frozenset[str]


@final
class _WaitingSend:
    """A send that waits for the permits of its quotas."""

    __slots__ = ("costs", "key", "limits", "passed", "request")

    def __init__(self, request: _SendRequest) -> None:
        self.request = request
        self.limits: Sequence[MatchedLimit] = ()
        self.costs: Sequence[Cost] = ()
        self.key: QueueKey = ()
        self.passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def match(self, limits: Sequence[MatchedLimit], costs: Sequence[Cost]) -> None:
        """Take over the quotas of the send."""
        self.limits, self.costs = limits, costs
        self.key = tuple([limit.key for limit in limits])


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
        self._monotonic_ms = monotonic_ms
        self._wait_s = wait_ms / 1_000
        self._renewal = LeaseRenewal(lease, monotonic_ms, self)
        self._book = self._renewal.book
        # Waiting sends by their quotas; by () those without quotas after a deletion. The queue that
        # was served last is the last one.
        self._queues: OrderedDict[QueueKey, deque[_WaitingSend]] = OrderedDict()
        self._waiting_of: dict[QueueKey, tuple[int, int]] = {}  # sends and bytes of each queue
        # Those with message groups, by their sender, in the order of their arrival.
        self._ordered: dict[Sender, dict[_WaitingSend, None]] = {}
        self._waiting_count = 0
        self._waiting_bytes = 0
        self.is_active = not table.is_empty  # the only check of a send without quotas
        table.add_listener(self._note_change)

    def _note_change(self) -> None:
        if self._waiting_count:
            self._renewal.demand()  # The home lets sends pass that wait for a deleted quota.
        self._set_active()

    def _set_active(self) -> None:
        self.is_active = not self._table.is_empty or self._waiting_count > 0

    def _match_again(self, sender: Sender, key: QueueKey) -> None:
        """Let waiting sends of message groups wait for their present quotas, in their order.

        A later send of their sender has the present ones, those of `key`. In another queue, or
        without a quota, it would overtake those that wait. Sends without a message group have no
        order, so they keep their quotas.
        """
        ordered = self._ordered.get(sender)
        # Invariant: the last one has newer quotas than those before it, or the same ones.
        if ordered is None or next(reversed(ordered)).key == key:
            return
        for waiting in list(ordered):
            limits = self._limits_of(waiting.request)
            # In their order, each behind all others that wait for the same limits.
            self._remove(waiting)
            waiting.match(limits, self._costs_of(limits, waiting.request))
            self._add(waiting)

    async def admit(
        self,
        *,
        user: str,
        user_id: int,
        client_id: str,
        topic: str,
        messages: int,
        size_bytes: int,
        message_groups: frozenset[str],
        timers: int = 0,
    ) -> None:
        """Take the permits of a send, all or none, or wait for them. Raises Overloaded.

        `timers` of the messages are delayed. A send does not wait for a stock without room.
        """
        sender = user, user_id, client_id, topic
        request = _SendRequest(sender, messages, size_bytes, timers, message_groups)
        limits = self._limits_of(request)
        key = tuple([limit.key for limit in limits])
        if message_groups:
            self._match_again(request.sender, key)
        if not limits and () not in self._queues:
            return
        costs = self._costs_of(limits, request)
        # Permits for all waiting sends stay. A send that waits for another limit delays no others.
        if limits and key not in self._queues and self._book.take(costs, leave_waiting=True):
            return
        if (full := _find_full(limits, costs)) is not None:
            raise Overloaded(full.stock_text)
        waiting = _WaitingSend(request)
        waiting.match(limits, costs)
        if limits and not self._has_place(waiting):
            raise self._refusal(limits, costs)
        await self._wait(waiting)

    def _limits_of(self, request: _SendRequest) -> Sequence[MatchedLimit]:
        limits = self._table.limits_of(*request.sender)
        if request.timers:
            return limits
        return [limit for limit in limits if limit.key.limit is not QuotaLimit.PENDING_TIMERS]

    def _costs_of(self, limits: Sequence[MatchedLimit], request: _SendRequest) -> list[Cost]:
        now_ms = self._monotonic_ms()
        return [
            Cost(
                self._book.lease_of(limit, now_ms),
                limit.cost(
                    messages=request.messages, size_bytes=request.size_bytes, timers=request.timers
                ),
            )
            for limit in limits
        ]

    def _has_place(self, waiting: _WaitingSend) -> bool:
        """Whether a send may wait: its quotas may use as many places as they leave free."""
        used_count, used_bytes = self._waiting_of.get(waiting.key, (0, 0))
        free_count = WAITING_MAX - self._waiting_count
        free_bytes = WAITING_BYTES_MAX - self._waiting_bytes
        return used_count < free_count and used_bytes + waiting.request.size_bytes <= free_bytes

    async def _wait(self, waiting: _WaitingSend) -> None:
        self._add(waiting)
        self._renewal.demand()
        try:
            await self._pass_in_time(waiting)
        except Overloaded as refusal:
            # Also those that came since `serve` has refused this one.
            self._refuse_later(waiting, refusal)
            raise
        except asyncio.CancelledError:
            # Its permits may have come in the same turn. Without them, `passed` is cancelled, too.
            if not waiting.passed.cancelled() and waiting.passed.exception() is None:
                for lease, permits in waiting.costs:
                    lease.charge(-permits)
                self._renewal.demand()
            raise
        finally:
            self._remove(waiting)
            self._set_active()

    async def _pass_in_time(self, waiting: _WaitingSend) -> None:
        """Wait until a send has its permits. Raises Overloaded."""
        try:
            async with asyncio.timeout(self._wait_s):
                await waiting.passed
        except TimeoutError:
            if not waiting.passed.cancelled():
                # Its permits, or the refusal of an earlier send, came in the turn of the time-out.
                # A later send of its message group may have its permits, too.
                waiting.passed.result()
                return
            if not waiting.costs:
                return  # Its quotas have just been deleted.
            raise self._refusal(waiting.limits, waiting.costs) from None

    def _refuse_later(self, refused: _WaitingSend, refusal: Overloaded) -> None:
        """Refuse later messages of the message groups: they may not overtake a refused one.

        A refused batch may have more message groups, whose later messages are refused, too.
        """
        groups = refused.request.message_groups
        if not groups:
            return
        queue = self._queues[refused.key]
        for later in itertools.islice(queue, queue.index(refused) + 1, None):
            if not later.passed.done() and later.request.message_groups & groups:
                groups |= later.request.message_groups
                later.passed.set_exception(refusal)

    def _queues_of(self, leases: Sequence[Lease]) -> dict[QueueKey, deque[_WaitingSend]]:
        """Return the queues that wait for one of these leases, and that without a quota."""
        keys = {lease.key for lease in leases}
        return {
            key: queue for key, queue in self._queues.items() if not key or not keys.isdisjoint(key)
        }

    def _refuse_full(self, queues: Iterable[deque[_WaitingSend]]) -> None:
        """Refuse waiting sends if a stock has no room for them."""
        for queue in queues:
            for waiting in queue:
                if waiting.passed.done():
                    continue
                if (full := _find_full(waiting.limits, waiting.costs)) is not None:
                    refusal = Overloaded(full.stock_text)
                    waiting.passed.set_exception(refusal)
                    self._refuse_later(waiting, refusal)

    def _add(self, waiting: _WaitingSend) -> None:
        self._queues.setdefault(waiting.key, deque()).append(waiting)
        if waiting.request.message_groups:
            self._ordered.setdefault(waiting.request.sender, {})[waiting] = None
        for key in waiting.key:
            self._book.ask_first(key)
        self._count(waiting, 1)

    def _remove(self, waiting: _WaitingSend) -> None:
        queue = self._queues[waiting.key]
        queue.remove(waiting)
        if not queue:
            del self._queues[waiting.key]
        if waiting.request.message_groups:
            ordered = self._ordered[waiting.request.sender]
            del ordered[waiting]
            if not ordered:
                del self._ordered[waiting.request.sender]
        self._count(waiting, -1)

    def _count(self, waiting: _WaitingSend, change: int) -> None:
        size_bytes = waiting.request.size_bytes * change
        self._waiting_count += change
        self._waiting_bytes += size_bytes
        count, sum_bytes = self._waiting_of.get(waiting.key, (0, 0))
        if count + change:
            self._waiting_of[waiting.key] = count + change, sum_bytes + size_bytes
        else:
            del self._waiting_of[waiting.key]
        for cost in waiting.costs:
            cost.lease.waiting_permits += cost.permits * change

    def _refusal(self, limits: Sequence[MatchedLimit], costs: Sequence[Cost]) -> Overloaded:
        missing = self._book.find_missing(costs) or costs[0]
        [limit] = [limit for limit in limits if limit.key == missing.lease.key]
        if missing.lease.is_stock:
            return Overloaded(limit.stock_text)
        text = LIMIT_TEXTS[missing.lease.key.limit]
        wait_ms = missing.lease.missing_ms(missing.permits)
        return Overloaded(f"{text} of {limit.subject} is used up; retry in {wait_ms} ms")

    # ------------------------------------------------------------ renewals

    def running(self) -> AbstractAsyncContextManager[None]:
        """Lease permits until the block ends."""
        return self._renewal.running()

    def pause_ms(self, leases: Sequence[Lease]) -> int:  # noqa: ARG002  # of PermitWaiters
        """Return the time until the next request to the home. A waiting send has little time."""
        return REQUEST_PAUSE_MS if self._waiting_count else RENEWAL_MS

    def note_waiting(self, leases: Sequence[Lease]) -> None:
        """Set the costs of waiting sends at these leases."""
        for lease in leases:
            lease.waiting = []
        chosen = {lease.key for lease in leases}
        for queue in self._queues_of(leases).values():
            for waiting in queue:
                if not waiting.passed.done():
                    for lease, permits in waiting.costs:
                        if lease.key in chosen:
                            lease.waiting.append(permits)

    def serve(self, leases: Sequence[Lease]) -> None:
        """Let sends pass whose permits have arrived, one of each queue in turn."""
        queues = self._queues_of(leases)
        self._refuse_full(queues.values())
        # A send leaves its queue when its task runs: until then, no later send may overtake it.
        turns = {key: deque(_pending_sends(queue)) for key, queue in queues.items()}
        while turns:
            for key, queue in list(turns.items()):
                if queue and self._book.take(queue[0].costs):
                    queue.popleft().passed.set_result(None)
                    self._queues.move_to_end(key)
                else:
                    del turns[key]


def _pending_sends(queue: Iterable[_WaitingSend]) -> Iterator[_WaitingSend]:
    """Yield the sends that may pass now.

    A send whose time is over, or that is refused, has not left its queue yet. Later sends of its
    message groups are not yielded, because its task refuses them.
    """
    held: frozenset[str] = frozenset()
    for waiting in queue:
        passed, groups = waiting.passed, waiting.request.message_groups
        if not passed.done() and not groups & held:
            yield waiting
        elif not passed.done() or passed.cancelled() or passed.exception() is not None:
            held |= groups


def _find_full(limits: Sequence[MatchedLimit], costs: Sequence[Cost]) -> MatchedLimit | None:
    """Return a limit of a stock without room for a send."""
    for limit, cost in zip(limits, costs, strict=True):
        if cost.lease.is_full(cost.permits):
            return limit
    return None
