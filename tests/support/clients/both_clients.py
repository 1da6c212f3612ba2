"""The official client and the pipeline in one process.

    python -m tests.support.clients.both_clients PROXY

Sends with the official client, and prints the messages that the pipeline reads.
"""

from __future__ import annotations

import sys

from rocketmq import ClientConfiguration, Credentials, Message, Producer

from tidemill_pipeline.client import connect
from tidemill_pipeline.options import ConnectionOptions, TopicSelection

TOPIC = "both"


def main(endpoint: str) -> None:
    """Send, and read it."""
    producer = Producer(ClientConfiguration(endpoint, Credentials()), (TOPIC,))
    producer.startup()
    message = Message()
    message.topic, message.body = TOPIC, b"by the official client"
    producer.send(message)
    producer.shutdown()
    client = connect(ConnectionOptions(endpoints=(endpoint,)))
    for queue, ends in client.cluster(TopicSelection(names=(TOPIC,))).queues.items():
        for page in client.messages(queue, start=0, end=ends.max_offset, timeout_ms=10_000):
            for each in page.messages:
                has_place = each.system_properties.provenance.log_offset > 0
                sys.stdout.write(f"{each.body.decode()} {has_place}\n")


if __name__ == "__main__":
    main(sys.argv[1])
