"""A bare gRPC echo on uvloop: what a call costs before a broker does anything.

    python -m tests.perf.echo_server native|grpcio

Echo answers a request with itself, Batch with it 32 times, Exchange each request of a stream.
Prints its port on standard output and serves until it is ended.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import uvloop

SERVICE = "tidemill.perf.Echo"
BATCH_SIZE = 32
HOST = "127.0.0.1"


async def serve_grpcio() -> None:
    import grpc

    async def echo(request: bytes, context: object) -> bytes:
        return request

    async def batch(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        for _ in range(BATCH_SIZE):
            await context.write(request)

    async def exchange(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        async for request in requests:
            await context.write(request)

    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Echo": grpc.unary_unary_rpc_method_handler(echo),
        "Batch": grpc.unary_stream_rpc_method_handler(batch),
        "Exchange": grpc.stream_stream_rpc_method_handler(exchange),
    }
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


async def serve_native() -> None:
    from tidemill.transport.aio.call import RpcCall, bidirectional, server_streaming, unary
    from tidemill.transport.aio.listener import ListenSettings
    from tidemill.transport.aio.server import RpcServer
    from tidemill.transport.http2.limits import Limits

    async def echo(_call: RpcCall, request: bytes) -> bytes:
        return request

    async def batch(call: RpcCall, request: bytes) -> None:
        await call.send_all([request] * BATCH_SIZE)

    async def exchange(call: RpcCall) -> None:
        async for request in call:
            call.write(request)

    methods = {
        f"/{SERVICE}/Echo": unary(echo),
        f"/{SERVICE}/Batch": server_streaming(batch),
        f"/{SERVICE}/Exchange": bidirectional(exchange),
    }
    server = RpcServer(methods, Limits(), ListenSettings(host=HOST, port=0))
    async with server.serving():
        print(server.address.rpartition(":")[2], flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    serve = {"native": serve_native, "grpcio": serve_grpcio}[sys.argv[1]]
    uvloop.run(serve())
