"""HTTP/2 (RFC 9113) without I/O, for both ends of a connection, as far as gRPC needs it.

    connection = Connection(Role.SERVER, Limits(), now_s=now_s)
    for event in connection.receive(data, now_s): ...
    connection.send_headers(stream, block, is_last=False)
    transport.write(connection.take_output())

Read in this order: `frames`, `header_block`, `stream_states`, `stream`, `flow_control`,
`streams`, `read_marks`, `connection`; `limits` says what a peer may do. Not served: server push
(refused by our SETTINGS) and priorities (read over).
"""
