"""One task of the sink: rows in order, sends in flight, retries, a rate limit, and bad rows.

Messages of one message group are sent in order of rows: the next one waits for the reply to the
previous one. A send with an unknown outcome is repeated, so a message may be stored twice.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import grpc

from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill_pipeline.client import ClusterClient, error_text
from tidemill_pipeline.errors import ClusterRejection, NoAnswer
from tidemill_pipeline.options import SinkOptions
from tidemill_pipeline.pace import Pace
from tidemill_pipeline.sink.messages import BadRow, RowIds, message_of
from tidemill_pipeline.sink.target_topics import TargetTopics

_TROUBLE: Final = 50_000  # Codes from here on are server errors, which may be temporary.
BATCH_BYTES: Final = 1 << 20  # of bodies per send; a larger message is sent alone
# The columns that identify a row in an error, and the longest shown value.
_NAMING: Final = ("message_id", "keys", "message_group", "tag", "topic")
_SHOWN_CHARS: Final = 100


@final
@dataclass(slots=True)
class SendResult:
    """Result of a task."""

    rows: int = 0
    # Row number in the rows of one call of `send`, and the reason.
    bad: list[tuple[int, str]] = field(default_factory=list)


@final
@dataclass(slots=True)
class _PendingSend:
    """A send in flight: rows of one topic."""

    numbers: list[int]
    messages: list[v2.Message]
    call: Any
    attempt: int = 1


@final
class Sender:
    """Sender of the rows of one task."""

    def __init__(
        self,
        client: ClusterClient,
        options: SinkOptions,
        *,
        max_retries: int,
        ids: RowIds,
        now_ms: Callable[[], int],
        sleep_s: Callable[[float], None] = time.sleep,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._options, self._max_retries = client, options, max_retries
        self._ids = ids
        self._now_ms = now_ms
        self._flights: deque[_PendingSend] = deque()
        # The driver has checked the topic of the options.
        self._topics = None if options.topic else TargetTopics(client, options)
        self._rows: Sequence[Mapping[str, Any]] = ()
        self._first = 0
        self._pace = Pace(options.rate_max, sleep_s=sleep_s, monotonic_s=monotonic_s)
        self.sent = SendResult()

    def send(self, rows: Iterable[Mapping[str, Any]], *, first: int = 0) -> SendResult:
        """Send all rows, and return when each has a reply.

        `first` is the number of the first row in its task.
        """
        self._rows, self._first = list(rows), first
        if self._topics is not None:
            self._topics.look_up({row["topic"] for row in self._rows if row.get("topic")})
        for numbers, messages in self._batches():
            in_flight = sum(len(each.messages) for each in self._flights)
            self._pace.keep(self.sent.rows + in_flight + len(messages))
            while len(self._flights) >= self._options.inflight_max or self._group_is_in_flight(
                messages
            ):
                self._finish_oldest()
            self._start_send(numbers, messages)
        while self._flights:
            self._finish_oldest()
        return self.sent

    def _batches(self) -> Iterator[tuple[list[int], list[v2.Message]]]:
        """Yield the batches of sends: consecutive rows of one topic and kind."""
        numbers: list[int] = []
        messages: list[v2.Message] = []
        size = 0
        # With a rate limit, a send has at most the rows of one second. More would be a burst.
        rate_max = self._options.rate_max
        rows_max = self._options.batch_size
        if rate_max is not None:
            rows_max = max(1, min(rows_max, int(rate_max)))
        for number, row in enumerate(self._rows):
            try:
                if self._topics is not None:
                    self._topics.check(row.get("topic"))
                message = message_of(
                    row, self._options, self._client.topic, now_ms=self._now_ms(), ids=self._ids
                )
            except BadRow as error:
                self._reject(number, str(error))
                continue
            if messages and (
                len(messages) >= rows_max
                or size + len(message.body) > BATCH_BYTES
                or not _belong_together(messages[0], message)
            ):
                yield numbers, messages
                numbers, messages, size = [], [], 0
            numbers.append(number)
            messages.append(message)
            size += len(message.body)
        if messages:
            yield numbers, messages

    def _group_is_in_flight(self, messages: list[v2.Message]) -> bool:
        group = messages[0].system_properties.message_group
        return bool(group) and any(
            flight.messages[0].system_properties.message_group == group for flight in self._flights
        )

    def _start_send(self, numbers: list[int], messages: list[v2.Message]) -> None:
        call = self._client.start_send(messages, timeout_ms=self._options.send_timeout_ms)
        self._flights.append(_PendingSend(numbers, messages, call))

    def _finish_oldest(self) -> None:
        """Wait for the oldest send. Repeat it after a temporary error."""
        flight = self._flights.popleft()
        while True:
            try:
                answer = flight.call.result()
            except grpc.RpcError as error:
                if not self._client.is_retryable(error):
                    raise ClusterRejection(
                        f"{self._named(flight.numbers)} cannot be sent: {error_text(error)}"
                    ) from error
                self._resend(flight, error_text(error))
                continue
            why = self._settle(flight, answer)
            if why is None:
                return
            self._resend(flight, why)

    def _settle(self, flight: _PendingSend, answer: Any) -> str | None:
        """Process a reply. Return the reason to repeat the remaining rows; None: no rows remain."""
        entries = answer.entries or []
        # One bad message fails the whole send. Each entry then has the status of the bad message.
        is_whole = all(entry.status.code == answer.status.code for entry in entries)
        if is_whole and len(flight.messages) > 1 and _is_refusal(answer.status):
            self._split(flight)
            return None
        remaining: list[int] = []
        why = ""
        for i in range(len(flight.messages)):
            status = entries[i].status if i < len(entries) else answer.status
            if status.code == v2.OK:
                self.sent.rows += 1
            elif _is_refusal(status):
                self._reject(flight.numbers[i], f"{v2.Code.Name(status.code)}: {status.message}")
            else:
                remaining.append(i)
                why = status.message
        if not remaining:
            return None
        flight.numbers = [flight.numbers[i] for i in remaining]
        flight.messages = [flight.messages[i] for i in remaining]
        return why

    def _split(self, flight: _PendingSend) -> None:
        """Send the rows of a rejected send in two halves, to find its bad message.

        No row was stored. To isolate one bad message of 32 takes ten sends.
        """
        middle = len(flight.messages) // 2
        halves = []
        for part in (slice(middle), slice(middle, None)):
            messages = flight.messages[part]
            call = self._client.start_send(messages, timeout_ms=self._options.send_timeout_ms)
            halves.append(_PendingSend(flight.numbers[part], messages, call))
        self._flights.extendleft(reversed(halves))

    def _resend(self, flight: _PendingSend, why: str) -> None:
        if flight.attempt > self._max_retries:
            raise NoAnswer(
                f"a send failed {flight.attempt} times: {why}; {self._named(flight.numbers)} may"
                " not be stored"
            )
        self._client.pause(flight.attempt)
        flight.attempt += 1
        flight.call = self._client.start_send(
            flight.messages, timeout_ms=self._options.send_timeout_ms
        )

    def _reject(self, number: int, why: str) -> None:
        if not self._options.dead_letter_path:
            raise ClusterRejection(f"{self._named([number])} cannot be sent: {why}; {_remedy(why)}")
        self.sent.bad.append((number, why))

    def _named(self, numbers: Sequence[int]) -> str:
        """Return the position of rows, and of one row the columns that identify it."""
        first, last = self._first + numbers[0], self._first + numbers[-1]
        if len(numbers) > 1:
            return f"rows {first} to {last} of partition {self._ids.partition}"
        row = self._rows[numbers[0]]
        found = ", ".join(f"{name} {_shown(row[name])}" for name in _NAMING if row.get(name))
        return f"row {first} of partition {self._ids.partition}{f' ({found})' if found else ''}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _remedy(why: str) -> str:
    if why.startswith(v2.Code.Name(v2.TOPIC_NOT_FOUND)):
        return "create the topic with `tidemill topic create`"  # All rows would fail.
    return "onError=dead-letter with a deadLetterPath collects such rows"


def _is_refusal(status: v2.Status) -> bool:
    """Return whether a status is permanent, so that a retry does not help."""
    return bool(
        status.code != v2.OK and status.code < _TROUBLE and status.code != v2.TOO_MANY_REQUESTS
    )


def _belong_together(first: v2.Message, other: v2.Message) -> bool:
    a, b = first.system_properties, other.system_properties
    return (
        first.topic.name == other.topic.name
        and a.message_type == b.message_type
        # Send FIFO messages one by one. Otherwise a repeated message could follow later ones.
        and not b.message_group
    )
