"""The error boundary of the proxy: it measures every call, and answers errors."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import structlog
from google.protobuf.message import DecodeError

from tidemill.common.errors import BadRequest, ServiceError, Unauthorized
from tidemill.common.log import LEVEL
from tidemill.proxy.link.broker_parts import slowest_parts
from tidemill.proxy.message_codec import encode_delivery_timestamp
from tidemill.proxy.server.call import CLIENT_ID_LOGGED_CHARS_MAX, CallStatus, status_of
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.transport.aio.call import DisconnectError
from tidemill.transport.grpc.status import RpcCode, RpcError

if TYPE_CHECKING:
    from tidemill.common.clock import Clock
    from tidemill.common.slow_calls import SlowCalls
    from tidemill.proxy.metrics import ProxyMetrics
    from tidemill.proxy.server.call import (
        Answer,
        BidirectionalMethod,
        Call,
        PlainMethod,
        Responses,
        StreamingMethod,
        UnaryMethod,
    )

log = structlog.get_logger()

_CODE_TEXTS: dict[int, str] = {code: str(code) for code in v2.Code.values()}
_CODE_NAMES: dict[int, str] = {code: name for name, code in v2.Code.items()}
# Codes of successful calls. An empty poll is a success.
_GOOD = frozenset({v2.OK, v2.MESSAGE_NOT_FOUND})

_FAILED = "process_request_failed"  # a result in metrics
_GO = "GO"  # Its client polls again 20 ms after a refusal.

# Label of each streaming method in the gauge of streams.
_STREAM_KINDS = {"receive_message": "receive", "pull_message": "pull"}


class Boundary:
    """The error boundary of the process: an error becomes the status of a response.

    Unexpected errors are also logged. The boundary rejects calls without a client id. It measures
    every call except telemetry, which lasts as long as its client.
    """

    def __init__(
        self, metrics: ProxyMetrics, clock: Clock, slow_calls: SlowCalls | None = None
    ) -> None:
        """Keep the slow calls in `slow_calls`; None: keep none."""
        self._metrics = metrics
        self._clock = clock
        self._slow_calls = slow_calls
        self._slow_ms = float("inf") if slow_calls is None else slow_calls.slow_call_ms

    async def unary(self, name: str, method: UnaryMethod, call: Call, request: bytes) -> bytes:
        """Answer a call that has one response."""
        call.method = name
        answer = partial(self._checked, method, call, request)
        # The method alone decides how long the bytes stay in memory.
        del request
        answering = self._answered(call, answer)
        del answer
        return await answering

    def begin(
        self, name: str, method: PlainMethod, call: Call, request: bytes
    ) -> Coroutine[Any, Any, bytes] | None:
        """Begin a call of a plain method; return the rest of it if it needs a task."""
        call.method, call.boundary = name, self
        if call.has_unknown_key():
            call.reply = None
            return self.unary(name, partial(_answered_in_task, method), call, request)
        try:
            call.check()
            answer = method(call, request)
        except (RpcError, DisconnectError):
            self._observe(name, call, _FAILED)
            raise
        except Unauthorized as error:
            return self._answered(call, partial(_raise, error))
        except Exception as error:  # noqa: BLE001 - the process's error boundary
            self.fail(call, error)
            return None
        return None if answer is None else self._answered(call, answer)

    def respond(self, call: Call, response: bytes) -> None:
        """Answer a call of a plain method."""
        assert call.reply is not None, "a task answers a call without a reply"
        self._observe(call.method, call, "success" if call.response_code in _GOOD else _FAILED)
        call.reply.respond(response)

    def fail(self, call: Call, error: Exception) -> None:
        """Answer a call of a plain method with an error."""
        self.respond(call, self._status(call.method, call, error).encode())

    def answer_in_task(self, call: Call, answer: Answer) -> None:
        """Answer a call of a plain method, which needs a task after all."""
        assert call.reply is not None, "a task answers a call without a reply"
        call.reply.answer_in_task(self._answered(call, answer))

    def note_cancelled(self, call: Call) -> None:
        """Count a call of a plain method that has no client any more."""
        self._observe(call.method, call, "cancelled")

    async def _checked(self, method: UnaryMethod, call: Call, request: bytes) -> bytes:
        if call.has_unknown_key():
            await call.read_unknown_key()
        call.check()
        answering = method(call, request)
        del request
        return await answering

    async def _answered(self, call: Call, answer: Answer) -> bytes:
        """Await the response of a call, and measure it."""
        result = "cancelled"
        try:
            answering = answer()
            del answer
            response = await answering
            result = "success" if call.response_code in _GOOD else _FAILED
        except (RpcError, DisconnectError):
            result = _FAILED
            raise
        except Exception as error:  # noqa: BLE001 - the process's error boundary
            result = _FAILED
            response = self._status(call.method, call, error).encode()
            await call.delay_refusal(error)
        finally:
            self._observe(call.method, call, result)
        return response

    async def streaming(
        self, name: str, method: StreamingMethod, call: Call, request: bytes, responses: Responses
    ) -> None:
        """Answer a receive or a pull: a stream of responses that begins with a status.

        The method sends its status itself. If it fails before, the boundary sends the status. A
        receive always ends with a delivery timestamp.
        """
        result, kind, call.method = "cancelled", _STREAM_KINDS[name], name
        self._metrics.streams[kind] += 1
        try:
            try:
                if call.has_unknown_key():
                    await call.read_unknown_key()
                call.check()
                answering = method(call, request, responses)
                del request
                await call.watched(answering)
            except (RpcError, DisconnectError):
                raise
            except Exception as error:  # noqa: BLE001 - the process's error boundary
                answer = [self._status(name, call, error).encode()]
                await call.delay_refusal(error, repeats=call.language == _GO)
                if kind == "receive":
                    answer.append(encode_delivery_timestamp(self._clock.wall_ms()))
                await responses.send_all(answer)
            result = "success" if call.response_code in _GOOD else _FAILED
        except RpcError:
            result = _FAILED
            raise
        except DisconnectError:
            result = "write_channel_failed"
            raise
        finally:
            self._metrics.streams[kind] -= 1
            self._observe(name, call, result)

    async def bidirectional(
        self,
        name: str,
        method: BidirectionalMethod,
        call: Call,
        requests: AsyncIterator[bytes],
        responses: Responses,
    ) -> None:
        """Serve a stream in both directions; end it with INTERNAL after an unexpected error."""
        self._metrics.streams["telemetry"] += 1
        call.method = name
        try:
            if call.has_unknown_key():
                await call.read_unknown_key()
            call.check()
            await call.watched(method(call, requests, responses))
        except RpcError as error:
            # The filter in the settings of a client.
            self._metrics.note_rejection(error.__cause__)
            raise
        except DisconnectError:
            raise
        except Exception as error:  # noqa: BLE001 - the process's error boundary
            outcome = self._status(name, call, error)
            if outcome.code == v2.INTERNAL_SERVER_ERROR:
                raise RpcError(RpcCode.INTERNAL, outcome.message) from None
            await call.delay_refusal(error, repeats=True)
            await responses.send(outcome.encode())
        finally:
            self._metrics.streams["telemetry"] -= 1

    def _status(self, name: str, call: Call, error: Exception) -> CallStatus:
        if isinstance(error, DecodeError):
            error = BadRequest("the request is not a protobuf message of this method")
        if isinstance(error, ServiceError):
            status = status_of(error)
            self._metrics.note_rejection(error)
        else:
            log.error("call failed unexpectedly", method=name, peer=call.peer(), exc_info=error)
            status = CallStatus(
                v2.INTERNAL_SERVER_ERROR, "internal error; see the log of the proxy"
            )
        call.response_code = status.code
        return status

    def _observe(self, name: str, call: Call, result: str) -> None:
        took_ms = (time.monotonic() - call.started_at) * 1000
        code = _CODE_TEXTS.get(call.response_code) or str(call.response_code)
        self._metrics.rpcs.observe(
            ("grpc", name, code, result, call.is_long_polling, call.is_short_polling_hit), took_ms
        )
        if took_ms >= self._slow_ms and name not in _STREAM_KINDS:
            self._note_slow(name, call, took_ms)
        if LEVEL.is_debug:
            self._log(name, call, result)

    def _note_slow(self, name: str, call: Call, took_ms: float) -> None:
        """Keep a slow call. Streams of responses wait for messages, so they are never slow."""
        if self._slow_calls is not None:
            self._slow_calls.note(
                name,
                took_ms,
                topic=call.topic,
                group=call.group,
                client_id=call.client_id[:CLIENT_ID_LOGGED_CHARS_MAX],
                code=_CODE_NAMES.get(call.response_code, str(call.response_code)),
                parts=slowest_parts(),
            )

    def _log(self, name: str, call: Call, result: str) -> None:
        """Log a finished call."""
        log.debug(
            "call",
            method=name,
            client=call.client_id[:CLIENT_ID_LOGGED_CHARS_MAX],
            topic=call.topic,
            group=call.group,
            code=call.response_code,
            result=result,
            took_ms=round((time.monotonic() - call.started_at) * 1000, 3),
            peer=call.peer(),
        )


async def _answered_in_task(method: PlainMethod, call: Call, request: bytes) -> bytes:
    answer = method(call, request)
    assert answer is not None, "a call without a reply needs a task"
    del request
    return await answer()


async def _raise(error: Exception) -> NoReturn:
    raise error
