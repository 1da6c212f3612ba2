"""Pops and notifications under way, and what becomes of them when their callers go.

A pop hides what it takes, so its reply may not get lost: a caller that goes cancels its pop at the
broker, and what comes nevertheless is given back at once. A notification takes nothing, and is only
cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NamedTuple, final

from tidemill.proxy.link.commands import CHANGE_INVISIBLE, POP
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from tidemill.proxy.link.batching import FrameBatcher
    from tidemill.proxy.link.commands import Row
    from tidemill.proxy.link.pending import PendingRequests

GIVE_BACK_MS = 1000  # invisible duration of messages that nobody has got
# Pops whose late reply would still be given back. The broker answers a cancelled pop only if it
# came upon messages before the cancel, so most of these are never heard of again and the oldest are
# dropped.
ABANDONED_MAX = 10_000
# Messages on their way back, 300 bytes each; of more the invisible duration ends by itself.
RETURNING_MAX = 50_000


class PopInFlight(NamedTuple):
    """Whose messages a pop takes, and how long it may wait for them."""

    group_id: int
    topic_id: int
    duration_ms: int = 0


class PoppedBatch(NamedTuple):
    """What names the deliveries of a batch, as the batch does: enough to give them back."""

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
        self._abandoned: dict[int, PopInFlight] = {}
        self._returning: dict[int, Row] = {}  # what gives messages back, until it is answered

    def add(self, request_id: int, request: link_pb2.PopRequest) -> None:
        """Know of a pop, should its caller go."""
        self._in_flight[request_id] = PopInFlight(
            request.group_id, request.topic_id, request.poll_duration_ms
        )

    def remove(self, request_id: int) -> None:
        """Forget a pop whose caller has what it brought, or has left it."""
        self._in_flight.pop(request_id, None)

    def is_in_flight(self, request_id: int) -> bool:
        """Whether a request is a pop whose caller waits."""
        return request_id in self._in_flight

    def withdraw(self, request_id: int, future: asyncio.Future[Any]) -> int:
        """Cancel a pop whose caller no longer waits; return how many messages it gives back."""
        if future.done() and not future.cancelled() and not future.exception():
            # The reply arrived in the turn of the event loop in which the caller was cancelled.
            return self.give_back(self._in_flight[request_id], future.result().batches)
        self._pending.forget(request_id)
        if not self._batching.withdraw({request_id}) and self._pending.is_open:
            self._cancel(request_id)
        return 0

    def stop(self, request_id: int) -> None:
        """Answer a pop empty that waits for its reply; one that has it keeps it."""
        request = self._pending.forget(request_id)
        if request is None:
            return
        if not self._batching.withdraw({request_id}) and self._pending.is_open:
            self._cancel(request_id)
        if not request.future.done():
            request.future.set_result(link_pb2.PopReply(request_id=request_id))

    def stop_notification(self, request_id: int) -> None:
        """Forget a notification that nobody waits for any more, here and at the broker."""
        if self._pending.forget(request_id) is None:
            return
        if not self._batching.withdraw({request_id}) and self._pending.is_open:
            self._batching.cancel_poll(request_id)

    def shorten_waits(self) -> None:
        """Let the pops that leave late wait for as much less: their callers' time has gone on."""
        for request_id, request in self._batching.rows_of(POP):
            left_ms = self._in_flight[request_id].duration_ms - self._pending.waited_ms(request_id)
            request.poll_duration_ms = max(left_ms, 0)

    def release(self) -> None:
        """Answer every pop that waits empty; those that come may not wait."""
        self.are_released = True
        unsent = self._batching.withdraw(self._in_flight.keys())
        for request_id in list(self._in_flight):
            if request := self._pending.forget(request_id):
                if request_id not in unsent:
                    self._cancel(request_id)
                if not request.future.done():
                    request.future.set_result(link_pb2.PopReply(request_id=request_id))

    def _cancel(self, request_id: int) -> None:
        """Tell the broker; what the pop brings nevertheless is given back."""
        if len(self._abandoned) >= ABANDONED_MAX:
            del self._abandoned[next(iter(self._abandoned))]
        self._abandoned[request_id] = self._in_flight[request_id]
        self._batching.cancel_poll(request_id)

    def give_back_unclaimed(self, reply: link_pb2.PopReply) -> int:
        """Give back what a pop brings whose caller has gone; return how many messages."""
        # One whose caller was cancelled in this very turn of the loop is still under way.
        poll = self._abandoned.pop(reply.request_id, None) or self._in_flight.get(reply.request_id)
        return self.give_back(poll, reply.batches) if poll else 0

    def give_back(
        self, poll: PopInFlight, batches: Iterable[link_pb2.Batch | PoppedBatch], *, skip: int = 0
    ) -> int:
        """Make messages visible again soon, all but the first `skip`; return how many.

        Nobody waits for the answers. Where they fail, the invisible duration ends by itself; where
        the link is lost it is asked again, since a delivery is given back once.
        """
        rows = []
        for batch in batches:
            for index in batch.indexes:
                request = link_pb2.ChangeInvisibleRequest(
                    request_id=self._pending.new_id(),
                    group_id=poll.group_id,
                    topic_id=poll.topic_id,
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
        """Forget what gave messages back: it is answered."""
        for request_id in request_ids:
            self._returning.pop(request_id, None)

    def unanswered_returns(self, unsent: AbstractSet[int]) -> list[Row]:
        """Return what has left to give messages back, and was not answered."""
        return [row for request_id, row in self._returning.items() if request_id not in unsent]

    def forget_rejected(self, request_id: int) -> None:
        """Forget an abandoned pop, which brings nothing, or what gave a message back in vain."""
        self._abandoned.pop(request_id, None)
        self._returning.pop(request_id, None)

    def clear(self) -> None:
        """Forget all: what was popped is in another store."""
        self._abandoned.clear()
        self._returning.clear()

    def close(self) -> None:
        """Forget abandoned pops: the broker forgets the parked pops of a lost stream by itself."""
        self._abandoned.clear()
