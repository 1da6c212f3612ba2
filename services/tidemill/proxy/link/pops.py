"""Pops and notifications in flight, and their cancellation.

A pop hides the messages that it takes, so its reply must not be lost. If the caller of a pop is
cancelled, the pop is cancelled at the broker, and messages that arrive nevertheless are given back
at once. A notification takes no messages; it is only cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NamedTuple, final

from tidemill.proxy.link.commands import CHANGE_INVISIBLE, POP
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from tidemill.common.errors import ServiceError
    from tidemill.proxy.link.batching import FrameBatcher
    from tidemill.proxy.link.commands import Row
    from tidemill.proxy.link.pending import PendingRequests

GIVE_BACK_MS = 1000  # invisible duration of messages that are given back
# Cancelled pops that wait for a late reply, to give its messages back. The broker answers a
# cancelled pop only if it found messages before the cancel, so most of them get no reply, and the
# oldest are forgotten.
CANCELLED_MAX = 10_000
# Messages that are being given back, 300 bytes each. The invisible duration of more messages ends
# without a request.
RETURNING_MAX = 50_000


class PopInFlight(NamedTuple):
    """The subject of a pop, and the time that it may wait at the broker."""

    group_id: int
    topic_id: int
    duration_ms: int = 0


class PoppedBatch(NamedTuple):
    """The names of the deliveries of a batch: enough to give them back."""

    slot: int
    delivery_id: int
    visible_at_ms: int
    indexes: tuple[int, ...]


@final
class PopsInFlight:
    """The pops of one link."""

    def __init__(self, pending: PendingRequests, batching: FrameBatcher) -> None:
        self.are_released = False
        self._pending = pending
        self._batching = batching
        self._in_flight: dict[int, PopInFlight] = {}
        self._cancelled: dict[int, PopInFlight] = {}
        self._returning: dict[int, Row] = {}  # unanswered requests that give messages back

    def add(self, request_id: int, request: link_pb2.PopRequest) -> None:
        """Add a pop when its request begins."""
        self._in_flight[request_id] = PopInFlight(
            request.group_id, request.topic_id, request.poll_duration_ms
        )

    def remove(self, request_id: int) -> None:
        """Remove a pop at the end of its call. Other requests are ignored."""
        self._in_flight.pop(request_id, None)

    def is_in_flight(self, request_id: int) -> bool:
        """Whether a request is a pop in flight."""
        return request_id in self._in_flight

    def withdraw(self, request_id: int, future: asyncio.Future[Any]) -> int:
        """Cancel a pop, since its caller was cancelled; return how many messages it gives back."""
        if future.done() and not future.cancelled() and not future.exception():
            # The reply arrived and the caller was cancelled in the same turn of the event loop.
            return self.give_back(self._in_flight[request_id], future.result().batches)
        self._pending.forget(request_id)
        if not self._batching.withdraw({request_id}) and self._pending.is_open:
            self._cancel(request_id)
        return 0

    def stop(self, request_id: int) -> None:
        """End a pop with an empty reply, unless it already has a reply."""
        request = self._pending.forget(request_id)
        if request is None:
            return
        if not self._batching.withdraw({request_id}) and self._pending.is_open:
            self._cancel(request_id)
        if not request.waiter.done():
            request.waiter.set_result(link_pb2.PopReply(request_id=request_id))

    def stop_notification(self, request_id: int) -> None:
        """Cancel a notification, here and at the broker."""
        if self._pending.forget(request_id) is None:
            return
        if not self._batching.withdraw({request_id}) and self._pending.is_open:
            self._batching.cancel_poll(request_id)

    def shorten_waits(self) -> None:
        """Shorten the waits of unsent pops by the time that they have spent here."""
        for request_id, request in self._batching.rows_of(POP):
            duration_ms = self._in_flight[request_id].duration_ms
            request.poll_duration_ms = max(duration_ms - self._pending.waited_ms(request_id), 0)

    def fail_sql_filters(self, error: ServiceError) -> None:
        """Fail the unsent pops with an SQL filter."""
        rows = self._batching.rows_of(POP)
        failed = {request_id for request_id, request in rows if request.sql}
        self._batching.withdraw(failed)
        for request_id in failed:
            self._pending.fail(request_id, error)

    def release(self) -> None:
        """End every waiting pop with an empty reply. Later pops may not wait."""
        self.are_released = True
        unsent = self._batching.withdraw(self._in_flight.keys())
        for request_id in list(self._in_flight):
            if request := self._pending.forget(request_id):
                if request_id not in unsent:
                    self._cancel(request_id)
                if not request.waiter.done():
                    request.waiter.set_result(link_pb2.PopReply(request_id=request_id))

    def _cancel(self, request_id: int) -> None:
        """Cancel a pop at the broker. Messages that arrive nevertheless are given back."""
        if len(self._cancelled) >= CANCELLED_MAX:
            del self._cancelled[next(iter(self._cancelled))]
        self._cancelled[request_id] = self._in_flight[request_id]
        self._batching.cancel_poll(request_id)

    def give_back_unclaimed(self, reply: link_pb2.PopReply) -> int:
        """Give back the messages of a cancelled pop; return their number."""
        # If the caller was cancelled in this turn of the event loop, the pop is still in flight.
        pop = self._cancelled.pop(reply.request_id, None) or self._in_flight.get(reply.request_id)
        return self.give_back(pop, reply.batches) if pop else 0

    def give_back(
        self, pop: PopInFlight, batches: Iterable[link_pb2.Batch | PoppedBatch], *, skip: int = 0
    ) -> int:
        """Make all messages but the first `skip` visible again soon; return their number.

        No caller waits for the answers. If a request fails, the invisible duration ends later
        without it. If the link is lost, the request is repeated: giving back twice does no harm.
        """
        rows = []
        for batch in batches:
            for index in batch.indexes:
                request = link_pb2.ChangeInvisibleRequest(
                    request_id=self._pending.new_id(),
                    group_id=pop.group_id,
                    topic_id=pop.topic_id,
                    slot=batch.slot,
                    delivery_id=batch.delivery_id,
                    index=index,
                    visible_at_ms=batch.visible_at_ms,
                    invisible_duration_ms=GIVE_BACK_MS,
                    gives_back=True,
                )
                rows.append((request.request_id, request))
        del rows[:skip]
        del rows[max(RETURNING_MAX - len(self._returning), 0) :]
        if rows:
            self._returning.update([(row[0], row) for row in rows])
            self._batching.add_all(CHANGE_INVISIBLE, rows)
        return len(rows)

    def forget_returns(self, request_ids: Iterable[int]) -> None:
        """Forget requests that gave messages back, and were answered."""
        for request_id in request_ids:
            self._returning.pop(request_id, None)

    def unanswered_returns(self, unsent: AbstractSet[int]) -> list[Row]:
        """Return the sent and unanswered requests that give messages back."""
        return [row for request_id, row in self._returning.items() if request_id not in unsent]

    def forget_rejected(self, request_id: int) -> None:
        """Forget a request that the broker has rejected: a cancelled pop or one that gives back."""
        self._cancelled.pop(request_id, None)
        self._returning.pop(request_id, None)

    def clear(self) -> None:
        """Forget cancelled pops and returns: the store of their messages was replaced."""
        self._cancelled.clear()
        self._returning.clear()

    def close(self) -> None:
        """Forget cancelled pops: the broker forgets the parked pops of a lost stream."""
        self._cancelled.clear()
