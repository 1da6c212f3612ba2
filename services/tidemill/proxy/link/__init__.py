"""The proxy's end of the link: one stream to a broker that carries everybody's requests.

    broker_link     the face: what the methods ask of a broker
    commands        one row a command: how it travels, what its reply resolves to
    pending         who waits for a reply, and until when
    batching        what has gathered, and when it leaves
    polls           pops whose callers may go before their reply comes
    stream          connecting and connecting again, frames in and out
    configuration   what the broker has told of topics and groups

Every request whose caller stays ends in exactly one of four ways: its reply, its failure as the
broker tells it, BrokerTimeout, or BrokerUnreachable when the stream breaks. After the last two the
outcome is unknown, save for a request that had not left when its time was up: it never leaves.
Nor does a pop whose caller went before; one that had left is cancelled, and what it brings all the
same is given back. A proxy that is about to stop answers its pops empty.
"""

from tidemill.proxy.link.broker_link import BrokerLink
from tidemill.proxy.link.pops import PoppedBatch

__all__ = ["BrokerLink", "PoppedBatch"]
