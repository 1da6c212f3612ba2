"""A bare grpc.aio unary echo on uvloop: what one gRPC call costs before a broker does anything.

Prints its port on standard output and serves until it is ended.
"""

from __future__ import annotations

import asyncio

import grpc
import uvloop

METHOD = "Echo"
SERVICE = "tidemill.perf.Echo"


async def echo(request: bytes, context: object) -> bytes:
    return request


async def serve() -> None:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    handler = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.install()
    asyncio.run(serve())
