"""PipelineSource: what a data pipeline asks beside what it reads by the public protocol (ADR 0046).

One row a method: what its request is, and who makes its answer, a stream of messages or of their
bytes. What a row asks of a broker goes over `broker_calls`, one page a call, and the next page is
asked for when this one has room with the client: a slow reader holds one page.

A new method is a row in `rows`, its function in a module of its own where it has more to do than to
pass on, and a method of `BrokerReader` at the broker.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import structlog
from google.protobuf.message import DecodeError, Message

from tidemill.common.errors import Overloaded, RequestError, ServiceError, codes_of
from tidemill.proxy.cluster.broker_calls import ERROR_KEY
from tidemill.proxy.shares import AddressShares
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill.transport.aio.call import DisconnectError, RpcCall, RpcMethod, server_streaming
from tidemill.transport.grpc.status import RpcCode, RpcError

if TYPE_CHECKING:
    from tidemill.proxy.metrics import ProxyMetrics

log = structlog.get_logger()

SERVICE: Final = pb.DESCRIPTOR.services_by_name["PipelineSource"].full_name
# Under way at once, of all clients. Each has a page with its client and may have the next one under
# way, a megabyte each. One address alone has half of them.
CALLS_MAX: Final = 128
# For a page to find room on its client's connection, which is read or is given up.
ROOM_WAIT_S: Final = 30.0

# Takes the parsed request, and the address that asks; ends by itself, or raises ServiceError.
Answer: TypeAlias = Callable[
    [Any, str], "AsyncGenerator[Message, None] | AsyncGenerator[bytes, None]"
]


@final
@dataclass(frozen=True, slots=True)
class Row:
    """One method."""

    request: type[Message]
    answer: Answer


def pipeline_methods(rows: Mapping[str, Row], metrics: ProxyMetrics) -> Mapping[str, RpcMethod]:
    """Return the methods of the service, by path."""
    under_way = AddressShares(CALLS_MAX)
    return {
        f"/{SERVICE}/{name}": _streaming(name, row, metrics, under_way)
        for name, row in rows.items()
    }


def _streaming(name: str, row: Row, metrics: ProxyMetrics, under_way: AddressShares) -> RpcMethod:
    code = _code(name)

    async def handle(call: RpcCall, request: bytes) -> None:
        began_s, outcome, result = time.monotonic(), "20000", "cancelled"
        address = call.peer().rpartition(":")[0]
        try:
            with _place(under_way, address):
                await _answer(call, row, request, address)
            result = "success"
        except ServiceError as error:
            outcome, result = str(codes_of(error).rocketmq), "process_request_failed"
            raise _refusal(error) from None
        except DecodeError:
            outcome, result = "40000", "process_request_failed"
            reason = f"the request is no {row.request.DESCRIPTOR.name}"
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
            raise RpcError(RpcCode.INTERNAL, "the server failed; its log says more") from None
        finally:
            took_ms = (time.monotonic() - began_s) * 1000
            metrics.rpcs.observe(("grpc", code, outcome, result, "", ""), took_ms)

    return server_streaming(handle)


@contextlib.contextmanager
def _place(under_way: AddressShares, address: str) -> Iterator[None]:
    """Have a place among the calls under way; raise Overloaded where an address has its share."""
    if not under_way.has_room(address):
        raise Overloaded(
            f"{CALLS_MAX} calls of pipelines may be under way at this proxy, of one address as many"
            f" as are free; repeat after a pause"
        )
    under_way.take(address)
    try:
        yield
    finally:
        under_way.give_back(address)


async def _answer(call: RpcCall, row: Row, request: bytes, address: str) -> None:
    parsed = row.request.FromString(request)
    # Closed with the call: whoever reads for a client that has gone stops at once.
    async with contextlib.aclosing(row.answer(parsed, address)) as replies:
        async for reply in replies:
            encoded = reply if isinstance(reply, bytes) else reply.SerializeToString()
            if not await call.hold_in_turn(len(encoded), timeout_s=ROOM_WAIT_S):
                raise Overloaded("this connection has much unread already; read it, and go on")
            try:
                await call.send(encoded)
            finally:
                call.release(len(encoded))


def _refusal(error: ServiceError) -> RpcError:
    """Return `error` as it ends a call, named as the broker names it to the admin process."""
    code = RpcCode.FAILED_PRECONDITION if isinstance(error, RequestError) else RpcCode.UNAVAILABLE
    return RpcError(code, error.message, ((ERROR_KEY, type(error).__name__),))


def _code(name: str) -> str:
    """Return a method's name as the metrics write it: GetQueues is pipeline_get_queues."""
    return "pipeline" + "".join(f"_{each.lower()}" if each.isupper() else each for each in name)
