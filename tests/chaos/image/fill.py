"""Fill a log: `fill.py ENDPOINT TOPIC BYTES` stores large messages."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

from rocketmq import ClientConfiguration, Credentials, Message, Producer

BODY_BYTES = 4_000_000
TIMEOUT_S = 30

endpoint, topic, total_bytes = sys.argv[1:]
producer = Producer(ClientConfiguration(endpoint, Credentials(), "", TIMEOUT_S), (topic,))
producer.startup()
body = os.urandom(BODY_BYTES)


def send(_number: int) -> None:
    """Store one message."""
    message = Message()
    message.topic, message.body = topic, body
    producer.send(message)


with ThreadPoolExecutor(2) as two:
    list(two.map(send, range(int(total_bytes) // BODY_BYTES + 1)))
# The client's threads would run on.
os._exit(0)
