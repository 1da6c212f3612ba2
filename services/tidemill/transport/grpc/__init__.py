"""gRPC over HTTP/2 without I/O: messages, deadlines, metadata and status on a `http2.Connection`.

`server_connection` and `client_connection` are the two ends; `messages`, `metadata` and `status`
are their parts. Requests may be compressed with gzip, responses are not.
"""
