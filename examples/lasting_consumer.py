"""Receive messages for ever, soon again after an outage, with the official client.

    python examples/lasting_consumer.py [HOST:PORT] [--silence SECONDS]

After an outage, a connection of the Python client may stay silent for minutes. If no receive has
succeeded for --silence seconds (30), this program replaces its consumer, which opens a new
connection.
"""

import argparse
import os
import sys
import time

from rocketmq import ClientConfiguration, Credentials, SimpleConsumer

TOPIC, GROUP = "orders", "billing"
AWAIT_S = 5  # of a poll, which fails three seconds later
INVISIBLE_S = 60
PAUSE_S = 1  # after an error

parser = argparse.ArgumentParser()
parser.add_argument("endpoint", nargs="?", default=os.environ.get("ENDPOINT", "127.0.0.1:8081"))
parser.add_argument("--silence", type=float, default=30)
given = parser.parse_args()


def start() -> SimpleConsumer:
    """Return a consumer with a new connection."""
    started = SimpleConsumer(
        ClientConfiguration(given.endpoint, Credentials()), GROUP, await_duration=AWAIT_S
    )
    started.startup()
    try:
        started.subscribe(TOPIC)
    except Exception:
        started.shutdown()
        raise
    return started


consumer, answered_at = None, time.monotonic()
while True:
    try:
        if consumer is None:
            consumer, answered_at = start(), time.monotonic()
            print("started", flush=True)
        messages = consumer.receive(32, INVISIBLE_S)
        answered_at = time.monotonic()
        for message in messages:
            print("received", message.message_id, message.body.decode(), flush=True)
            consumer.ack(message)  # If this fails, the message comes again.
    except Exception as error:  # noqa: BLE001  # Every error: the loop goes on.
        print(type(error).__name__, str(error).partition("\n")[0], file=sys.stderr, flush=True)
        if consumer is not None and time.monotonic() - answered_at > given.silence:
            silent, consumer = consumer, None
            silent.shutdown()
        time.sleep(PAUSE_S)
