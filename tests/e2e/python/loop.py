"""The official Python client in every role at once: `loop.py '{"endpoint": ..., ...}'`.

It sends, receives and acks. After a line on standard input it stops sending. At the end of standard
input it exits. It writes every call as a line of JSON to standard output, with start and end in
microseconds. The test checks these lines. The programs for Node.js, Go and Java write the same
lines.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from scenarios import (  # type: ignore[import-not-found]  # beside this script
    ConsumeResult,
    FilterExpression,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
    configuration,
    message,
    report_fact,
)

NORMAL, DELAYED, ORDERED = "normal", "delayed", "ordered"
PAUSE_S = 0.15  # Between two sends of a kind. All languages together are a light load.
DELAY_S_MAX = 4  # This client supports whole seconds only.
AWAIT_S = 5  # The minimum of a poll. The deadline is 3 s later.
INVISIBLE_S = 15  # Messages without an ack are delivered again during the test.
RECEIVE_MAX = 16
MESSAGE_GROUPS = 2
RECEIVERS = 2  # One may wait on an empty topic while the other has messages.
# Messages without an ack at their first delivery: per 100, and per 1,000 for ordered messages, as
# others wait for them.
REFUSED_OF, REFUSED_OF_ORDERED = 50, 250

stopping = threading.Event()
refused: set[tuple[str, str]] = set()


def now_us() -> int:
    return time.time_ns() // 1000


def error_of(call: Callable[[], object]) -> str:
    """Call, and return the error as the application sees it."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  # Every error is a fact here.
        return f"{type(error).__name__} {error}"
    return ""


def refuses(role: str, topic: str, key: str) -> bool:
    """Return whether to reject a message, so that it is delivered again: once, for some."""
    of = REFUSED_OF_ORDERED if topic == ORDERED else REFUSED_OF
    if int(key.rpartition("/")[2]) % of != of - 1 or (role, key) in refused:
        return False
    refused.add((role, key))
    return True


def produce(producer: Producer, name: str, topic: str) -> None:
    number = 0
    while not stopping.wait(PAUSE_S):
        group = f"{name}-{number % MESSAGE_GROUPS}" if topic == ORDERED else ""
        key = f"{name}/{topic}/{number}"
        made = message(topic, key.encode(), group=group)
        due_s = 0
        if topic == DELAYED:
            due_s = int(time.time()) + 1 + number % DELAY_S_MAX
            made.delivery_timestamp = due_s
        begun = now_us()
        error = error_of(lambda made=made: producer.send(made))  # type: ignore[misc]
        report_fact(
            "send",
            key=key,
            topic=topic,
            group=group,
            due=due_s * 1000,
            begun=begun,
            ended=now_us(),
            error=error,
        )
        number += 1


def consume(consumer: SimpleConsumer, role: str) -> None:
    while True:
        begun = now_us()
        found: list[Any] = []
        error = error_of(
            lambda found=found: found.extend(  # type: ignore[misc]
                consumer.receive(RECEIVE_MAX, INVISIBLE_S) or []
            )
        )
        if error:
            report_fact(
                "failed", role=role, during="receive", begun=begun, ended=now_us(), error=error
            )
            time.sleep(PAUSE_S)
        if found:
            settle(consumer, role, found)


def settle(consumer: SimpleConsumer, role: str, found: list[Any]) -> None:
    """Ack the received messages. If they are ordered, stop at the first message without an ack."""
    topic = found[0].topic
    keys = [each.body.decode() for each in found]
    report_fact(
        "received",
        role=role,
        topic=topic,
        keys=keys,
        at=now_us(),
        attempts=[each.delivery_attempt for each in found],
    )
    for key, each in zip(keys, found, strict=True):
        is_acked = not refuses(role, topic, key) and ack(consumer, role, key, each)
        if not is_acked and topic == ORDERED:
            return


def ack(consumer: SimpleConsumer, role: str, key: str, received: Any) -> bool:
    begun = now_us()
    error = error_of(lambda: consumer.ack(received))
    report_fact(
        "ack",
        role=role,
        topic=received.topic,
        key=key,
        attempt=received.delivery_attempt,
        begun=begun,
        ended=now_us(),
        error=error,
    )
    return not error


class Listener(MessageListener):  # type: ignore[misc]  # of a library without types
    """A listener that reports its messages. The library does not report the result of the ack."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role

    def consume(self, received: Any) -> ConsumeResult:
        key, topic, at = received.body.decode(), received.topic, now_us()
        attempt = received.delivery_attempt
        report_fact("received", role=self.role, topic=topic, keys=[key], attempts=[attempt], at=at)
        if refuses(self.role, topic, key):
            return ConsumeResult.FAILURE
        report_fact(
            "ack",
            role=self.role,
            topic=topic,
            key=key,
            attempt=attempt,
            begun=now_us(),
            ended=now_us(),
            error="",
        )
        return ConsumeResult.SUCCESS


def start(target: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread


def main(endpoint: str, name: str) -> None:
    producer = Producer(configuration(endpoint), [NORMAL, DELAYED, ORDERED])
    producer.startup()
    kept: list[PushConsumer] = []
    for prefix, topics in (("", [NORMAL, DELAYED]), ("ordered-", [ORDERED])):
        role = f"{prefix}simple"
        consumer = SimpleConsumer(configuration(endpoint), role, await_duration=AWAIT_S)
        consumer.startup()
        for topic in topics:
            consumer.subscribe(topic, FilterExpression("*"))
        for _ in range(RECEIVERS):
            start(consume, consumer, role)
        role = f"{prefix}push"
        pushed = PushConsumer(
            configuration(endpoint),
            role,
            Listener(role),
            {topic: FilterExpression("*") for topic in topics},
        )
        pushed.startup()
        kept.append(pushed)
    producing = [start(produce, producer, name, topic) for topic in (NORMAL, DELAYED, ORDERED)]
    report_fact("ready")
    sys.stdin.readline()
    stopping.set()
    for thread in producing:
        thread.join()
    report_fact("stopped")
    sys.stdin.read()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
    # A shutdown of consumers would wait for the end of long polls.
    os._exit(0)
