"""PipelineSource: requests of a data pipeline beside the public protocol (ADR 0046).

Each method is one row: the type of its request, and the function that yields its answer as messages
or bytes. The function calls brokers over `broker_calls`, one page per call. It requests the next
page when the connection has room for this one, so a slow reader holds one page.

A new method needs a row in `pipeline_table` and a method of `BrokerReader` at the broker. If it
does more than forward pages, it gets its own module.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import structlog
from google.protobuf.message import DecodeError, Message

from tidemill.common.errors import Overloaded, RequestError, ServiceError, Unauthorized, codes_of
from tidemill.proxy.cluster.broker_calls import ERROR_KEY
from tidemill.proxy.server.call import Call
from tidemill.proxy.shares import Shares
from tidemill.security.acl import Action, Resource, ResourceType
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill.transport.aio.call import DisconnectError, RpcCall, RpcMethod, server_streaming
from tidemill.transport.grpc.status import RpcCode, RpcError

if TYPE_CHECKING:
    from tidemill.proxy.metrics import ProxyMetrics
    from tidemill.proxy.server.access import AccessGate

log = structlog.get_logger()

SERVICE: Final = pb.DESCRIPTOR.services_by_name["PipelineSource"].full_name
# Concurrent calls of all clients. Each holds one page for its client and may request the next one,
# of a megabyte each. One user or address gets half of the calls.
CALLS_MAX: Final = 128
# Longest wait of a page for room on the client's connection.
ROOM_WAIT_S: Final = 30.0

# Gets the parsed request, and the user or address for its shares. Raises ServiceError.
Answer: TypeAlias = Callable[
    [Any, str], "AsyncGenerator[Message, None] | AsyncGenerator[bytes, None]"
]


# Checks the rights that a parsed request needs. Raises Unauthorized, KeyMissing.
RightsCheck: TypeAlias = Callable[[Call, Any], None]

PIPELINE: Final = Resource(ResourceType.CLUSTER, "pipeline")


@final
@dataclass(frozen=True, slots=True)
class PipelineMethod:
    """One method. Every call also needs Get on Cluster:pipeline."""

    request: type[Message]
    answer: Answer
    check_rights: RightsCheck


def pipeline_methods(
    rows: Mapping[str, PipelineMethod], metrics: ProxyMetrics, gate: AccessGate | None = None
) -> Mapping[str, RpcMethod]:
    """Return the methods of the service, by path. Without a `gate`, no call needs rights."""
    under_way = Shares(CALLS_MAX)
    return {
        f"/{SERVICE}/{name}": _streaming(name, row, metrics, under_way, gate)
        for name, row in rows.items()
    }


def _streaming(
    name: str,
    row: PipelineMethod,
    metrics: ProxyMetrics,
    under_way: Shares,
    gate: AccessGate | None,
) -> RpcMethod:
    code = _code(name)

    async def handle(call: RpcCall, request: bytes) -> None:
        began_s, outcome, result = time.monotonic(), "20000", "cancelled"
        try:
            gated = _call(call, code, gate)
            if gated.has_unknown_key():
                await gated.read_unknown_key()
            gated.authenticate()
            with _place(under_way, gated.sharer):
                parsed = row.request.FromString(request)
                # A lost right ends the stream.
                await gated.watched(_checked_answer(gated, call, row, parsed))
            result = "success"
        except ServiceError as error:
            outcome, result = str(codes_of(error).rocketmq), "process_request_failed"
            metrics.note_rejection(error)
            raise _refusal(error) from None
        except DecodeError:
            outcome, result = "40000", "process_request_failed"
            reason = f"the request is not a valid {row.request.DESCRIPTOR.name} message"
            raise RpcError(RpcCode.INVALID_ARGUMENT, reason) from None
        except DisconnectError:
            result = "write_channel_failed"
            raise
        except RpcError:
            result = "process_request_failed"
            raise
        except Exception:
            outcome, result = "50001", "process_request_failed"
            log.exception("call failed unexpectedly", method=name, peer=call.peer())
            raise RpcError(RpcCode.INTERNAL, "internal error; see the log of the proxy") from None
        finally:
            took_ms = (time.monotonic() - began_s) * 1000
            metrics.rpcs.observe(("grpc", code, outcome, result, "", ""), took_ms)

    return server_streaming(handle)


@contextlib.contextmanager
def _place(under_way: Shares, sharer: str) -> Iterator[None]:
    """Count a running call of a user or address. Raises Overloaded if its share is used up."""
    if not under_way.has_room(sharer):
        raise Overloaded(
            f"this user or address has used its share of the {CALLS_MAX} concurrent pipeline calls;"
            f" retry after a pause"
        )
    under_way.take(sharer)
    try:
        yield
    finally:
        under_way.give_back(sharer)


def _call(rpc: RpcCall, method: str, gate: AccessGate | None) -> Call:
    call = Call(
        rpc.metadata,
        peer=rpc.peer,
        connection=rpc.connection,
        time_remaining_s=rpc.time_remaining_s,
        gate=gate,
        certificate_names=rpc.certificate_names,
    )
    call.method = method
    return call


def check_pipeline_rights(call: Call, row: PipelineMethod, parsed: Message) -> None:
    """Check the rights of a call. Raises Unauthorized, KeyMissing."""
    call.require(PIPELINE, Action.GET)
    row.check_rights(call, parsed)


async def _checked_answer(gated: Call, call: RpcCall, row: PipelineMethod, parsed: Message) -> None:
    gated.check_while_open(lambda: check_pipeline_rights(gated, row, parsed))
    await _answer(call, row, parsed, gated.sharer)


async def _answer(call: RpcCall, row: PipelineMethod, parsed: Message, sharer: str) -> None:
    # If the client disconnects, the function stops at once.
    async with contextlib.aclosing(row.answer(parsed, sharer)) as replies:
        async for reply in replies:
            encoded = reply if isinstance(reply, bytes) else reply.SerializeToString()
            if not await call.hold_in_turn(len(encoded), timeout_s=ROOM_WAIT_S):
                raise Overloaded("too much unread data on this connection; read it and continue")
            try:
                await call.send(encoded)
            finally:
                call.release(len(encoded))


def _refusal(error: ServiceError) -> RpcError:
    """Return the gRPC status for `error`, with its class name in the metadata as brokers do."""
    if isinstance(error, Unauthorized):
        code = RpcCode.PERMISSION_DENIED
    elif isinstance(error, RequestError):
        code = RpcCode.FAILED_PRECONDITION
    else:
        code = RpcCode.UNAVAILABLE
    return RpcError(code, error.message, ((ERROR_KEY, type(error).__name__),))


def _code(name: str) -> str:
    """Return the label of a method in metrics: GetQueues is pipeline_get_queues."""
    return "pipeline" + "".join(f"_{each.lower()}" if each.isupper() else each for each in name)
