"""The proxy's end of the link: one stream to a broker, which carries the requests of all clients.

    broker_link            the interface: the requests that methods send to a broker
    link_state             whether the broker is up, and the observers of that
    commands               one row per command: how its requests travel, what its replies resolve to
    pending                requests in flight, with their deadlines
    batching               requests that wait for a frame, and the rule for sending one
    pops                   pops and notifications in flight, and their cancellation
    stream                 the connection, its retries, frames in and out
    client_reports         reports about clients, which travel in frames
    broker_configuration   topics and groups as the broker has sent them

A request ends in exactly one of four ways: with its reply, with the error that the broker returns,
with BrokerTimeout, or with BrokerUnreachable if the stream breaks. After the last two the outcome
is unknown, unless the request was not sent in time: then it is withdrawn.

If the caller is cancelled, the request is withdrawn, too. If it was a pop and was already sent, the
link cancels it at the broker and gives back messages that arrive nevertheless. A proxy that stops
answers its pops empty.
"""

from tidemill.proxy.link.broker_link import BrokerLink
from tidemill.proxy.link.pending import LinkLimits
from tidemill.proxy.link.pops import PoppedBatch

__all__ = ["BrokerLink", "LinkLimits", "PoppedBatch"]
