"""Pops that found nothing and wait, parked by (group, topic).

A parked pop ends when a round in which messages arrive or become visible pops again for it, or in
which its topic or group goes and it is refused; when its link has room again for what is there, if
it waits for that; when its poll duration ends or the broker drains,
and it is answered empty; when its client cancels it, or its link closes.

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
PARKED_MAX = 100_000  # in all, about 60 MB; beyond either bound a pop is refused with Overloaded

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


class PopReceiver(Protocol):
    """Who gets the answer of a parked pop: a link."""

    @property
    def is_full(self) -> bool:
        """Whether it can take no answer for now, and will ask for its pops to be woken."""
        ...

    def pop_again(self, pop: Pop) -> bool:
        """Pop, and keep the answer until the round is committed; False: nothing was found."""
        ...

    def answer_empty(self, pop: Pop) -> None:
        """Keep an empty answer until the round is committed."""
        ...


class Parked:
    """One waiting pop."""

    __slots__ = ("deadline_ms", "is_gone", "pop", "receiver")

    def __init__(self, receiver: PopReceiver, pop: Pop, deadline_ms: int) -> None:
        self.receiver = receiver
        self.pop = pop
        self.deadline_ms = deadline_ms  # monotonic
        self.is_gone = False


class LongPolling:
    """All parked pops of this broker."""

    def __init__(self, *, parked_max: int = PARKED_MAX) -> None:
        self._parked_max = parked_max
        # In each queue the oldest comes first: dictionaries keep the order of insertion.
        self._queues: dict[Key, dict[int, Parked]] = {}
        self._keys_of_topic: dict[int, set[Key]] = {}
        self._of_receiver: dict[PopReceiver, dict[int, Parked]] = {}
        # Entries of pops that are gone stay until they surface or outnumber the others.
        self._deadlines: list[tuple[int, int, Parked]] = []
        self._sequence = itertools.count()
        self.count = 0

    def park(self, receiver: PopReceiver, pop: Pop, *, deadline_ms: int) -> None:
        """Keep `pop` until something is there for it, at most to `deadline_ms` (monotonic).

        Raises Overloaded where too many wait, and BadRequest for a request id that waits already.
        """
        if pop.request_id in self._of_receiver.get(receiver, {}):
            raise BadRequest(f"a pop with the request id {pop.request_id} is waiting already")
        key = (pop.group_id, pop.topic_id)
        queue = self._queues.get(key, {})
        if self.count >= self._parked_max or len(queue) >= PARKED_PER_KEY_MAX:
            raise Overloaded("too many consumers are waiting for messages here; try again later")
        parked = Parked(receiver, pop._replace(is_parked=True), deadline_ms)
        self._queues.setdefault(key, {})[id(parked)] = parked
        self._keys_of_topic.setdefault(pop.topic_id, set()).add(key)
        self._of_receiver.setdefault(receiver, {})[pop.request_id] = parked
        heapq.heappush(self._deadlines, (deadline_ms, next(self._sequence), parked))
        self.count += 1

    def cancel(self, receiver: PopReceiver, request_id: int) -> None:
        """Forget a pop whose client is gone; one that is answered already is not here."""
        parked = self._of_receiver.get(receiver, {}).get(request_id)
        if parked is not None:
            self._remove(parked)

    def forget(self, receiver: PopReceiver) -> None:
        """Forget all pops of a link that closed."""
        for parked in list(self._of_receiver.get(receiver, {}).values()):
            self._remove(parked)

    def wake(self, topic_ids: Iterable[int], keys: Iterable[Key]) -> Iterator[None]:
        """Pop again for those who wait at `topic_ids` and `keys`, the oldest first.

        Yields after each pop, so that the caller can give way.
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
                parked.receiver.answer_empty(parked.pop)

    def release(self) -> None:
        """Answer everybody empty: the broker is about to stop."""
        for queue in list(self._queues.values()):
            for parked in list(queue.values()):
                self._remove(parked)
                parked.receiver.answer_empty(parked.pop)

    def find_next_deadline_ms(self) -> int | None:
        """Return when `expire` has something to do next, monotonic."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][2].is_gone:
            heapq.heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def keys_of_group(self, group_id: int) -> list[Key]:
        """Return where pops of a group wait; walks all keys, for rare use."""
        return [key for key in self._queues if key[0] == group_id]

    def _wake_key(self, key: Key) -> Iterator[None]:
        for parked in list(self._queues.get(key, {}).values()):
            # The caller may have given way, and a link closed meanwhile.
            if parked.is_gone:
                continue
            if parked.receiver.pop_again(parked.pop):
                self._remove(parked)
            elif not parked.pop.tags and not parked.receiver.is_full:
                # What one unfiltered pop does not find, no other finds either.
                return
            yield

    def _remove(self, parked: Parked) -> None:
        parked.is_gone = True
        self.count -= 1
        pop = parked.pop
        key = (pop.group_id, pop.topic_id)
        queue = self._queues[key]
        del queue[id(parked)]
        if not queue:
            del self._queues[key]
            keys = self._keys_of_topic[pop.topic_id]
            keys.discard(key)
            if not keys:
                del self._keys_of_topic[pop.topic_id]
        mine = self._of_receiver[parked.receiver]
        del mine[pop.request_id]
        if not mine:
            del self._of_receiver[parked.receiver]
        if len(self._deadlines) > 64 and len(self._deadlines) > 2 * self.count:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].is_gone]
            heapq.heapify(self._deadlines)
