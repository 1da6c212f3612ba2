"""The streams over which operators' questions come: one to each broker, beside the link (ADR 0032).

A proxy is asked through one broker at a time; which one, the admin process chooses.
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
from tidemill.common.questions import QUESTIONS_MAX
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.aio.channel import connected
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2.limits import Limits

if TYPE_CHECKING:
    from tidemill.transport.aio.connect import Connector, OpenStream

log = structlog.get_logger()

ATTACH: Final = "/tidemill.broker.v1.ClientRelay/Attach"
PROCESS_ID_BYTES: Final = 16  # random: no two processes have the same
CONNECT_TIMEOUT_S: Final = 2.0
RECONNECT_S: Final = 1.0  # give or take a half; nobody waits for it but an operator
LOOK_EVERY_S: Final = 1.0  # at which brokers there are
QUESTION_BYTES_MAX: Final = 8 << 20  # a message of 4 MiB to verify, and its properties
LIMITS: Final = Limits(
    stream_window_bytes=1 << 20,
    large_messages_bytes=QUESTION_BYTES_MAX + (1 << 10),
    keepalive_period_s=5.0,
    keepalive_timeout_s=15.0,
)


@final
class Relays:
    """The streams to all brokers."""

    def __init__(
        self,
        name: str,
        addresses: Callable[[], Iterable[str]],
        answer: Callable[[pb.ProxyQuestion], Awaitable[pb.ProxyAnswer]],
        *,
        connect: Connector = connected,
    ) -> None:
        """Offer this proxy, by its name, to the brokers that `addresses` returns."""
        self._name = pb.ProxyName(process_id=os.urandom(PROCESS_ID_BYTES), name=name)
        self._addresses = addresses
        self._answer = answer
        self._connect = connect
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Be attached to all brokers until the block ends."""
        async with asyncio.TaskGroup() as tasks:
            looking = tasks.create_task(self._follow(tasks), name="relays")
            try:
                yield
            finally:
                looking.cancel()
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
            await asyncio.sleep(LOOK_EVERY_S)

    async def _keep(self, address: str) -> None:
        while True:
            reason = "the broker ended the stream"
            try:
                await self._attach(address)
            except RpcError as error:
                reason = str(error)
            # The link says what is wrong with a broker, for both.
            log.debug("not attached to a broker", address=address, reason=reason)
            await asyncio.sleep(random.uniform(RECONNECT_S / 2, RECONNECT_S * 3 / 2))

    async def _attach(self, address: str) -> None:
        """Answer the questions of one stream until it ends."""
        async with (
            self._connect(
                address, LIMITS, message_bytes_max=QUESTION_BYTES_MAX, timeout_s=CONNECT_TIMEOUT_S
            ) as channel,
            _Answering(self._answer) as answering,
        ):
            stream = answering.stream = channel.open(ATTACH, answering.on_message)
            stream.write(pb.ProxyAnswer(proxy=self._name).SerializeToString())
            try:
                await stream.wait_ended()
            finally:
                stream.cancel()


@final
class _Answering:
    """The questions of one stream that are being answered."""

    stream: OpenStream

    def __init__(self, answer: Callable[[pb.ProxyQuestion], Awaitable[pb.ProxyAnswer]]) -> None:
        self._answer = answer
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> _Answering:
        return self

    async def __aexit__(self, *_error: object) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def on_message(self, encoded: bytes) -> None:
        """Begin to answer a question."""
        try:
            question = pb.ProxyQuestion.FromString(encoded)
        except DecodeError:
            self.stream.fail(RpcError(RpcCode.INTERNAL, "the broker sent what is no question"))
            return
        if len(self._tasks) >= QUESTIONS_MAX:
            # The broker does not ask so many; it hears of it by the time that it waits.
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
            # Whoever asked is not to wait for as long as a client may take.
            answer = pb.ProxyAnswer(
                id=question.id,
                error=ProxyUnreachable.__name__,
                message=f"this proxy failed to answer, and its log says why: {error!r}",
            )
        self.stream.write(answer.SerializeToString())
