"""gRPC in the processes of Tidemill: the asyncio shell of our transport.

Read in this order: `listener` (who is let in), `server` (a connection, its calls), `call` (what a
handler sees), `writer`; `channel` is the client's side; `health`, `reflection` and
`services` are what servers of ours have beside their own methods.

Four objects have a part in one call, each one layer's view of it:

    http2.Stream       windows, and what waits for them         forgotten when both sides have ended
    grpc.ServerCall    messages, deadline, status               `is_ended`: it has been answered, or
                                                                nobody is there to be answered
    aio.RpcCall        the task that serves it, its waiting     what handlers get
    proxy.Call         client id, time left, what metrics say   what the proxy's methods get
"""
