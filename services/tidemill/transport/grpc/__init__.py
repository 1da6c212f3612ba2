"""gRPC over HTTP/2 without I/O: messages, deadlines, metadata and status on a `http2.Connection`.

`server_connection` and `client_connection` are the two ends. A server call is in `server_call`, its
memory in `connection_memory`, `memory` and `room_queue`. `messages`, `metadata` and `status` belong
to both ends. Requests may be compressed with gzip; responses are not compressed.
"""
