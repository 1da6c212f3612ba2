"""gRPC in the processes of Tidemill: the asyncio shell of our transport, and the generated stubs.

Read in this order: `listener` (who is let in), `server` (a connection, its calls), `call` (what a
handler sees), `writer`, `deadlines`; `channel` is the client's side; `health`, `reflection` and
`services` are what servers of ours have beside their own methods.

Four objects have a part in one call, each one layer's view of it:

    http2.Stream       windows, and what waits for them         forgotten when both sides have ended
    grpc.ServerCall    messages, deadline, status               `is_ended`: it has been answered, or
                                                                nobody is there to be answered
    rpc.RpcCall        the task that serves it, its waiting     what handlers get
    proxy.Call         client id, time left, what metrics say   what the proxy's methods get

`stubs` is generated from proto/ by `make proto` and not in the repository:

    tidemill.common.rpc.stubs.apache.rocketmq.v2.{definition,service,admin}_pb2
    tidemill.common.rpc.stubs.tidemill.broker.v1.broker_pb2, broker_pb2_grpc
"""
