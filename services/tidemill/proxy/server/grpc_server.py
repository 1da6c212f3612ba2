"""The gRPC server of the proxy: a shell that passes bytes to the methods and back."""

from __future__ import annotations

import contextlib
import ipaddress
import ssl
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any, Final

from tidemill.common.errors import BadRequest, MessageBodyTooLarge, Overloaded, ServiceError
from tidemill.message import limits
from tidemill.proxy.link.batching import FRAMES_MAX
from tidemill.proxy.link.commands import FRAME_BYTES
from tidemill.proxy.metrics import request_code
from tidemill.proxy.server.boundary import Boundary
from tidemill.proxy.server.call import Call, status_of
from tidemill.proxy.server.methods import SERVICE, Methods
from tidemill.proxy.server.metrics_receiver import EXPORT, MetricsReceiver
from tidemill.proxy.server.pipeline_source import SERVICE as PIPELINE_SERVICE
from tidemill.transport.aio import health, metrics
from tidemill.transport.aio.call import RpcCall, RpcMethod, bidirectional, server_streaming, unary
from tidemill.transport.aio.listener import ListenSettings
from tidemill.transport.aio.reflection import reflection_methods
from tidemill.transport.aio.server import RpcServer
from tidemill.transport.grpc.server_call import RequestPolicy
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2.limits import Limits

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tidemill.proxy.server.access import AccessGate
    from tidemill.proxy.settings import ProxySettings


# Part of the proxy's memory for the link: the largest number of frames, once while they are built
# and once while they are sent, and the largest reply.
LINK_BYTES: Final = 2 * FRAMES_MAX * FRAME_BYTES

# Field 1 of every response is its status.
_OVERLOAD: Final = status_of(
    Overloaded("the memory of the proxy is full; retry after a pause")
).encode()


