"""A grpcio server with the methods of `tests.support.clients.rpc_server`, for comparison."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc

from tests.support.clients.rpc_server import BATCH_SIZE, SERVICE, WAIT_S
from tidemill.transport.grpc.status import RpcCode

Context = grpc.aio.ServicerContext[bytes, bytes]
CODES = {code.value[0]: code for code in grpc.StatusCode}


async def _echo(request: bytes, context: Context) -> bytes:
    return request


async def _fail(request: bytes, context: Context) -> bytes:
    code, _, message = request.decode().partition(" ")
    if int(code) == RpcCode.OK:
        return b""
    await context.abort(CODES[int(code)], message)
    raise AssertionError("abort raises")


async def _raise(request: bytes, context: Context) -> bytes:
    raise LookupError(request.decode())


async def _large(request: bytes, context: Context) -> bytes:
    return bytes(int(request))


async def _meta(request: bytes, context: Context) -> bytes:
    """Answer with the metadata that the request names, each in hex."""
    return b" ".join(
        (value if isinstance(value, bytes) else value.encode()).hex().encode()
        for name, value in context.invocation_metadata() or ()
        if name == request.decode()
    )


async def _hang(request: bytes, context: Context) -> bytes:
    await asyncio.Event().wait()
    return b""


async def _batch(request: bytes, context: Context) -> None:
    for _ in range(BATCH_SIZE):
        await context.write(request)


async def _exchange(requests: AsyncIterator[bytes], context: Context) -> None:
    async for request in requests:
        await context.write(request)


@contextlib.contextmanager
def grpcio_server(message_bytes_max: int) -> Iterator[int]:
    """Run the server in its own thread during the block; yield its port."""
    ready = threading.Event()
    found: dict[str, Any] = {}

    async def serve() -> None:
        found["loop"], found["stop"] = asyncio.get_running_loop(), asyncio.Event()
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", message_bytes_max),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.so_reuseport", 0),
            ]
        )
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        handlers: dict[str, Any] = {
            "Echo": unary(_echo),
            "Fail": unary(_fail),
            "Raise": unary(_raise),
            "Large": unary(_large),
            "Hang": unary(_hang),
            "Meta": unary(_meta),
            "Batch": stream(_batch),
            "Exchange": grpc.stream_stream_rpc_method_handler(_exchange),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        found["port"] = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        ready.set()
        await found["stop"].wait()
        await server.stop(None)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="grpcio server")
    thread.start()
    assert ready.wait(WAIT_S)
    try:
        yield found["port"]
    finally:
        found["loop"].call_soon_threadsafe(found["stop"].set)
        thread.join(WAIT_S)
