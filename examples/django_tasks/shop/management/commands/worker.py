"""`manage.py worker`: run tasks until SIGTERM or Ctrl-C."""

import signal
import threading

from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import close_old_connections
from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    PushConsumer,
)

from shop.tasks import run


class Worker(MessageListener):
    """Runs one task at a time in each of its threads."""

    def consume(self, message: Message) -> ConsumeResult:
        """Run a task. After a failure it comes again later, to any worker of the group."""
        close_old_connections()  # As Django does before a request.
        try:
            task = run(message.body)
        except Exception as error:  # noqa: BLE001  # Whatever it is, the task must come again.
            attempt = message.delivery_attempt
            print(f"attempt {attempt} of {message.message_id} failed: {error}", flush=True)
            return ConsumeResult.FAILURE
        finally:
            close_old_connections()
        print(f"done {task} {message.message_id}", flush=True)
        return ConsumeResult.SUCCESS


class Command(BaseCommand):
    """Consumes the topic of tasks."""

    help = "Run tasks until SIGTERM or Ctrl-C. The running tasks are finished first."

    def add_arguments(self, parser) -> None:
        """Add the number of threads."""
        parser.add_argument("--threads", type=int, default=4)

    def handle(self, *, threads: int, **_) -> None:
        """Consume until a signal."""
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        consumer = PushConsumer(
            ClientConfiguration(settings.TIDEMILL_ENDPOINT, Credentials()),
            settings.TIDEMILL_GROUP,
            Worker(),
            {settings.TIDEMILL_TOPIC: FilterExpression()},
            consumption_thread_count=threads,
        )
        consumer.startup()
        print("started", flush=True)
        stop.wait()
        consumer.shutdown()
        print("stopped", flush=True)
