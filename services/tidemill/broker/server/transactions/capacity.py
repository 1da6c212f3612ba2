"""The checks that producers have got and not answered, and the producers that do not read."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final, NamedTuple, final

from tidemill.broker.engine.layout.numbers import HalfId
from tidemill.broker.server.transactions.producers import ProducerStream
from tidemill.message.client_key import ClientKey

UNANSWERED_MAX: Final = 32  # checks of one client without an answer
UNDERWAY_OF_A_PRODUCER_MAX: Final = 4  # checks that wait until the producer reads
AVOIDED_MS: Final = 1_000  # a producer that did not read its stream


class _WrittenCheck(NamedTuple):
    until_ms: int
    half_id: HalfId
    client: ClientKey


@final
class ProducerCapacity:
    """Which producers may get another check."""

    def __init__(self) -> None:
        self._underway: Counter[ProducerStream] = Counter()
        self._avoided_until_ms: dict[ProducerStream, int] = {}
        # Checks without an answer: the client of each, and their number of each client.
        self._asked: dict[HalfId, ClientKey] = {}
        self._unanswered: Counter[ClientKey] = Counter()
        self._written: deque[_WrittenCheck] = deque()  # by the time until which they count, about

    def may_ask(self, producer: ProducerStream, half_id: HalfId, now_ms: int) -> bool:
        """Whether a producer may get the check of a half message now."""
        if self._avoided_until_ms.get(producer, 0) > now_ms:
            return False
        if self._underway[producer] >= UNDERWAY_OF_A_PRODUCER_MAX:
            return False
        is_repeated = self._asked.get(half_id) == producer.client
        waiting = self._unanswered[producer.client] + self._underway[producer]
        return is_repeated or waiting < UNANSWERED_MAX

    def begin(self, producer: ProducerStream) -> None:
        """Count a check on its way to a producer."""
        self._underway[producer] += 1

    def end(self, producer: ProducerStream, *, reads: bool, now_ms: int) -> None:
        """End a check on its way. A producer that does not read is avoided for a second."""
        _count_down(self._underway, producer)
        if reads:
            self._avoided_until_ms.pop(producer, None)
        else:
            self._avoided_until_ms[producer] = now_ms + AVOIDED_MS

    def note_written(self, half_id: HalfId, client: ClientKey, until_ms: int) -> None:
        """Count a written check until it is answered, or until its next check is due."""
        self.note_answer(half_id)
        self._asked[half_id] = client
        self._unanswered[client] += 1
        self._written.append(_WrittenCheck(until_ms, half_id, client))

    def note_answer(self, half_id: HalfId) -> None:
        """Forget a check: a client has decided, or said that it cannot yet."""
        client = self._asked.pop(half_id, None)
        if client is not None:
            _count_down(self._unanswered, client)

    def forget(self, producer: ProducerStream) -> None:
        """Forget a producer that has left its proxy."""
        self._avoided_until_ms.pop(producer, None)

    def expire(self, now_ms: int) -> None:
        """Forget the checks whose time for an answer is over."""
        while self._written and self._written[0].until_ms <= now_ms:
            old = self._written.popleft()
            if self._asked.get(old.half_id) == old.client:
                self.note_answer(old.half_id)


def _count_down(counts: Counter, key: object) -> None:  # type: ignore[type-arg]  # of any key
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
