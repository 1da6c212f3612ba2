"""The polls of one link: when a pop or a notification is answered, and when it waits.

| situation | pop | notification |
| --- | --- | --- |
| something is there | answered in this round | answered in this round |
| nothing is there | waits for a message for its poll duration, then empty | the same |
| the link is full | waits for room for its poll duration, at least 2 s, then Overloaded | - |
| poll duration 0 or the broker drains | does not wait | does not wait |
| the link is closed | dropped | dropped |

A link is full while the proxy has not read `UNSENT_POPS_BYTES_MAX` of popped messages. It also
counts as full while older pops wait for room, because a newer pop would take the room that they
wait for. After the end of a wait for room it is unknown whether a message is there, so the pop is
not answered empty.

Popped messages that were not sent when the link closes are given back (`GiveBackWork`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol, final

from tidemill.broker.engine.layout.numbers import GroupId, TopicId
from tidemill.broker.engine.pop.consumption import Delivery
from tidemill.broker.engine.pop.readiness import NOTHING_READY
from tidemill.broker.server.round.long_polling import PopOutcome, PopPoll
from tidemill.common.errors import Overloaded, ServiceError

if TYPE_CHECKING:
    from tidemill.broker.engine.pop.consumption import DeliveryBatch
    from tidemill.broker.server.link.replies import LinkReplies, Result
    from tidemill.broker.server.round.long_polling import Key, NotificationPoll, PollArguments
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn

# Names of the commands; the results are kept under these names.
POP: Final = "pop"
NOTIFICATION: Final = "notification"

# Of popped messages that are unsent, those of rounds in flight included. One frame may have
# hundreds of pops, and arriving messages may answer as many parked ones, with up to POP_BYTES_MAX
# each. Everything else on the link waits behind these bytes, some 20 ms.
UNSENT_POPS_BYTES_MAX = 4 << 20
# The shortest wait for room on the link, within the 3 s of patience that clients have.
ROOM_WAIT_MS = 2_000
# Deadlines are rounded up to it: thousands of polls then end in one round instead of one each. As
# in the reference, and a tenth of the time that a proxy reserves for the way back.
EXPIRY_TICK_MS = 20
GIVE_BACK_MS = 1_000  # invisible duration of messages that were popped and not sent


class ReplyStream(Protocol):
    """The stream on which replies are sent to the proxy."""

    @property
    def unsent_bytes(self) -> int:
        """The bytes that the proxy has not read yet."""

    def write(self, message: bytes) -> None:
        """Send without waiting."""

    async def wait_drained(self) -> None:
        """Wait until nothing is unsent, or the proxy has disconnected."""


@final
class LinkPops:
    """The polls of one link, and the room on the link for popped messages."""

    def __init__(
        self, rounds: Rounds, stream: ReplyStream, replies: Callable[[], LinkReplies]
    ) -> None:
        """Serve the polls of `stream`; `replies` returns its replies of the current round."""
        self._rounds = rounds
        self._stream = stream
        self._replies = replies
        self._is_closed = False
        self._popped_bytes = 0  # of answers that are not written yet
        self._written_bytes = 0  # of all reply frames of the link
        # Results of written frames that may be unsent, each with the position where its frame ends.
        self._unsent: deque[tuple[int, Sequence[Result]]] = deque()
        # Request ids of pops that wait for room, by key: bounded by the number of parked polls.
        self._crowded: dict[Key, set[int]] = {}
        self._is_crowded = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Whether pops wait until the proxy has read more."""
        if self._crowded:
            return True
        return self._stream.unsent_bytes + self._popped_bytes >= UNSENT_POPS_BYTES_MAX

    # ------------------------------------------------------------ the rule

    def begin_pop(self, pop: PopPoll, wait_ms: int, turn: Turn) -> None:
        """Answer a new pop, or let it wait."""
        outcome = self.try_pop(pop)
        if outcome is PopOutcome.NO_ROOM and wait_ms <= 0:
            wait_ms = ROOM_WAIT_MS
        if outcome is not PopOutcome.ANSWERED:
            self._wait(pop, wait_ms, turn)

    def begin_notification(self, notification: NotificationPoll, wait_ms: int, turn: Turn) -> None:
        """Answer a new notification, or let it wait."""
        if not self.try_notify(notification):
            self._wait(notification, wait_ms, turn)

    def try_pop(self, pop: PopPoll) -> PopOutcome:
        """Pop; if that gives an answer, keep it until the round is committed."""
        if self._is_closed:
            return PopOutcome.ANSWERED  # No message may become invisible for a closed link.
        if self.is_full:
            self._crowded.setdefault((pop.group_id, pop.topic_id), set()).add(pop.request_id)
            self._is_crowded.set()
            return PopOutcome.NO_ROOM
        turn = self._rounds.turn
        try:
            batches = take(pop, turn)
        except ServiceError as error:
            self._replies().failures.append((pop.request_id, error))
            return PopOutcome.ANSWERED
        if not batches:
            return PopOutcome.NO_MESSAGE
        if pop.renews:
            turn.engine.commands.begin_handover(batches)
        replies, size = self._replies(), sum([batch.size_bytes for batch in batches])
        replies.of(POP).append((pop, batches))
        replies.pop_bytes += size
        self._popped_bytes += size
        return PopOutcome.ANSWERED

    def try_notify(self, notification: NotificationPoll) -> bool:
        """Count ready messages; return False if there are none, else keep the answer."""
        if self._is_closed:
            return True
        turn = self._rounds.turn
        try:
            ready = turn.engine.consumption.ready_count(
                GroupId(notification.group_id),
                TopicId(notification.topic_id),
                wanted=notification.wanted,
                now_ms=turn.now_ms,
                level_min=notification.level_min,
            )
        except ServiceError as error:
            self._replies().failures.append((notification.request_id, error))
            return True
        if ready.ready_count:
            self._replies().of(NOTIFICATION).append((notification, ready))
        return bool(ready.ready_count)

    def answer_empty(self, poll: PollArguments) -> None:
        """End a poll without a message: empty, or Overloaded if it waited for room."""
        replies = self._replies()
        if not isinstance(poll, PopPoll):
            replies.of(NOTIFICATION).append((poll, NOTHING_READY))
        elif poll.request_id in self._crowded.get((poll.group_id, poll.topic_id), ()):
            error = Overloaded("the proxy reads too slowly; poll again after a pause")
            replies.failures.append((poll.request_id, error))
        else:
            replies.of(POP).append((poll, []))

    def _wait(self, poll: PollArguments, wait_ms: int, turn: Turn) -> None:
        if wait_ms <= 0 or turn.is_draining:
            self.answer_empty(poll)
            return
        deadline_ms = -(-(turn.monotonic_ms + wait_ms) // EXPIRY_TICK_MS) * EXPIRY_TICK_MS
        try:
            turn.polls.park(self, poll, deadline_ms=deadline_ms)
        except ServiceError as error:
            self._replies().failures.append((poll.request_id, error))

    # ------------------------------------------------------------ room on the link

    async def offer_room(self) -> None:
        """Wake pops that wait for room whenever the proxy has read everything; never return."""
        while True:
            await self._is_crowded.wait()
            await self._rounds.settle()  # Until the popped messages are written.
            await self._stream.wait_drained()
            self._is_crowded.clear()
            self._rounds.put(_RoomOffer(self))

    def wake_crowded(self, turn: Turn) -> Iterator[None]:
        """Try the pops that wait for room again, the oldest first.

        If the first key fills the link again, its turn comes last next time.
        """
        crowded, self._crowded = self._crowded, {}
        yield from turn.polls.wake((), crowded)
        first = next(iter(crowded), None)
        if first in self._crowded:
            self._crowded[first] = self._crowded.pop(first)

    def note_written(self, frame_bytes: int, results: Sequence[Result]) -> None:
        """Note that a reply frame was written with these results of pops."""
        self._written_bytes += frame_bytes
        if results:
            self._unsent.append((self._written_bytes, results))
            self._forget_sent()

    def note_replies_written(self, replies: LinkReplies) -> None:
        """Note that all frames of a round were written."""
        self._popped_bytes -= replies.pop_bytes

    def _forget_sent(self) -> None:
        unsent, sent_bytes = self._unsent, self._written_bytes - self._stream.unsent_bytes
        while unsent and unsent[0][0] <= sent_bytes:
            unsent.popleft()

    # ------------------------------------------------------------ the end of the link

    def close(self) -> None:
        """Answer nothing more, and give unsent messages back.

        Whether the proxy has received the sent frames is unknown, so they stay invisible.
        """
        self._is_closed = True
        self._forget_sent()
        unsent = [result for _, results in self._unsent for result in results]
        self._unsent.clear()
        self.give_back(unsent)

    def give_back(self, results: Sequence[Result]) -> None:
        """Give popped messages back in the next round."""
        if results:
            self._rounds.put(GiveBackWork(results))


def take(pop: PopPoll, turn: Turn) -> list[DeliveryBatch]:
    """Pop messages from the engine."""
    return turn.engine.commands.pop(
        GroupId(pop.group_id),
        TopicId(pop.topic_id),
        max_messages=pop.max_messages,
        invisible_duration_ms=pop.invisible_duration_ms,
        wanted=pop.wanted,
        attempt_id=pop.attempt_id,
        client=pop.client,
        renews=pop.renews,
        now_ms=turn.now_ms,
        level_min=pop.level_min,
        priority_factor=pop.priority_factor,
        level_below=pop.level_below,
    )


@final
class GiveBackWork:
    """Work that makes popped messages visible again soon: their link closed before it sent them."""

    size_bytes = 0

    def __init__(self, popped: Sequence[Result]) -> None:
        self._popped = popped

    def apply(self, turn: Turn) -> Iterator[None]:
        """Give each message back; yield between pops."""
        for pop, batches in self._popped:
            give_back(pop, batches, turn)
            yield


def give_back(pop: PopPoll, batches: Iterable[DeliveryBatch], turn: Turn) -> None:
    """Give the messages of one pop back."""
    for batch in batches:
        for index in batch.indexes:
            delivery = Delivery(
                GroupId(pop.group_id),
                TopicId(pop.topic_id),
                batch.slot,
                batch.delivery_id,
                index,
                batch.visible_at_ms,
            )
            with contextlib.suppress(ServiceError):  # Acked or void in the meantime.
                turn.engine.commands.give_back(
                    delivery, invisible_duration_ms=GIVE_BACK_MS, now_ms=turn.now_ms
                )


@final
class _RoomOffer:
    """Work that wakes the pops of a link that has room again."""

    size_bytes = 0

    def __init__(self, pops: LinkPops) -> None:
        self._pops = pops

    def apply(self, turn: Turn) -> Iterator[None]:
        return self._pops.wake_crowded(turn)
