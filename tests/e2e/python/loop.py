"""The official Python client in every role at once: `loop.py '{"endpoint": ..., ...}'`.

It sends, receives and acks. After a line on standard input it stops sending. At the end of standard
input it exits. It writes every call as a line of JSON to standard output, with start and end in
microseconds. The test checks these lines. The programs for Node.js, Go and Java write the same
lines. `topics` in the argument limits the kinds of messages. The module
tests/support/clients/message_kinds.py describes them.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from scenarios import (  # type: ignore[import-not-found]  # beside this script
    SQL,
    ConsumeResult,
    FilterExpression,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
    TransactionChecker,
    TransactionResolution,
    configuration,
    message,
    report_fact,
)

NORMAL, DELAYED, ORDERED = "normal", "delayed", "ordered"
TRANSACTION, PRIORITY, DEDUP, FILTERED = "transaction", "priority", "dedup", "filtered"
# Between two sends of a kind, per kind. All languages and kinds together are a light load.
PAUSE_S = 0.05
DELAY_S_MAX = 4  # This client supports whole seconds only.
AWAIT_S = 5  # The minimum of a poll. The deadline is 3 s later.
INVISIBLE_S = 15  # Messages without an ack are delivered again during the test.
RECEIVE_MAX = 16
MESSAGE_GROUPS = 2
PRIORITIES = 4
DEDUP_KEY = "dedup-key"
TAGS, TAG_FILTER = ("red", "green", "blue"), "red || green"
LEVELS, SQL_FILTER = 10, "level >= 5"
RESOLVED_OF = 4  # Of so many transactions, the producer commits the first, rolls back the second.
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


def number_of(key: str) -> int:
    return int(key.rpartition("/")[2])


def refuses(role: str, topic: str, key: str) -> bool:
    """Return whether to reject a message, so that it is delivered again: once, for some."""
    of = REFUSED_OF_ORDERED if topic == ORDERED else REFUSED_OF
    if number_of(key) % of != of - 1 or (role, key) in refused:
        return False
    refused.add((role, key))
    return True


class Checker(TransactionChecker):  # type: ignore[misc]  # of a library without types
    """A checker that decides by the number of the message."""

    def check(self, checked: Any) -> TransactionResolution:
        key = checked.body.decode()
        report_fact("checked", key=key)
        is_even = number_of(key) % 2 == 0
        return TransactionResolution.COMMIT if is_even else TransactionResolution.ROLLBACK


def produce(producer: Producer, name: str, topic: str, pause_s: float) -> None:
    number = 0
    while not stopping.wait(pause_s):
        # The application sends a dedup key again after an answer and after an error.
        for _ in range(2 if topic == DEDUP else 1):
            send(producer, name, topic, number)
        number += 1


def send(producer: Producer, name: str, topic: str, number: int) -> None:
    group = f"{name}-{number % MESSAGE_GROUPS}" if topic == ORDERED else ""
    key = f"{name}/{topic}/{number}"
    made = message(topic, key.encode(), group=group)
    due_s = 0
    transaction = producer.begin_transaction() if topic == TRANSACTION else None
    if topic == DELAYED:
        due_s = int(time.time()) + 1 + number % DELAY_S_MAX
        made.delivery_timestamp = due_s
    elif topic == PRIORITY:
        made.priority = number % PRIORITIES
    elif topic == DEDUP:
        made.properties[DEDUP_KEY] = key
    elif topic == FILTERED:
        made.tag = TAGS[number % len(TAGS)]
        made.properties["level"] = str(number % LEVELS)
    begun = now_us()
    ids: list[str] = []
    error = error_of(lambda: ids.append(producer.send(made, transaction).message_id))
    report_fact(
        "send",
        key=key,
        topic=topic,
        group=group,
        due=due_s * 1000,
        begun=begun,
        ended=now_us(),
        error=error,
        id="".join(ids),
    )
    if transaction is not None and not error:
        resolve(transaction, number)


def resolve(transaction: Any, number: int) -> None:
    """Commit a transaction, roll it back, or leave it to the checker."""
    begun = now_us()
    error = ""
    if number % RESOLVED_OF == 0:
        error = error_of(transaction.commit)
    elif number % RESOLVED_OF == 1:
        error = error_of(transaction.rollback)
    if error:
        report_failure(TRANSACTION, begun, error)


def report_failure(during: str, begun: int, error: str, role: str = "") -> None:
    report_fact("failed", role=role, during=during, begun=begun, ended=now_us(), error=error)


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
            report_failure("receive", begun, error, role)
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
        ids=[each.message_id for each in found],
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
        report_fact(
            "received",
            role=self.role,
            topic=topic,
            keys=[key],
            attempts=[attempt],
            ids=[received.message_id],
            at=at,
        )
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


def subscriptions(topics: Sequence[str]) -> dict[str, dict[str, FilterExpression]]:
    """Return the filters of each role with topics."""
    every = FilterExpression("*")
    plain = {topic: every for topic in topics if topic not in {ORDERED, FILTERED}}
    roles = {
        "simple": plain,
        "push": plain,
        "ordered-simple": {ORDERED: every},
        "ordered-push": {ORDERED: every},
        "tag-simple": {FILTERED: FilterExpression(TAG_FILTER)},
        "sql-push": {FILTERED: FilterExpression(SQL_FILTER, SQL)},
    }
    return {role: filters for role, filters in roles.items() if filters.keys() <= set(topics)}


def main(endpoint: str, name: str, topics: Sequence[str] = (NORMAL, DELAYED, ORDERED)) -> None:
    producer = Producer(configuration(endpoint), topics, checker=Checker())
    producer.startup()
    kept: list[PushConsumer] = []
    for role, filters in subscriptions(topics).items():
        if role.endswith("push"):
            pushed = PushConsumer(configuration(endpoint), role, Listener(role), filters)
            pushed.startup()
            kept.append(pushed)
            continue
        consumer = SimpleConsumer(configuration(endpoint), role, await_duration=AWAIT_S)
        consumer.startup()
        for topic, wanted in filters.items():
            consumer.subscribe(topic, wanted)
        for _ in range(RECEIVERS):
            start(consume, consumer, role)
    pause_s = PAUSE_S * len(topics)
    producing = [start(produce, producer, name, topic, pause_s) for topic in topics]
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
