"""Work on the messages of a group, one after the other, with the official client, until SIGTERM."""

import os
import signal
import threading
import time

from rocketmq import ClientConfiguration, Credentials, SimpleConsumer

ENDPOINT = os.environ.get("ENDPOINT", "127.0.0.1:8081")
TOPIC, GROUP = os.environ.get("TOPIC", "orders"), os.environ.get("GROUP", "billing")
WORK_S = float(os.environ.get("WORK_S", "0.1"))  # what a message takes
BATCH = 8
INVISIBLE_S = 30  # others get what is not acked by then: far longer than a batch takes
RETRY_S = 1  # after an error; a process that ends instead waits for longer and longer

is_over = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: is_over.set())


def consume() -> None:
    """Work until SIGTERM."""
    consumer = SimpleConsumer(ClientConfiguration(ENDPOINT, Credentials()), GROUP)
    consumer.startup()
    try:
        consumer.subscribe(TOPIC)
        print("ready", flush=True)
        while not is_over.is_set():
            for message in consumer.receive(BATCH, INVISIBLE_S) or ():
                time.sleep(WORK_S)
                consumer.ack(message)
                print("done", message.message_id, flush=True)
    finally:
        consumer.shutdown()


while not is_over.is_set():
    try:
        consume()
    except Exception as error:  # noqa: BLE001  # The client raises nothing narrower.
        print("try again:", error, flush=True)
        is_over.wait(RETRY_S)
