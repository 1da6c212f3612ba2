"""The gRPC transport: two protocols without I/O, and the asyncio shell around them.

Read from the bottom up: `http2` (connections and streams), `grpc` (messages, deadlines, status),
`aio` (sockets, tasks, servers and channels).
"""
