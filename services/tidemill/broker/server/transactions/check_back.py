"""The checks of half messages, on their way from the broker through a proxy to a producer.

The engine names the half messages that are due. For each, the producers of its topic are tried in
turn. The engine counts a check when it has left the buffer of a producer's stream. If a producer
does not read within a second, or has disconnected, the check does not count. Without any producer,
the half message waits until a proxy reports one.

    due        no producer of the topic                   parked until a producer appears
    due        all producers have too many checks         due again after 100 ms
    trying     written                                    counted, next check one period later
    trying     busy, gone or unreachable, for all         due again after one second
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Final, final

import structlog

from tidemill.broker.engine.layout.numbers import HalfId, TopicId
from tidemill.common.errors import ServiceError
from tidemill.message import stored_message
from tidemill.message.transaction_id import TransactionSigner
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.http2.allowances import RateBucket

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.transaction.checks import DueCheck
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn
    from tidemill.broker.server.transactions.producers import Producers, ProducerStream
    from tidemill.message.client_key import ClientKey

log = structlog.get_logger()

UNANSWERED_MAX: Final = 32  # checks of one client without a decision
TAKEN_A_ROUND: Final = 64  # due checks; each is read from the log
UNDERWAY_MAX: Final = 1_024  # checks that wait for a proxy
ASK_TIMEOUT_MS: Final = 3_000  # the proxy waits a second for the client
LIMITED_RETRY_MS: Final = 100
FAILED_RETRY_MS: Final = 1_000
PARKED_KEPT: Final = 65_536  # entries of ended half messages, before the parked ones are looked at


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
        self._per_s = per_s
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._underway: set[HalfId] = set()
        # By client: half messages without a decision, with the time until which they count.
        self._unanswered: dict[ClientKey, dict[HalfId, int]] = {}
        self._parked: dict[str, array[int]] = {}  # by topic without a producer
        # By topic id and result: written, busy, gone, no_producer.
        self.results: Counter[tuple[TopicId, str]] = Counter()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send the due checks until the block ends."""
        self._rounds.on_checks_due = self._wake.set
        self._producers.on_first = self._unpark
        transactions = self._rounds.engine.transactions
        transactions.answered = self._note_answer
        async with asyncio.TaskGroup() as tasks:
            loop = tasks.create_task(self._run(), name="check half messages")
            try:
                yield
            finally:
                loop.cancel()
                for task in self._tasks:
                    task.cancel()

    def count_parked(self) -> Counter[str]:
        """Return the half messages that wait for a producer, by topic."""
        return Counter({topic: len(half_ids) for topic, half_ids in self._parked.items()})

    async def _run(self) -> None:
        await self._rounds.wait_until_master()
        while True:
            await self._wake.wait()
            self._wake.clear()
            # An ended check wakes the loop again.
            while self._rounds.engine.half_checks.due and len(self._underway) < UNDERWAY_MAX:
                if not self._allowance.take(self._monotonic_ms() / 1000):
                    await asyncio.sleep(1 / self._per_s)
                    continue
                checks = await self._take()
                for check in checks:
                    self._start(check)
                if not checks:
                    break

    async def _take(self) -> list[DueCheck]:
        """Return some due checks of half messages that are not under way."""
        # The caller has taken the first one from the allowance.
        allowed = 1
        while allowed < TAKEN_A_ROUND and self._allowance.take(self._monotonic_ms() / 1000):
            allowed += 1

        def take(engine: Engine, turn: Turn) -> list[DueCheck]:
            checks: list[DueCheck] = []
            while len(checks) < allowed:
                check = engine.half_checks.take_check(turn.now_ms)
                if check is None:
                    break
                if check.half_id not in self._underway:
                    checks.append(check)
            return checks

        try:
            return await self._rounds.call(take)
        except ServiceError as error:  # The broker stops or steps down.
            log.debug("no checks taken", reason=error.message)
            return []

    def _start(self, check: DueCheck) -> None:
        self._underway.add(check.half_id)
        task = asyncio.create_task(self._check(check), name="check")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------ one check

    async def _check(self, check: DueCheck) -> None:
        """Send one check to the first producer that reads it."""
        try:
            topic = self._rounds.engine.catalog.topic_name(check.topic_id)
            if topic not in self._producers:
                self._park(topic, check)
                return
            is_limited, now_ms = True, self._monotonic_ms()
            for producer in list(self._producers.in_turn(topic, check.client)):
                if not self._may_ask(producer.client, check.half_id, now_ms):
                    continue
                is_limited = False
                result = await self._ask(producer, topic, check)
                self.results[check.topic_id, result] += 1
                if result == "written":
                    waiting = self._unanswered.setdefault(producer.client, {})
                    waiting[check.half_id] = self._monotonic_ms() + check.period_ms
                    await self._call(lambda engine, turn: _note_written(engine, turn, check))
                    return
            retry_ms = LIMITED_RETRY_MS if is_limited else FAILED_RETRY_MS
            await self._call(lambda engine, turn: _postpone(engine, turn, check, retry_ms))
        finally:
            self._underway.discard(check.half_id)
            self._wake.set()

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

    async def _call(self, function: Callable[[Engine, Turn], None]) -> None:
        with contextlib.suppress(ServiceError):  # The broker stops or steps down.
            await self._rounds.call(function)

    # ------------------------------------------------------------ limits

    def _may_ask(self, client: ClientKey, half_id: HalfId, now_ms: int) -> bool:
        """Whether a client has few checks without a decision, this one aside."""
        waiting = self._unanswered.get(client)
        if waiting is None or half_id in waiting or len(waiting) < UNANSWERED_MAX:
            return True
        for old in [one for one, until_ms in waiting.items() if until_ms <= now_ms]:
            del waiting[old]
        return len(waiting) < UNANSWERED_MAX

    def _note_answer(self, half_id: HalfId) -> None:
        """Forget an unanswered check: the client has decided, or said that it cannot yet."""
        for client, waiting in list(self._unanswered.items()):
            waiting.pop(half_id, None)
            if not waiting:
                del self._unanswered[client]

    def _park(self, topic: str, check: DueCheck) -> None:
        """Let a half message wait for a producer of its topic."""
        self.results[check.topic_id, "no_producer"] += 1
        parked = self._parked.setdefault(topic, array("q"))
        parked.append(check.half_id)
        table = self._rounds.engine.transaction_table
        if len(parked) > 2 * table.open_count + PARKED_KEPT:
            kept = [half_id for half_id in parked if table.find(half_id) is not None]
            self._parked[topic] = array("q", kept)

    def _unpark(self, topic: str) -> None:
        """Make the half messages that waited for a producer due."""
        half_ids = self._parked.pop(topic, None)
        if half_ids is not None:
            task = asyncio.create_task(
                self._call(lambda engine, turn: _due(engine, turn, half_ids))
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


def _note_written(engine: Engine, turn: Turn, check: DueCheck) -> None:
    engine.half_checks.note_written(check.half_id, turn.now_ms)


def _postpone(engine: Engine, turn: Turn, check: DueCheck, retry_ms: int) -> None:
    engine.half_checks.add(check.half_id, turn.expiry_ms + retry_ms)


def _due(engine: Engine, turn: Turn, half_ids: array[int]) -> None:
    for half_id in half_ids:
        engine.half_checks.add(HalfId(half_id), turn.expiry_ms)