class GrpcServer:
    """The gRPC server; `address` is set while it runs."""

    def __init__(
        self,
        methods: Methods,
        boundary: Boundary,
        receiver: MetricsReceiver | None = None,
        pipeline: Mapping[str, RpcMethod] | None = None,
        listening: Sequence[int] = (),
        *,
        on_lost: Callable[[Hashable], object],
        is_banned: Callable[[str], bool] = lambda _host: False,
        gate: AccessGate | None = None,
    ) -> None:
        """Serve `methods`, the metrics of clients if there is a `receiver`, and `pipeline` by path.

        `listening`: descriptors of listening sockets. If empty, the server binds its own.
        `on_lost` is called with the key of each connection that ends. Connections from addresses
        that `is_banned` names are refused. `gate` checks the rights of calls; None checks none.
        """
        self.address = ""
        self._methods = methods
        self._receiver = receiver
        self._boundary = boundary
        self._server: RpcServer | None = None
        self._pipeline = pipeline or {}
        self._listening = tuple(listening)
        self._on_lost = on_lost
        self._is_banned = is_banned
        self._gate = gate
        # Health checks of a pipeline name the pipeline's service.
        self._services = (SERVICE, PIPELINE_SERVICE) if pipeline else (SERVICE,)
        self._health = health.HealthService(self._services)

    @contextlib.asynccontextmanager
    async def serving(
        self, settings: ProxySettings, tls: ssl.SSLContext | None = None
    ) -> AsyncIterator[GrpcServer]:
        """Accept calls until the block ends; raise StartError if the port is in use."""
        table = {**self._table(), **self._health.methods(), **self._pipeline}
        if settings.grpc_reflection:
            table |= reflection_methods((*self._services, health.SERVICE), self._admit)
        self._server = RpcServer(
            table,
            Limits(age_max_s=settings.connection_max_age_ms / 1000),
            _listen_settings(settings, tls, self._listening),
            message_bytes_max=limits.OTHER_REQUESTS_BYTES,
            held_bytes_max=settings.memory_bytes_max - LINK_BYTES,
            on_lost=self._on_lost,
            is_banned=self._is_banned,
        )
        async with self._server.serving():
            self.address = self._server.address
            yield self

    def report_health(self, is_serving: bool) -> None:
        """Report to gRPC health checks whether this proxy is ready."""
        self._health.report(is_serving=is_serving)

    def descriptors(self) -> Sequence[int]:
        """Return the listening sockets, so that another process can keep them open."""
        assert self._server is not None, "only a running server listens"
        return self._server.listener.descriptors()

    def close_banned(self, on_close: Callable[[Hashable], object]) -> None:
        """Close the connections from banned addresses; call `on_close` with the key of each."""
        if self._server is not None:
            self._server.close_banned(on_close)

    def stop_accepting(self) -> None:
        """Stop accepting connections; another process may share the port."""
        assert self._server is not None, "only a running server accepts connections"
        self._server.listener.stop_accepting()

    async def drain(self, timeout_ms: int) -> None:
        """Reject new calls, finish running calls, and end the telemetry streams with OK."""
        assert self._server is not None, "only a running server can be drained"
        self._health.drain()
        await self._server.drain(timeout_ms / 1000)

    def collect(self) -> Iterator[Metric]:
        """Yield the transport's metrics."""
        if self._server is not None:
            yield from metrics.collect(self._server)

    def _table(self) -> Mapping[str, RpcMethod]:
        methods = self._methods
        served = {
            **{name: self._unary(name) for name in methods.unary},
            **{name: self._plain(name) for name in methods.plain},
            **{name: self._streaming(name) for name in methods.streaming},
            **{name: self._bidirectional(name) for name in methods.bidirectional},
        }
        table = {f"/{SERVICE}/{name}": method for name, method in served.items()}
        if self._receiver is not None:
            table[EXPORT] = self._export(self._receiver)
        return table

    def _admit(self, rpc: RpcCall) -> None:
        """Raise RpcError if a user is required, and the call has none."""
        call = self._call(rpc)
        call.method = "reflection"
        try:
            call.authenticate()
        except ServiceError as error:
            raise RpcError(RpcCode.UNAUTHENTICATED, error.message) from error

    def _call(self, rpc: RpcCall) -> Call:
        return Call(
            rpc.metadata,
            peer=rpc.peer,
            connection=rpc.connection,
            time_remaining_s=rpc.time_remaining_s,
            gate=self._gate,
            certificate_names=rpc.certificate_names,
        )

    def _export(self, receiver: MetricsReceiver) -> RpcMethod:
        def handle(rpc: RpcCall, request: bytes) -> Coroutine[Any, Any, bytes]:
            return receiver.export(self._call(rpc), request)

        # Rejections are gRPC statuses, because the responses have no status field.
        return unary(handle, RequestPolicy(limits.OTHER_REQUESTS_BYTES))

    def _unary(self, name: str) -> RpcMethod:
        method, code, answer = self._methods.unary[name], request_code(name), self._boundary.unary

        def handle(rpc: RpcCall, request: bytes) -> Coroutine[Any, Any, bytes]:
            return answer(code, method, self._call(rpc), request)

        return unary(handle, _policy_of(name))

    def _plain(self, name: str) -> RpcMethod:
        method, code, begin = self._methods.plain[name], request_code(name), self._boundary.begin

        def handle(rpc: RpcCall, request: bytes) -> Coroutine[Any, Any, bytes] | None:
            call = self._call(rpc)
            call.reply = rpc
            return begin(code, method, call, request)

        return unary(handle, _policy_of(name))

    def _streaming(self, name: str) -> RpcMethod:
        method, code = self._methods.streaming[name], request_code(name)
        answer = self._boundary.streaming

        def handle(rpc: RpcCall, request: bytes) -> Awaitable[None]:
            return answer(code, method, self._call(rpc), request, rpc)

        return server_streaming(handle, _policy_of(name))

    def _bidirectional(self, name: str) -> RpcMethod:
        method, code = self._methods.bidirectional[name], request_code(name)
        answer = self._boundary.bidirectional

        def handle(rpc: RpcCall) -> Awaitable[None]:
            return answer(code, method, self._call(rpc), rpc, rpc)

        # The stream ends with a gRPC status: a response would not end it.
        policy = RequestPolicy(
            limits.request_bytes_max(name), skipped_bytes_max=limits.TELEMETRY_SKIPPED_BYTES
        )
        return bidirectional(handle, policy)


def _policy_of(name: str) -> RequestPolicy:
    """Return the size limit of a request, and the responses if it is too large or finds no room."""
    size_bytes_max = limits.request_bytes_max(name)
    sentence = f"the request is over its limit of {size_bytes_max} bytes"
    # Only bodies make a send so large.
    error = MessageBodyTooLarge(sentence) if name == "SendMessage" else BadRequest(sentence)
    return RequestPolicy(size_bytes_max, status_of(error).encode(), _OVERLOAD)


def _listen_settings(
    settings: ProxySettings, tls: ssl.SSLContext | None, listening: tuple[int, ...]
) -> ListenSettings:
    return ListenSettings(
        host=settings.grpc_host,
        port=settings.grpc_port,
        reuse_port=settings.reuse_port,
        listening=listening,
        tls=settings.tls,
        tls_certificate_file=settings.tls_certificate_file,
        tls_key_file=settings.tls_key_file,
        tls_client_ca_file=settings.tls_client_ca_file,
        tls_context=tls,
        proxy_protocol_from=tuple(map(ipaddress.ip_network, settings.proxy_protocol_from)),
        connections_max=settings.connections_max,
        connections_per_address_max=settings.connections_per_address_max,
    )
