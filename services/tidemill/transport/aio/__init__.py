"""gRPC in the processes of Tidemill: the asyncio shell of the transport.

Read in this order: `listener` (accepting connections), `server` and `server_protocol` (a connection
and its calls), `call` (a call for its handler), `writer`. `channel` is the client's side. `health`,
`reflection` and `services` are methods that our servers share.

Each layer has its own object for one call:

    http2.Stream       windows and queued data                  removed when both sides have ended
    grpc.ServerCall    messages, deadline, status               `is_ended`: it was answered, or the
                                                                client no longer waits
    aio.RpcCall        the task of the handler, waiting tasks   for handlers
    proxy.Call         client id, remaining time, metrics       for the proxy's methods
"""
