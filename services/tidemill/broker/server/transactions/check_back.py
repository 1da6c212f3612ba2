"""The checks of half messages, on their way from the broker through a proxy to a producer.

The engine has a line of due half messages for each topic. The lines take turns, so that a topic
without answers does not delay other topics. For each check, the broker tries the producers of the
topic in turn. The engine counts a check when it has left the buffer of a producer's stream. If a
producer does not read within a second, or has disconnected, the check does not count.

    topic without a producer                its line is emptied, until a proxy reports one
    all producers have enough checks        the line waits for an answer, at most 100 ms
    written                                 counted; the next check is one period later
    busy, gone or unreachable               back into the line; that producer is avoided for 1 s
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Final, final

import structlog

from tidemill.broker.engine.layout.numbers import HalfId, TopicId
from tidemill.broker.server.transactions.capacity import ProducerCapacity
from tidemill.common.errors import Overloaded, ServiceError
from tidemill.message import stored_message
from tidemill.message.transaction_id import TransactionSigner
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.http2.allowances import RateBucket

if TYPE_CHECKING:
    from tidemill.broker.engine.transaction.checks import DueCheck
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn
    from tidemill.broker.server.transactions.producers import Producers, ProducerStream

log = structlog.get_logger()

TAKEN_A_ROUND: Final = 64  # due checks; each is read from the log
TAKEN_BYTES_A_ROUND: Final = 1 << 20  # a larger message is taken alone
UNDERWAY_MAX: Final = 512  # checks on their way to producers
UNDERWAY_BYTES_MAX: Final = 32 << 20  # of their messages
ASK_TIMEOUT_MS: Final = 3_000  # a proxy gives the client a second to read
LOOK_AGAIN_S: Final = 0.1  # at lines without a free producer
TOPICS_A_TURN: Final = 256  # lines visited before other tasks run


@final
class CheckBack:
    """The checks of one broker."""

    def __init__(
        self, rounds: Rounds, producers: Producers, *, per_s: int, monotonic_ms: Callable[[], int]
    ) -> None:
        self._rounds = rounds
        self._producers = producers
        self._monotonic_ms = monotonic_ms
        self._allowance = RateBucket(burst=per_s, per_s=per_s, now_s=monotonic_ms() / 1000)
        self._capacity = ProducerCapacity()
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._underway: dict[HalfId, DueCheck] = {}
        self._underway_bytes = 0
        # For the next round: checks that were written, and those that no producer got.
        self._written: list[DueCheck] = []
        self._returned: list[DueCheck] = []
        self._is_round_queued = False
        # By topic id and result: written, busy, gone, no_producer.
        self.results: Counter[tuple[TopicId, str]] = Counter()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send the due checks until the block ends."""
        self._rounds.on_checks_due = self._wake.set
        self._producers.on_added = self._wake.set
        self._producers.on_removed = self._capacity.forget
        self._rounds.engine.transactions.answered = self._note_answer
        async with asyncio.TaskGroup() as tasks:
            loop = tasks.create_task(self._run(), name="check half messages")
            try:
                yield
            finally:
                loop.cancel()
                for task in self._tasks:
                    task.cancel()

    def _note_answer(self, half_id: HalfId) -> None:
        self._capacity.note_answer(half_id)
        if self._rounds.engine.half_checks.due:
            self._wake.set()

    def find_without_producer(self) -> set[TopicId]:
        """Return the topics with due checks and without a connected producer."""
        engine = self._rounds.engine
        return {
            topic_id
            for topic_id in engine.half_checks.unlisted
            if engine.catalog.topic_name(topic_id) not in self._producers
        }

    async def _run(self) -> None:
        await self._rounds.wait_until_master()
        while True:
            await self._wake.wait()
            self._wake.clear()
            if await self._has_work():
                self._queue_round()
                # The round wakes this task with new checks. After a pause the task visits lines
                # again that had no free producer.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_AGAIN_S):
                        await self._wake.wait()
                self._wake.set()

    async def _has_work(self) -> bool:
        """Look at all topics with due half messages; return whether a line has some.

        A line without a producer is emptied. A topic that has a producer again gets a line.
        """
        checks, catalog = self._rounds.engine.half_checks, self._rounds.engine.catalog
        has_line = False
        for number, topic_id in enumerate([*checks.due, *checks.unlisted], 1):
            if number % TOPICS_A_TURN == 0:
                await asyncio.sleep(0)
            if catalog.topic_name(topic_id) in self._producers:
                checks.list_again(topic_id)
                has_line = True
            elif count := checks.unlist(topic_id):
                self.results[topic_id, "no_producer"] += count
        if has_line and not checks.due:
            self._rounds.wake()  # The engine searches for them.
        return bool(checks.due) or bool(self._written or self._returned)

    # ------------------------------------------------------------ in a round

    def _queue_round(self) -> None:
        if not self._is_round_queued:
            self._is_round_queued = True
            self._rounds.put(_CheckRound(self))

    def apply(self, turn: Turn) -> Iterator[None]:
        """Record the results, and take due checks from the lines in turn."""
        self._is_round_queued = False
        checks = turn.engine.half_checks
        written, self._written = self._written, []
        returned, self._returned = self._returned, []
        for number, one in enumerate(written, 1):
            checks.note_written(one.half_id, turn.now_ms)
            if number % TAKEN_A_ROUND == 0:
                yield
        for one in returned:
            checks.give_back(one)
        yield
        self._capacity.expire(self._monotonic_ms())
        if self._take(turn):
            self._wake.set()

    def _take(self, turn: Turn) -> int:
        """Take due checks, one of each line in turn; return their number."""
        checks, taken, taken_bytes = turn.engine.half_checks, 0, 0
        waiting = deque(checks.due)
        while (
            waiting
            and taken < TAKEN_A_ROUND
            and taken_bytes < TAKEN_BYTES_A_ROUND
            and len(self._underway) < UNDERWAY_MAX
            and self._underway_bytes < UNDERWAY_BYTES_MAX
            and self._allowance.take(self._monotonic_ms() / 1000)
        ):
            topic_id = waiting.popleft()
            check = checks.take_check(topic_id, turn.now_ms)
            if check is None:
                continue
            if (line := checks.due.pop(topic_id, None)) is not None:
                checks.due[topic_id] = line  # Its next turn is after those of the others.
            if check.half_id in self._underway:
                continue
            taken, taken_bytes = taken + 1, taken_bytes + len(check.blob)
            if self._start(check):
                waiting.append(topic_id)
            else:
                self._returned.append(check)  # The other half messages of its line wait as well.
        return taken

    def _start(self, check: DueCheck) -> bool:
        """Send a check to the first producer that may get it; return False if none may."""
        topic = self._rounds.engine.catalog.topic_name(check.topic_id)
        now_ms = self._monotonic_ms()
        for producer in self._producers.in_turn(topic, check.client):
            if self._capacity.may_ask(producer, check.half_id, now_ms):
                break
        else:
            return False
        self._capacity.begin(producer)
        self._underway[check.half_id] = check
        self._underway_bytes += len(check.blob)
        task = asyncio.create_task(self._check(producer, topic, check), name="check")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    # ------------------------------------------------------------ one check

    async def _check(self, producer: ProducerStream, topic: str, check: DueCheck) -> None:
        """Send one check to a producer."""
        result = "gone"
        try:
            result = await self._ask(producer, topic, check)
        finally:
            now_ms = self._monotonic_ms()
            self._capacity.end(producer, reads=result == "written", now_ms=now_ms)
            del self._underway[check.half_id]
            self._underway_bytes -= len(check.blob)
            self.results[check.topic_id, result] += 1
            if result == "written":
                until_ms = now_ms + check.period_ms
                self._capacity.note_written(check.half_id, producer.client, until_ms)
                self._written.append(check)
            else:
                self._returned.append(check)
            self._queue_round()

    async def _ask(self, producer: ProducerStream, topic: str, check: DueCheck) -> str:
        """Ask one producer; return the result for the counter."""
        catalog = self._rounds.engine.catalog
        signer = TransactionSigner(catalog.handle_secret, catalog.broker_name)
        message_id = stored_message.message_id_of(check.blob)
        question = pb.ProxyQuestion(
            check=pb.CheckTransaction(
                half_id=check.half_id,
                topic=topic,
                queue_id=check.queue_id,
                blob=check.blob,
                stored_at_ms=check.stored_at_ms,
                client_id=producer.client.client_id,
                owner=producer.client.owner,
                transaction_id=signer.sign(check.half_id, topic, message_id),
            )
        )
        try:
            answer = await producer.proxy.ask(question, ASK_TIMEOUT_MS)
        except Overloaded:
            return "busy"
        except ServiceError as error:
            log.debug("check not sent", half_id=check.half_id, reason=error.message)
            return "gone"
        match answer.checked.result:
            case pb.CHECK_RESULT_WRITTEN:
                return "written"
            case pb.CHECK_RESULT_BUSY:
                return "busy"
            case _:
                return "gone"


@final
class _CheckRound:
    """Work that records the results of checks, and takes due ones."""

    size_bytes = 0

    def __init__(self, checks: CheckBack) -> None:
        self._checks = checks

    def apply(self, turn: Turn) -> Iterator[None]:
        yield from self._checks.apply(turn)
