"""Pops and notifications that found nothing and wait, parked by (group, topic).

A parked pop ends when a round in which messages arrive or become visible pops again for it, or in
which its topic or group goes and it is refused; when its link has room again for what is there, if
it waits for that; when its poll duration ends or the broker drains,
and it is answered empty; when its client cancels it, or its link closes. A notification ends in the
same ways, told of what the pops of its key have left: who is told too much pops once in vain, who
is told too little waits.

Owned by the round loop. Nothing here survives a restart: a client whose poll breaks off polls
again.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from tidemill.common.errors import BadRequest, Overloaded

PARKED_PER_KEY_MAX = 1024  # of one group on one topic: more consumers than that share no topic
PARKED_MAX = 100_000  # in all, about 60 MB; beyond either bound one more is refused with Overloaded

Key = tuple[int, int]  # group id, topic id


class Pop(NamedTuple):
    """The arguments of a pop, kept to run it again."""

    request_id: int
    group_id: int
    topic_id: int
    max_messages: int
    invisible_duration_ms: int
    tags: frozenset[str]
    attempt_id: str
    client_id: str = ""
    renews: bool = False
    arrived_s: float = 0.0  # time.monotonic()
    is_parked: bool = False


class Notification(NamedTuple):
    """The arguments of a notification, kept to look again."""

    request_id: int
    group_id: int
    topic_id: int
    tags: frozenset[str]
    arrived_s: float = 0.0  # time.monotonic()
    is_parked: bool = False


class PopReceiver(Protocol):
    """Who gets the answer of what is parked: a link."""

    @property
    def is_full(self) -> bool:
        """Whether it can take no answer for now, and will ask for its pops to be woken."""
        ...

    def pop_again(self, pop: Pop) -> bool:
        """Pop, and keep the answer until the round is committed; False: nothing was found."""
        ...

    def notify(self, notification: Notification) -> bool:
        """Look, and keep the answer until the round is committed; False: nothing is ready."""
        ...

    def answer_empty(self, request: Pop | Notification) -> None:
        """Keep an empty answer until the round is committed."""
        ...


class Parked:
    """One waiting pop or notification."""

    __slots__ = ("deadline_ms", "is_gone", "receiver", "request")

    def __init__(
        self, receiver: PopReceiver, request: Pop | Notification, deadline_ms: int
    ) -> None:
        self.receiver = receiver
        self.request = request
        self.deadline_ms = deadline_ms  # monotonic
        self.is_gone = False


class Waiting:
    """Who waits at one key. Of each kind the oldest comes first: dictionaries keep that order."""

    __slots__ = ("notifications", "pops")

    def __init__(self) -> None:
        self.pops: dict[int, Parked] = {}
        self.notifications: dict[int, Parked] = {}

    def of(self, request: Pop | Notification) -> dict[int, Parked]:
        """Return those of the kind of `request`."""
        return self.pops if isinstance(request, Pop) else self.notifications


class LongPolling:
    """All that is parked at this broker."""

    def __init__(self, *, parked_max: int = PARKED_MAX) -> None:
        self._parked_max = parked_max
        self._waiting: dict[Key, Waiting] = {}
        self._keys_of_topic: dict[int, set[Key]] = {}
        self._of_receiver: dict[PopReceiver, dict[int, Parked]] = {}
        # Entries of requests that are gone stay until they surface or outnumber the others.
        self._deadlines: list[tuple[int, int, Parked]] = []
        self._sequence = itertools.count()
        self.count = 0

    def park(self, receiver: PopReceiver, request: Pop | Notification, *, deadline_ms: int) -> None:
        """Keep `request` until something is there for it, at most to `deadline_ms` (monotonic).

        Raises Overloaded where too many wait, and BadRequest for a request id that waits already.
        """
        request_id = request.request_id
        if request_id in self._of_receiver.get(receiver, {}):
            raise BadRequest(f"the request id {request_id} is waiting already")
        key = (request.group_id, request.topic_id)
        waiting = self._waiting.get(key)
        queued = 0 if waiting is None else len(waiting.of(request))
        if self.count >= self._parked_max or queued >= PARKED_PER_KEY_MAX:
            raise Overloaded("too many consumers are waiting for messages here; try again later")
        if waiting is None:
            waiting = self._waiting[key] = Waiting()
            self._keys_of_topic.setdefault(request.topic_id, set()).add(key)
        parked = Parked(receiver, request._replace(is_parked=True), deadline_ms)
        waiting.of(request)[id(parked)] = parked
        self._of_receiver.setdefault(receiver, {})[request_id] = parked
        heapq.heappush(self._deadlines, (deadline_ms, next(self._sequence), parked))
        self.count += 1

    def cancel(self, receiver: PopReceiver, request_id: int) -> None:
        """Forget what nobody waits for any more; what is answered already is not here."""
        parked = self._of_receiver.get(receiver, {}).get(request_id)
        if parked is not None:
            self._remove(parked)

    def forget(self, receiver: PopReceiver) -> None:
        """Forget all that waits for a link that closed."""
        for parked in list(self._of_receiver.get(receiver, {}).values()):
            self._remove(parked)

    def wake(self, topic_ids: Iterable[int], keys: Iterable[Key]) -> Iterator[None]:
        """Pop and look again for those who wait at `topic_ids` and `keys`, the oldest first.

        Yields after each, so that the caller can give way.
        """
        woken = dict.fromkeys(keys)
        for topic_id in topic_ids:
            woken.update(dict.fromkeys(self._keys_of_topic.get(topic_id, ())))
        for key in woken:
            yield from self._wake_key(key)

    def expire(self, now_ms: int) -> None:
        """Answer empty those whose poll duration has ended."""
        deadlines = self._deadlines
        while deadlines and (deadlines[0][2].is_gone or deadlines[0][0] <= now_ms):
            _, _, parked = heapq.heappop(deadlines)
            if not parked.is_gone:
                self._remove(parked)
                parked.receiver.answer_empty(parked.request)

    def release(self) -> None:
        """Answer everybody empty: the broker is about to stop."""
        for waiting in list(self._waiting.values()):
            for parked in [*waiting.pops.values(), *waiting.notifications.values()]:
                self._remove(parked)
                parked.receiver.answer_empty(parked.request)

    def find_next_deadline_ms(self) -> int | None:
        """Return when `expire` has something to do next, monotonic."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][2].is_gone:
            heapq.heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def keys_of_group(self, group_id: int) -> list[Key]:
        """Return where those of a group wait; walks all keys, for rare use."""
        return [key for key in self._waiting if key[0] == group_id]

    def _wake_key(self, key: Key) -> Iterator[None]:
        waiting = self._waiting.get(key)
        if waiting is None:
            return
        yield from self._wake_pops(waiting)
        for parked in list(waiting.notifications.values()):
            if parked.is_gone:
                continue
            assert isinstance(parked.request, Notification), "each kind has its own queue"
            if parked.receiver.notify(parked.request):
                self._remove(parked)
            yield

    def _wake_pops(self, waiting: Waiting) -> Iterator[None]:
        for parked in list(waiting.pops.values()):
            # The caller may have given way, and a link closed meanwhile.
            if parked.is_gone:
                continue
            assert isinstance(parked.request, Pop), "each kind has its own queue"
            if parked.receiver.pop_again(parked.request):
                self._remove(parked)
            elif not parked.request.tags and not parked.receiver.is_full:
                # What one unfiltered pop does not find, no other finds either.
                return
            yield

    def _remove(self, parked: Parked) -> None:
        parked.is_gone = True
        self.count -= 1
        request = parked.request
        key = (request.group_id, request.topic_id)
        waiting = self._waiting[key]
        del waiting.of(request)[id(parked)]
        if not waiting.pops and not waiting.notifications:
            del self._waiting[key]
            keys = self._keys_of_topic[request.topic_id]
            keys.discard(key)
            if not keys:
                del self._keys_of_topic[request.topic_id]
        mine = self._of_receiver[parked.receiver]
        del mine[request.request_id]
        if not mine:
            del self._of_receiver[parked.receiver]
        if len(self._deadlines) > 64 and len(self._deadlines) > 2 * self.count:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].is_gone]
            heapq.heapify(self._deadlines)
