"""A worker: each message is processed, retried after a failure, and given up after all attempts.

    python examples/worker.py [HOST:PORT]

Stop it with Ctrl-C or SIGTERM: it finishes the messages that it works on. A killed worker loses
nothing: its messages come again within 60 s, or at once after `tidemill delivery release`.
"""

import os
import signal
import sys
import threading

from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    PushConsumer,
)

TOPIC, GROUP = os.environ.get("TOPIC", "orders"), os.environ.get("GROUP", "billing")
ENDPOINT = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("ENDPOINT", "127.0.0.1:8081")


class Worker(MessageListener):
    """Processes one message at a time in each of its threads."""

    def consume(self, message: Message) -> ConsumeResult:
        """Process a message. After a failure it comes again later, to any worker of the group."""
        attempt = message.delivery_attempt
        try:
            process(message.body.decode())
        except Exception as error:  # noqa: BLE001  # Whatever it is, the message must come again.
            print(f"attempt {attempt} of {message.message_id} failed: {error}", flush=True)
            return ConsumeResult.FAILURE
        print(f"done {message.message_id} at attempt {attempt}", flush=True)
        return ConsumeResult.SUCCESS


def process(order: str) -> None:
    """Do the work. It may run twice for one message, so a second run must not harm."""
    if order == "poison":
        raise ValueError("this order cannot be read")


stop = threading.Event()
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: stop.set())
consumer = PushConsumer(
    ClientConfiguration(ENDPOINT, Credentials()),
    GROUP,
    Worker(),
    {TOPIC: FilterExpression()},
    consumption_thread_count=4,
)
consumer.startup()
print("started", flush=True)
stop.wait()
consumer.shutdown()
print("stopped", flush=True)
