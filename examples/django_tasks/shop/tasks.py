"""The tasks, and their queue.

A task runs at least once, so a second run must not harm. If the process dies between the commit
and the send, its task is missing. Where that matters, use a transaction of the broker
(docs/transactions.md) or look for rows without a result.
"""

import atexit
import json
from functools import cache
from threading import Lock

from django.conf import settings
from django.db import transaction
from rocketmq import ClientConfiguration, Credentials, Message, Producer

from shop.models import Order

CUPS_MAX = 100
_lock = Lock()


def confirm(order: int) -> None:
    """Confirm an order, once."""
    found = Order.objects.get(id=order)
    if found.cups > CUPS_MAX:
        raise ValueError(f"{found.cups} cups; the kitchen makes at most {CUPS_MAX}")
    Order.objects.filter(id=order, is_confirmed=False).update(is_confirmed=True)


TASKS = {"confirm": confirm}


def enqueue(task: str, **arguments: object) -> None:
    """Send a task when the current transaction has committed. A rollback sends nothing."""
    body = json.dumps({"task": task, "arguments": arguments}).encode()
    transaction.on_commit(lambda: send(body))


def send(body: bytes) -> None:
    """Send a message. An error reaches the caller of the transaction, whose rows are stored."""
    message = Message()
    message.topic, message.body = settings.TIDEMILL_TOPIC, body
    with _lock:
        sender = producer()
    sender.send(message)


@cache
def producer() -> Producer:
    """Return the producer of this process, which the first send starts: after any fork."""
    made = Producer(
        ClientConfiguration(settings.TIDEMILL_ENDPOINT, Credentials()), (settings.TIDEMILL_TOPIC,)
    )
    made.startup()
    atexit.register(made.shutdown)
    return made


def run(body: bytes) -> str:
    """Run the task of a message, and return its name."""
    call = json.loads(body)
    TASKS[call["task"]](**call["arguments"])
    return call["task"]
