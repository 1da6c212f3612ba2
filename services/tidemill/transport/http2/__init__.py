"""HTTP/2 (RFC 9113) without I/O, for both ends of a connection, with the parts that gRPC needs.

    connection = Connection(Role.SERVER, Limits(), now_s=now_s)
    for event in connection.receive(data, now_s): ...
    connection.send_headers(stream, block, is_last=False)
    transport.write(connection.take_output())

Read in this order: `frames`, `header_block`, `stream_states`, `stream`, `flow_control`, `streams`,
`read_marks`, `header_receiver`, `connection`. `limits` has the limits of a peer. Server push is not
supported (our SETTINGS refuse it), and priorities are ignored.
"""
