"""Show Tidemill at work through the official Python client, for `make demo`.

Starts `tidemill standalone` on free ports in a folder of its own, lets a client in a process of its
own send, pop, not ack, and ack messages, prints what happened, and stops it all.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

MESSAGES = 3
INVISIBLE_S = 10  # the least that this client takes
DELAY_S = 2
WAIT_S = 40.0  # for anything, on a slow machine
TOPIC, DELAY_TOPIC, GROUP = "demo", "demo-delay", "demo-group"


def main() -> int:
    """Run the demonstration; return the exit status."""
    with tempfile.TemporaryDirectory(prefix="tidemill-demo-") as folder:
        print("$ tidemill standalone --data-dir ...")
        with standalone(Path(folder)) as ready:
            print(f"  serves clients at {ready['grpc']}, the admin API at {ready['admin']}")
            # The client logs below its home folder; it shall leave nothing behind.
            environment = {**os.environ, "HOME": folder}
            return subprocess.run(
                [sys.executable, __file__, ready["grpc"]], env=environment, check=False
            ).returncode


@contextlib.contextmanager
def standalone(folder: Path) -> Iterator[dict[str, str]]:
    """Run a standalone for the block; yield its ready line."""
    flags = [f"--data-dir={folder / 'data'}", "--grpc-port=0", "--admin-port=0", "--metrics-port=0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tidemill", "standalone", "--log-level=warning", *flags],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def run_client(endpoint: str) -> None:
    """Be the client."""
    from rocketmq import ClientConfiguration, Credentials, Producer, SimpleConsumer

    configuration = ClientConfiguration(endpoint, Credentials())
    producer = Producer(configuration, (TOPIC, DELAY_TOPIC))
    producer.startup()
    consumer = SimpleConsumer(configuration, GROUP)
    consumer.startup()
    consumer.subscribe(TOPIC)
    try:
        send_and_pop(producer, consumer)
        delay(producer, consumer)
    finally:
        consumer.shutdown()
        producer.shutdown()


def send_and_pop(producer, consumer) -> None:
    """Send some messages, ack all but one, and see that one come back."""
    bodies = [f"hello {n}" for n in range(MESSAGES)]
    for body in bodies:
        receipt = producer.send(message(TOPIC, body))
        print(f"  sent    {body!r} as {receipt.message_id}")
    waiting, forgotten = set(bodies), bodies[-1]
    for popped in receive_until(consumer, lambda: not waiting):
        body = popped.body.decode()
        waiting.discard(body)
        if body == forgotten:
            popped_at = time.monotonic()
            print(f"  popped  {body!r} and did not ack it")
        else:
            consumer.ack(popped)
            print(f"  popped  {body!r} and acked it")
    returned: list[str] = []
    for popped in receive_until(consumer, lambda: bool(returned)):
        consumer.ack(popped)
        returned.append(popped.body.decode())
        after_s = time.monotonic() - popped_at
        print(
            f"  popped  {returned[-1]!r} again after {after_s:.1f} s,"
            f" delivery attempt {popped.delivery_attempt}, and acked it"
        )
    assert returned == [forgotten], returned


def delay(producer, consumer) -> None:
    """Send a delayed message, and see when it comes."""
    delayed = message(DELAY_TOPIC, "later")
    delayed.delivery_timestamp = int(time.time()) + DELAY_S
    try:
        producer.send(delayed)
    except Exception as error:
        if "not served yet" not in str(error):
            raise
        print("  delayed messages are not served yet")
        return
    sent_at = time.monotonic()
    # One after the other: this client waits at its topics in turn.
    consumer.unsubscribe(TOPIC)
    consumer.subscribe(DELAY_TOPIC)
    print(f"  sent    'later' with a delay of {DELAY_S} s")
    arrived: list[str] = []
    for popped in receive_until(consumer, lambda: bool(arrived)):
        consumer.ack(popped)
        arrived.append(popped.body.decode())
        print(f"  popped  'later' after {time.monotonic() - sent_at:.1f} s and acked it")


def message(topic: str, body: str):
    """Make a message."""
    from rocketmq import Message

    made = Message()
    made.topic = topic
    made.body = body.encode()
    return made


def receive_until(consumer, is_done: Callable[[], bool]) -> Iterator:
    """Yield messages until there are enough; fail when they take too long."""
    deadline = time.monotonic() + WAIT_S
    while not is_done():
        if time.monotonic() > deadline:
            raise SystemExit("the messages did not arrive")
        yield from consumer.receive(32, INVISIBLE_S) or ()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_client(sys.argv[1])
    else:
        sys.exit(main())
