"""The relay of questions from the admin process to proxies; the broker does not read them.

A proxy attaches with a stream of its own, beside its link (ADR 0032). A question waits here for the
proxy's answer, until its timeout or the end of the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final, Protocol, final

from google.protobuf.message import DecodeError

from tidemill.broker.server.round.rpc import rpc_error
from tidemill.broker.server.transactions.producers import Producers
from tidemill.common.errors import Overloaded, ProxyNotFound, ProxyUnreachable, ServiceError
from tidemill.common.questions import ANSWER_TIMEOUT_MS_MAX, CHECKS_MAX, QUESTIONS_MAX
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.grpc.status import RpcCode, RpcError

PROXIES_MAX: Final = 1_024  # attached at once; more are rejected and retry
# Questions of one proxy that are commands. A command waits for a client, which may not answer; the
# other questions, such as lists, must not wait behind it.
COMMANDS_MAX: Final = 48
# Beyond it a proxy gets no more questions. A message to verify has up to 4 MiB.
UNSENT_BYTES_MAX: Final = 8 << 20
NAME_CHARS_MAX: Final = 255  # of a proxy's name, the limit of a DNS name


class QuestionStream(Protocol):
    """The stream on which questions are sent to a proxy."""

    @property
    def unsent_bytes(self) -> int:
        """The bytes that the proxy has not read yet."""

    def write(self, message: bytes) -> None:
        """Send without waiting."""


@final
class AttachedProxy:
    """One proxy, and its questions that wait for an answer."""

    def __init__(self, name: pb.ProxyName, stream: QuestionStream) -> None:
        self.name = name
        self._stream = stream
        self._answers: dict[int, asyncio.Future[pb.ProxyAnswer]] = {}  # by question id
        self._command_count = 0
        self._check_count = 0
        self._last_id = 0

    async def ask(self, question: pb.ProxyQuestion, timeout_ms: int) -> pb.ProxyAnswer:
        """Return the proxy's answer. Raises ProxyUnreachable, Overloaded."""
        name = self.name.name
        is_check = question.HasField("check")
        if is_check and self._check_count >= CHECKS_MAX:
            raise Overloaded(f"{CHECKS_MAX} checks wait for proxy {name}")
        if not is_check and len(self._answers) - self._check_count >= QUESTIONS_MAX:
            raise Overloaded(f"{QUESTIONS_MAX} questions wait for proxy {name}; try again later")
        is_command = question.HasField("command")
        if is_command and self._command_count >= COMMANDS_MAX:
            raise Overloaded(f"{COMMANDS_MAX} commands wait for proxy {name}; try again later")
        if self._stream.unsent_bytes >= UNSENT_BYTES_MAX:
            raise Overloaded(f"proxy {name} reads its questions too slowly; try again later")
        self._last_id += 1
        question.id = self._last_id
        answer: asyncio.Future[pb.ProxyAnswer] = asyncio.get_running_loop().create_future()
        self._answers[question.id] = answer
        self._command_count += is_command
        self._check_count += is_check
        try:
            self._stream.write(question.SerializeToString())
            async with asyncio.timeout(timeout_ms / 1000):
                return await answer
        except TimeoutError:
            reason = f"proxy {name} did not answer within {timeout_ms} ms; try again"
            raise ProxyUnreachable(reason) from None
        finally:
            del self._answers[question.id]
            self._command_count -= is_command
            self._check_count -= is_check

    def deliver(self, answer: pb.ProxyAnswer) -> None:
        """Return an answer to its caller, unless the caller was cancelled."""
        waiting = self._answers.get(answer.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def fail(self) -> None:
        """End all questions: the stream has ended."""
        for waiting in self._answers.values():
            if not waiting.done():
                reason = f"proxy {self.name.name} has disconnected; try again"
                waiting.set_exception(ProxyUnreachable(reason))


@final
class Relay:
    """The proxies that are attached to this broker."""

    def __init__(self, producers: Producers) -> None:
        self._producers = producers
        self._attached: dict[bytes, AttachedProxy] = {}  # by process id

    async def attach(self, stream: RelayStream) -> None:
        """Serve the stream of one proxy until it ends."""
        attached: AttachedProxy | None = None
        try:
            async for message in stream:
                answer = _parse(message)
                if attached is None:
                    attached = self._attach(answer.proxy, stream)
                elif answer.HasField("producers"):
                    self._producers.note(attached, answer.producers)
                else:
                    attached.deliver(answer)
        finally:
            if attached is not None:
                attached.fail()
                self._producers.forget(attached)
                if self._attached.get(attached.name.process_id) is attached:
                    del self._attached[attached.name.process_id]

    def _attach(self, name: pb.ProxyName, stream: QuestionStream) -> AttachedProxy:
        if not name.process_id or len(name.name) > NAME_CHARS_MAX:
            reason = f"the first message must name the proxy, in {NAME_CHARS_MAX} characters"
            raise RpcError(RpcCode.INVALID_ARGUMENT, reason)
        known = self._attached.get(name.process_id)
        if known is None and len(self._attached) >= PROXIES_MAX:
            reason = f"the limit of {PROXIES_MAX} attached proxies is reached"
            raise RpcError(RpcCode.RESOURCE_EXHAUSTED, reason)
        if known is not None:
            # The same process had a stream whose end was not noticed here.
            known.fail()
        attached = self._attached[name.process_id] = AttachedProxy(name, stream)
        return attached

    def count_proxies(self) -> int:
        """Return the number of attached proxies."""
        return len(self._attached)

    # ------------------------------------------------------------ BrokerAdmin

    async def ListProxies(
        self,
        request: pb.ListProxiesRequest,  # noqa: ARG002  # part of the contract, without fields
    ) -> pb.ProxyList:
        """Return the attached proxies."""
        return pb.ProxyList(proxies=[each.name for each in self._attached.values()])

    async def AskProxy(self, request: pb.AskProxyRequest) -> pb.ProxyAnswer:
        """Send a question to a proxy, and return the answer."""
        attached = self._attached.get(request.process_id)
        try:
            if attached is None:
                raise ProxyNotFound("the proxy is not connected to this broker")
            timeout_ms = max(1, min(request.timeout_ms, ANSWER_TIMEOUT_MS_MAX))
            return await attached.ask(request.question, timeout_ms)
        except ServiceError as error:
            raise rpc_error(error) from error


class RelayStream(QuestionStream, Protocol):
    """The stream of one proxy: questions to it, and its answers."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Iterate over the answers."""


def _parse(message: bytes) -> pb.ProxyAnswer:
    try:
        return pb.ProxyAnswer.FromString(message)
    except DecodeError as error:
        raise RpcError(RpcCode.INVALID_ARGUMENT, "the message is not a ProxyAnswer") from error
