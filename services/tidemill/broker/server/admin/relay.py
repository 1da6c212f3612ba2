"""Questions of the admin process to proxies, passed on: a broker looks at neither side of them.

A proxy attaches with a stream of its own, beside its link (ADR 0032). A question waits here until
the proxy's answer has come, the time is over, or the stream has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final, Protocol, final

from google.protobuf.message import DecodeError

from tidemill.broker.server.round.rpc import rpc_error
from tidemill.common.errors import Overloaded, ProxyNotFound, ProxyUnreachable, ServiceError
from tidemill.common.questions import ANSWER_TIMEOUT_MS_MAX, QUESTIONS_MAX
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.grpc.status import RpcCode, RpcError

PROXIES_MAX: Final = 1_024  # attached at once; more are refused, and come again
# Of one proxy's questions. A command waits for a client that may not answer, and lists are to be
# had meanwhile.
COMMANDS_MAX: Final = 48
# What a proxy has yet to read; beyond it no more is asked. A message to verify has up to 4 MiB.
UNSENT_BYTES_MAX: Final = 8 << 20
NAME_CHARS_MAX: Final = 255  # of a proxy's name, as long as one of DNS


class Outlet(Protocol):
    """Where questions to a proxy go."""

    @property
    def unsent_bytes(self) -> int:
        """What waits for the proxy to read."""

    def write(self, message: bytes) -> None:
        """Send without waiting."""


@final
class Attached:
    """One proxy, and what it is being asked."""

    def __init__(self, name: pb.ProxyName, outlet: Outlet) -> None:
        self.name = name
        self._outlet = outlet
        self._waiting: dict[int, asyncio.Future[pb.ProxyAnswer]] = {}
        self._commands = 0  # of those that wait
        self._last_id = 0

    async def ask(self, question: pb.ProxyQuestion, timeout_ms: int) -> pb.ProxyAnswer:
        """Return the proxy's answer. Raises ProxyUnreachable, and Overloaded."""
        if len(self._waiting) >= QUESTIONS_MAX:
            raise Overloaded(f"{QUESTIONS_MAX} questions wait for proxy {self.name.name} already")
        is_command = question.HasField("command")
        if is_command and self._commands >= COMMANDS_MAX:
            raise Overloaded(f"{COMMANDS_MAX} commands wait for proxy {self.name.name} already")
        if self._outlet.unsent_bytes >= UNSENT_BYTES_MAX:
            raise Overloaded(f"proxy {self.name.name} does not read what it is asked")
        self._last_id += 1
        question.id = self._last_id
        answer: asyncio.Future[pb.ProxyAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[question.id] = answer
        self._commands += is_command
        try:
            self._outlet.write(question.SerializeToString())
            async with asyncio.timeout(timeout_ms / 1000):
                return await answer
        except TimeoutError:
            reason = f"proxy {self.name.name} did not answer in time"
            raise ProxyUnreachable(reason) from None
        finally:
            del self._waiting[question.id]
            self._commands -= is_command

    def answered(self, answer: pb.ProxyAnswer) -> None:
        """Give an answer to who waits for it, if anybody still does."""
        waiting = self._waiting.get(answer.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def gone(self) -> None:
        """Know that no answer comes any more."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ProxyUnreachable(f"proxy {self.name.name} has gone"))


@final
class Relay:
    """The proxies that can be asked through this broker."""

    def __init__(self) -> None:
        self._attached: dict[bytes, Attached] = {}  # by process id

    async def attach(self, stream: ProxyStream) -> None:
        """Serve the stream of one proxy until it ends."""
        attached: Attached | None = None
        try:
            async for message in stream:
                answer = _parse(message)
                if attached is None:
                    attached = self._attach(answer.proxy, stream)
                else:
                    attached.answered(answer)
        finally:
            if attached is not None:
                attached.gone()
                if self._attached.get(attached.name.process_id) is attached:
                    del self._attached[attached.name.process_id]

    def _attach(self, name: pb.ProxyName, outlet: Outlet) -> Attached:
        if not name.process_id or len(name.name) > NAME_CHARS_MAX:
            raise RpcError(RpcCode.INVALID_ARGUMENT, "the first message says who the proxy is")
        known = self._attached.get(name.process_id)
        if known is None and len(self._attached) >= PROXIES_MAX:
            reason = f"{PROXIES_MAX} proxies are attached already"
            raise RpcError(RpcCode.RESOURCE_EXHAUSTED, reason)
        if known is not None:
            # A stream of the same process that was lost, and we have yet to notice.
            known.gone()
        attached = self._attached[name.process_id] = Attached(name, outlet)
        return attached

    # ------------------------------------------------------------ BrokerAdmin

    async def ListProxies(
        self,
        request: pb.ListProxiesRequest,  # noqa: ARG002  # The contract has it, and it is empty.
    ) -> pb.ProxyList:
        """Return who can be asked."""
        return pb.ProxyList(proxies=[each.name for each in self._attached.values()])

    async def AskProxy(self, request: pb.AskProxyRequest) -> pb.ProxyAnswer:
        """Pass a question on, and return the answer."""
        attached = self._attached.get(request.process_id)
        try:
            if attached is None:
                raise ProxyNotFound("that proxy is not connected to this broker")
            timeout_ms = max(1, min(request.timeout_ms, ANSWER_TIMEOUT_MS_MAX))
            return await attached.ask(request.question, timeout_ms)
        except ServiceError as error:
            raise rpc_error(error) from error


class ProxyStream(Outlet, Protocol):
    """The stream of one proxy: its answers, and where questions go."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Iterate over the answers."""


def _parse(message: bytes) -> pb.ProxyAnswer:
    try:
        return pb.ProxyAnswer.FromString(message)
    except DecodeError as error:
        raise RpcError(RpcCode.INVALID_ARGUMENT, "the message is no answer of a proxy") from error
