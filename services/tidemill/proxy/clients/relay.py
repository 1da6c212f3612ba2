"""The streams that carry questions to this proxy: one to each broker, beside the link (ADR 0032).

The admin process sends each question of an operator through one broker, which it chooses. Brokers
ask producers for decisions about half messages, and learn here which topics the producers publish.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Final, final

import structlog
from google.protobuf.message import DecodeError

from tidemill.common.errors import ProxyUnreachable
from tidemill.common.questions import CHECKS_MAX, QUESTIONS_MAX
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.aio.channel import connected
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2.limits import Limits

if TYPE_CHECKING:
    from tidemill.proxy.clients.publishers import Publishers
    from tidemill.transport.aio.connect import Connector, OpenStream

log = structlog.get_logger()

ATTACH: Final = "/tidemill.broker.v1.ClientRelay/Attach"
PROCESS_ID_BYTES: Final = 16  # random, so unique per process
CONNECT_TIMEOUT_S: Final = 2.0
RECONNECT_S: Final = 1.0  # plus or minus half of it; only operators wait for it
REFRESH_PERIOD_S: Final = 1.0  # of the list of brokers, whose masters may have moved
QUESTION_BYTES_MAX: Final = 8 << 20  # a message of 4 MiB to verify, with its properties
LIMITS: Final = Limits(
    stream_window_bytes=1 << 20,
    large_messages_bytes=QUESTION_BYTES_MAX + (1 << 10),
    keepalive_period_s=5.0,
    keepalive_timeout_s=15.0,
)


@final
class Relays:
    """The streams for questions, one to each broker."""

    def __init__(
        self,
        name: str,
        addresses: Callable[[], Iterable[str]],
        answer: Callable[[pb.ProxyQuestion], Awaitable[pb.ProxyAnswer]],
        *,
        publishers: Publishers,
        connect: Connector = connected,
    ) -> None:
        """Register this proxy, by its name, at the brokers that `addresses` returns.

        An operator asks the master of a broker group, so these are the addresses of the masters.
        """
        self._name = pb.ProxyName(process_id=os.urandom(PROCESS_ID_BYTES), name=name)
        self._addresses = addresses
        self._answer = answer
        self._publishers = publishers
        self._connect = connect
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the streams to all brokers open until the block ends."""
        async with asyncio.TaskGroup() as tasks:
            refresh = tasks.create_task(self._follow(tasks), name="relays")
            try:
                yield
            finally:
                refresh.cancel()
                for task in self._tasks.values():
                    task.cancel()

    async def _follow(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            addresses = set(self._addresses())
            for address in self._tasks.keys() - addresses:
                self._tasks.pop(address).cancel()
            for address in addresses - self._tasks.keys():
                task = tasks.create_task(self._keep(address), name=f"relay at {address}")
                self._tasks[address] = task
            await asyncio.sleep(REFRESH_PERIOD_S)

    async def _keep(self, address: str) -> None:
        while True:
            reason = "the broker ended the stream"
            try:
                await self._attach(address)
            except RpcError as error:
                reason = str(error)
            # The link logs failures of a broker at a higher level.
            log.debug("question stream ended", address=address, reason=reason)
            await asyncio.sleep(random.uniform(RECONNECT_S / 2, RECONNECT_S * 3 / 2))

    async def _attach(self, address: str) -> None:
        """Answer the questions of one stream until it ends."""
        async with (
            self._connect(
                address, LIMITS, message_bytes_max=QUESTION_BYTES_MAX, timeout_s=CONNECT_TIMEOUT_S
            ) as channel,
            _QuestionTasks(self._answer) as questions,
        ):
            stream = questions.stream = channel.open(ATTACH, questions.on_message)
            stream.write(pb.ProxyAnswer(proxy=self._name).SerializeToString())

            def report(producers: pb.ProducerReport) -> None:
                stream.write(pb.ProxyAnswer(producers=producers).SerializeToString())

            with self._publishers.followed(report):
                try:
                    await stream.wait_ended()
                finally:
                    stream.cancel()


@final
class _QuestionTasks:
    """The questions in progress on one stream."""

    stream: OpenStream

    def __init__(self, answer: Callable[[pb.ProxyQuestion], Awaitable[pb.ProxyAnswer]]) -> None:
        self._answer = answer
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> _QuestionTasks:
        return self

    async def __aexit__(self, *_error: object) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def on_message(self, encoded: bytes) -> None:
        """Start a task that answers the question."""
        try:
            question = pb.ProxyQuestion.FromString(encoded)
        except DecodeError:
            reason = "the broker sent an invalid question"
            self.stream.fail(RpcError(RpcCode.INTERNAL, reason))
            return
        if len(self._tasks) >= QUESTIONS_MAX + CHECKS_MAX:
            # The broker respects these limits. If not, its question times out.
            return
        task = asyncio.create_task(self._reply(question), name="question")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reply(self, question: pb.ProxyQuestion) -> None:
        try:
            answer = await self._answer(question)
        except Exception as error:  # The boundary of every question.
            kind = question.WhichOneof("question")
            log.exception("question failed unexpectedly", question=kind)
            # Without an answer, the operator would wait for the timeout.
            answer = pb.ProxyAnswer(
                id=question.id,
                error=ProxyUnreachable.__name__,
                message=f"internal error of the proxy; see its log: {error!r}",
            )
        self.stream.write(answer.SerializeToString())
