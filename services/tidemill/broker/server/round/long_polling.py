"""Polls that found nothing and wait, parked by consumer group and topic.

A poll asks for messages (pop) or for the number of ready messages (notification). A parked poll
ends in one of these ways:

- A round makes a message available, and the poll is answered.
- A round deletes the topic or the consumer group, and the poll fails.
- The link has room again for a pop that waited for room, and the pop is tried again.
- The poll duration ends or the broker drains, and the poll is answered empty.
- The client cancels the poll, or the link of the poll closes.

A round tries the pops of a key before its notifications, so a notification counts the remaining
messages. A count that is too high costs one empty pop; one that is too low lets a consumer wait.

The round loop owns this state. A restart forgets all polls, and their clients poll again.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from typing import NamedTuple, Protocol, TypeAlias

from tidemill.broker.engine.message_filter import EVERY_MESSAGE, MessageFilter
from tidemill.broker.server.round.polled_filters import PolledFilters
from tidemill.common.errors import BadRequest, Overloaded
from tidemill.common.reserves import has_little, unreserved
from tidemill.message.client_key import UNKNOWN_CLIENT, ClientKey

PARKED_PER_KEY_MAX = 1024  # of one group on one topic: more consumers than any group has
# Of the broker, about 60 MB. The last part is reserved for groups with few. Beyond either limit a
# poll gets Overloaded.
PARKED_MAX = 100_000
STALE_DEADLINES_MIN = 64  # below it, ended polls are not removed from the heap of deadlines

Key = tuple[int, int]  # group id, topic id


class PopPoll(NamedTuple):
    """The arguments of a pop, stored to try it again."""

    request_id: int
    group_id: int
    topic_id: int
    max_messages: int
    invisible_duration_ms: int
    wanted: MessageFilter
    attempt_id: str
    client: ClientKey = UNKNOWN_CLIENT
    renews: bool = False
    wants_remaining: bool = False  # the levels that are left of a PRIORITY topic
    level_min: int = 0  # of a PRIORITY topic
    priority_factor: int | None = None  # None: that of the consumer group
    level_below: int = 0  # of a PRIORITY topic; 0: no bound
    arrived_s: float = 0.0  # time.monotonic()
    is_parked: bool = False


class NotificationPoll(NamedTuple):
    """The arguments of a notification, stored to try it again."""

    request_id: int
    group_id: int
    topic_id: int
    wanted: MessageFilter
    level_min: int = 0  # of a PRIORITY topic
    arrived_s: float = 0.0  # time.monotonic()
    is_parked: bool = False


PollArguments: TypeAlias = PopPoll | NotificationPoll


class PopOutcome(Enum):
    """The result of one try of a pop."""

    ANSWERED = auto()  # with messages or an error; or its link is closed and needs no answer
    NO_MESSAGE = auto()
    NO_ROOM = auto()  # on the link, which wakes the pop when it has room


class PollReceiver(Protocol):
    """The receiver of the answers of parked polls, such as a link."""

    def try_pop(self, pop: PopPoll) -> PopOutcome:
        """Pop; if that gives an answer, keep it until the round is committed."""
        ...

    def try_notify(self, notification: NotificationPoll) -> bool:
        """Count ready messages; return False if there are none, else keep the answer."""
        ...

    def answer_empty(self, poll: PollArguments) -> None:
        """Keep an empty answer until the round is committed."""
        ...


class ParkedPoll:
    """One parked poll."""

    __slots__ = ("arguments", "deadline_ms", "is_ended", "receiver")

    def __init__(self, receiver: PollReceiver, arguments: PollArguments, deadline_ms: int) -> None:
        self.receiver = receiver
        self.arguments = arguments
        self.deadline_ms = deadline_ms  # monotonic
        self.is_ended = False


class KeyPolls:
    """The parked polls of one key, the oldest first: dictionaries keep their order."""

    __slots__ = ("notifications", "pops")

    def __init__(self) -> None:
        self.pops: dict[int, ParkedPoll] = {}
        self.notifications: dict[int, ParkedPoll] = {}

    def of_kind(self, arguments: PollArguments) -> dict[int, ParkedPoll]:
        """Return the parked polls of the same kind as `arguments`."""
        return self.pops if isinstance(arguments, PopPoll) else self.notifications


class LongPolling:
    """All parked polls of this broker."""

    def __init__(self, *, parked_max: int = PARKED_MAX) -> None:
        self._parked_max = parked_max
        self._of_key: dict[Key, KeyPolls] = {}
        self._keys_of_topic: dict[int, set[Key]] = {}
        self._count_of_group: Counter[int] = Counter()
        self._of_receiver: dict[PollReceiver, dict[int, ParkedPoll]] = {}
        # An ended poll stays here until it surfaces or the ended ones outnumber the others.
        self._deadlines: list[tuple[int, int, ParkedPoll]] = []
        self._sequence = itertools.count()
        self.count = 0
        self.filters = PolledFilters()  # of all pops, parked or not

    def park(self, receiver: PollReceiver, arguments: PollArguments, *, deadline_ms: int) -> None:
        """Park a poll until it can be answered, at most until `deadline_ms` (monotonic).

        Raises Overloaded if too many polls are parked, and BadRequest if the request id is in use.
        """
        request_id = arguments.request_id
        if request_id in self._of_receiver.get(receiver, {}):
            raise BadRequest(f"a poll with request id {request_id} already waits on this link")
        key = (arguments.group_id, arguments.topic_id)
        polls = self._of_key.get(key)
        parked_count = 0 if polls is None else len(polls.of_kind(arguments))
        of_group = self._count_of_group[arguments.group_id]
        has_little_parked = has_little(of_group, self._parked_max)
        room = self._parked_max if has_little_parked else unreserved(self._parked_max)
        if self.count >= room or parked_count >= PARKED_PER_KEY_MAX:
            raise Overloaded(
                f"{self.count} polls wait at this broker, {of_group} of them of this consumer group"
                f" and {parked_count} for this topic; the limits are {self._parked_max} (parked_max"
                f"), with the last eighth for groups with few, and {PARKED_PER_KEY_MAX} per group"
                f" and topic; try again later"
            )
        if polls is None:
            polls = self._of_key[key] = KeyPolls()
            self._keys_of_topic.setdefault(arguments.topic_id, set()).add(key)
        parked = ParkedPoll(receiver, arguments._replace(is_parked=True), deadline_ms)
        polls.of_kind(arguments)[id(parked)] = parked
        self._of_receiver.setdefault(receiver, {})[request_id] = parked
        heapq.heappush(self._deadlines, (deadline_ms, next(self._sequence), parked))
        self.count += 1
        self._count_of_group[arguments.group_id] += 1

    def cancel(self, receiver: PollReceiver, request_id: int) -> None:
        """Remove a poll that its client has cancelled; ignore a poll that was answered."""
        parked = self._of_receiver.get(receiver, {}).get(request_id)
        if parked is not None:
            self._remove(parked)

    def forget(self, receiver: PollReceiver) -> None:
        """Remove all polls of a link that closed."""
        for parked in list(self._of_receiver.get(receiver, {}).values()):
            self._remove(parked)

    def wake(self, topic_ids: Iterable[int], keys: Iterable[Key]) -> Iterator[None]:
        """Try the polls of `topic_ids` and `keys` again, the oldest first; yield after each."""
        woken = dict.fromkeys(keys)
        for topic_id in topic_ids:
            woken.update(dict.fromkeys(self._keys_of_topic.get(topic_id, ())))
        for key in woken:
            yield from self._wake_key(key)

    def expire(self, now_ms: int) -> None:
        """Answer polls empty if their poll duration has ended."""
        deadlines = self._deadlines
        while deadlines and (deadlines[0][2].is_ended or deadlines[0][0] <= now_ms):
            _, _, parked = heapq.heappop(deadlines)
            if not parked.is_ended:
                self._remove(parked)
                parked.receiver.answer_empty(parked.arguments)

    def release(self) -> None:
        """Answer all polls empty: the broker is about to stop."""
        for polls in list(self._of_key.values()):
            for parked in [*polls.pops.values(), *polls.notifications.values()]:
                self._remove(parked)
                parked.receiver.answer_empty(parked.arguments)

    def find_next_deadline_ms(self) -> int | None:
        """Return the earliest deadline, monotonic; None without parked polls."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][2].is_ended:
            heapq.heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def keys_of_group(self, group_id: int) -> list[Key]:
        """Return the keys of a consumer group with parked polls; walks all keys, for rare use."""
        return [key for key in self._of_key if key[0] == group_id]

    def _wake_key(self, key: Key) -> Iterator[None]:
        polls = self._of_key.get(key)
        if polls is None:
            return
        yield from self._wake_pops(polls)
        for parked in list(polls.notifications.values()):
            if parked.is_ended:
                continue
            assert isinstance(parked.arguments, NotificationPoll), "each kind has its own queue"
            if parked.receiver.try_notify(parked.arguments):
                self._remove(parked)
            yield

    def _wake_pops(self, polls: KeyPolls) -> Iterator[None]:
        for parked in list(polls.pops.values()):
            # A link may have closed while this generator was suspended.
            if parked.is_ended:
                continue
            assert isinstance(parked.arguments, PopPoll), "each kind has its own queue"
            outcome = parked.receiver.try_pop(parked.arguments)
            if outcome is PopOutcome.ANSWERED:
                self._remove(parked)
            elif outcome is PopOutcome.NO_MESSAGE and parked.arguments.wanted is EVERY_MESSAGE:
                # If a pop without a filter finds nothing, no other pop of this key does.
                return
            yield

    def _remove(self, parked: ParkedPoll) -> None:
        parked.is_ended = True
        self.count -= 1
        arguments = parked.arguments
        key = (arguments.group_id, arguments.topic_id)
        self._count_of_group[arguments.group_id] -= 1
        polls = self._of_key[key]
        del polls.of_kind(arguments)[id(parked)]
        if not polls.pops and not polls.notifications:
            del self._of_key[key]
            if not self._count_of_group[arguments.group_id]:
                del self._count_of_group[arguments.group_id]
            keys = self._keys_of_topic[arguments.topic_id]
            keys.discard(key)
            if not keys:
                del self._keys_of_topic[arguments.topic_id]
        of_receiver = self._of_receiver[parked.receiver]
        del of_receiver[arguments.request_id]
        if not of_receiver:
            del self._of_receiver[parked.receiver]
        if len(self._deadlines) > STALE_DEADLINES_MIN and len(self._deadlines) > 2 * self.count:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].is_ended]
            heapq.heapify(self._deadlines)
