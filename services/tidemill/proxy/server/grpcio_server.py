"""The gRPC server of the proxy, by grpcio: a shell around the methods, which know nothing of it.

Bytes go in and out; the methods parse and encode. Another server can take this one's place by
calling the same `Boundary` with the same `Call`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from tidemill.common.lifecycle import cannot_listen
from tidemill.proxy.server.call import Boundary, Call
from tidemill.proxy.server.methods import (
    SERVICE,
    UNSERVED_STREAMING,
    UNSERVED_UNARY,
    Methods,
    request_code,
)
from tidemill.stubs.apache.rocketmq.v2 import service_pb2
from tidemill.transport.aio.call import ClientGone
from tidemill.transport.grpc.status import RpcCode, RpcError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tidemill.proxy.settings import ProxySettings

Context = grpc.aio.ServicerContext[bytes, bytes]

_OPTIONS = [
    ("grpc.optimization_target", "throughput"),
    # A body over the limit gets its own code in a response, so the library must let it pass.
    ("grpc.max_receive_message_length", 130 << 20),
    ("grpc.max_send_message_length", -1),
    # C++ and Java clients ping without calls, every 60 s and more seldom; some every 30 s.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
]
_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


class GrpcioServer:
    """A running server; `address` tells where it listens."""

    def __init__(self, methods: Methods, boundary: Boundary) -> None:
        self.address = ""
        self._methods = methods
        self._boundary = boundary
        self._health = health_aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._is_draining = False
        self._streams: set[asyncio.Future[None]] = set()  # one for each open telemetry stream

    def check(self, _settings: ProxySettings) -> None:
        """Find nothing wrong: the settings have no TLS for this server."""

    @contextlib.asynccontextmanager
    async def serving(self, settings: ProxySettings) -> AsyncIterator[GrpcioServer]:
        """Accept calls until the block ends; raise StartRefused when the port is taken."""
        options = [*_OPTIONS, ("grpc.so_reuseport", int(settings.reuse_port))]
        self._server = server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers((self._handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        served = [SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name]
        reflection.enable_server_reflection([*served, reflection.SERVICE_NAME], server)
        wanted = f"{settings.grpc_host}:{settings.grpc_port}"
        try:
            port = server.add_insecure_port(wanted)
        except RuntimeError as error:
            raise cannot_listen(
                settings.grpc_host, settings.grpc_port, settings=("grpc_host", "grpc_port")
            ) from error
        await server.start()
        self.address = f"{settings.grpc_host}:{port}"
        for name in ("", SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        try:
            yield self
        finally:
            await server.stop(0)

    async def drain(self, timeout_ms: int) -> None:
        """Refuse new calls, let those under way end, and end the telemetry streams with OK."""
        assert self._server is not None, "only a running server can be drained"
        await self._health.enter_graceful_shutdown()
        self._is_draining = True
        for ended in self._streams:
            if not ended.done():
                ended.set_result(None)
        await self._server.stop(timeout_ms / 1000)

    def collect(self) -> Iterator[Metric]:
        """Yield nothing: the library does not tell."""
        return iter(())

    def _handlers(self) -> grpc.GenericRpcHandler:
        methods = self._methods
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        for name in methods.unary:
            handlers[name] = grpc.unary_unary_rpc_method_handler(self._unary(name))
        for name in methods.streaming:
            handlers[name] = grpc.unary_stream_rpc_method_handler(self._streaming(name))
        for name in methods.bidirectional:
            handlers[name] = grpc.stream_stream_rpc_method_handler(self._bidirectional(name))
        for name, reason in UNSERVED_UNARY.items():
            handlers[name] = grpc.unary_unary_rpc_method_handler(_unserved(reason))
        for name, reason in UNSERVED_STREAMING.items():
            handlers[name] = grpc.unary_stream_rpc_method_handler(_unserved(reason))
        contract = service_pb2.DESCRIPTOR.services_by_name["MessagingService"].methods_by_name
        assert set(handlers) == set(contract), "every method of the contract is answered somehow"
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _unary(self, name: str) -> Callable[[bytes, Context], Awaitable[bytes]]:
        method, code, boundary = self._methods.unary[name], request_code(name), self._boundary

        async def handle(request: bytes, context: Context) -> bytes:
            try:
                return await boundary.unary(code, method, _call(context), request)
            except RpcError as error:
                return await _abort(context, error)

        return handle

    def _streaming(self, name: str) -> Callable[[bytes, Context], Awaitable[None]]:
        method, code, boundary = self._methods.streaming[name], request_code(name), self._boundary

        async def handle(request: bytes, context: Context) -> None:
            with contextlib.suppress(ClientGone):
                try:
                    await boundary.streaming(
                        code, method, _call(context), request, _Responses(context)
                    )
                except RpcError as error:
                    await _abort(context, error)

        return handle

    def _bidirectional(self, name: str) -> Callable[[object, Context], Awaitable[None]]:
        method, code = self._methods.bidirectional[name], request_code(name)
        boundary = self._boundary

        async def handle(_requests: object, context: Context) -> None:
            # Rust clients wait for the headers before they go on.
            await context.send_initial_metadata(())
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            if self._is_draining:
                ended.set_result(None)
            self._streams.add(ended)
            requests = _Requests(context, ended)
            try:
                await boundary.bidirectional(
                    code, method, _call(context), requests, _Responses(context)
                )
            except ClientGone:
                pass
            except RpcError as error:
                await _abort(context, error)
            finally:
                self._streams.discard(ended)

        return handle


class _Requests:
    """What a client sends on a stream, until it half-closes it or `ended` is done."""

    def __init__(self, context: Context, ended: asyncio.Future[None]) -> None:
        self._context = context
        self._ended = ended

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        # The task ends within this call: it is done, or cancelled on the way out.
        read: asyncio.Future[Any] = asyncio.ensure_future(self._context.read())
        waits: set[asyncio.Future[Any]] = {read, self._ended}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not read.done():
                raise StopAsyncIteration
            request = read.result()
        finally:
            read.cancel()
        if isinstance(request, bytes):
            return request
        raise StopAsyncIteration  # The library's mark of a half-closed stream.


def _call(context: Context) -> Call:
    # The library's pairs are (str, str), but for keys that end in -bin, which nobody here reads.
    metadata = cast("Iterable[tuple[str, str]]", context.invocation_metadata() or ())
    return Call(
        dict(metadata),
        peer=context.peer,  # Asking costs a call into the library, and only errors want to know.
        time_remaining_s=context.time_remaining(),
    )


class _Responses:
    """Writes to a stream; the library knows no batches."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.sent_count = 0

    async def send(self, message: bytes) -> None:
        try:
            await self._context.write(message)
        except (grpc.aio.InternalError, grpc.aio.UsageError) as error:
            raise ClientGone from error
        self.sent_count += 1

    async def send_all(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            await self.send(message)


async def _abort(context: Context, error: RpcError) -> NoReturn:
    await context.abort(_STATUS_CODES[error.code], error.message)
    raise AssertionError("abort raises")


def _unserved(reason: str) -> Callable[[bytes, Context], Awaitable[NoReturn]]:
    async def handle(_request: bytes, context: Context) -> NoReturn:
        await _abort(context, RpcError(RpcCode.UNIMPLEMENTED, reason))

    return handle
