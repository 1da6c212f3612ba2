"""The proxy's end of the link: one stream to a broker, which carries the requests of all clients.

    broker_link            the interface: the requests that methods send to a broker
    commands               one row per command: how its requests travel, what its replies resolve to
    pending                requests in flight, with their deadlines
    batching               requests that wait for a frame, and the rule for sending one
    pops                   pops and notifications in flight, whose callers may be cancelled
    stream                 the connection, its retries, frames in and out
    client_reports         reports about clients, which travel in frames
    broker_configuration   topics and groups as the broker has sent them
    masters, master_routes, route_file   the address of the master of each broker group

A request whose caller waits ends in exactly one of four ways: with its reply, with the error that
the broker returns, with BrokerTimeout, or with BrokerUnreachable if the stream breaks. After the
last two the outcome is unknown, unless the request was not sent in time: then it is withdrawn. A
pop whose caller is cancelled is withdrawn, too. If it was already sent, the broker is told to
cancel it, and messages that arrive nevertheless are given back. A proxy that stops answers its pops
empty.
"""

from tidemill.proxy.link.broker_link import BrokerLink
from tidemill.proxy.link.pops import PoppedBatch

__all__ = ["BrokerLink", "PoppedBatch"]
