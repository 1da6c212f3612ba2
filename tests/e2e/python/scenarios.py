"""What the official Python client is put through: `scenarios.py SCENARIO '{"topic": ...}'`.

Prints facts as JSON lines on standard output and judges nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
    TransactionChecker,
    TransactionResolution,
)

AWAIT_S = 3  # a poll's least time, with the request timeout of 3 s on top
INVISIBLE_S = 30  # longer than any scenario
CONSUMED_S = 120  # invisible while a slow reader takes what else it has asked for
LONG_AWAIT_S = 20  # so that what a slow reader has asked for comes before its deadline
PUSHED = 10  # messages per namespace
DELAY_S = 4  # of a message that is scheduled
TLS_MESSAGES = 100  # enough for several renewals beside them
WAIT_S = 40.0  # for anything, on the slowest machine

_out = threading.Lock()


SQL = 2  # FilterType of the protocol; the client does not export it


def report_fact(fact: str, **values: object) -> None:
    """Print one fact."""
    with _out:
        sys.stdout.write(json.dumps({"fact": fact, **values}) + "\n")
        sys.stdout.flush()


def configuration(endpoint: str, namespace: str = "") -> ClientConfiguration:
    key = os.environ.get("ROCKETMQ_ACCESS_KEY", "")
    credentials = Credentials(key, os.environ.get("ROCKETMQ_SECRET_KEY", ""))
    return ClientConfiguration(endpoint, credentials, namespace)


@contextmanager
def producing(endpoint: str, *topics: str, namespace: str = "") -> Iterator[Producer]:
    producer = Producer(configuration(endpoint, namespace), topics)
    producer.startup()
    try:
        yield producer
    finally:
        producer.shutdown()


@contextmanager
def consuming(
    endpoint: str,
    group: str,
    topic: str,
    tags: str = "*",
    await_s: int = AWAIT_S,
    namespace: str = "",
) -> Iterator[SimpleConsumer]:
    consumer = SimpleConsumer(configuration(endpoint, namespace), group, await_duration=await_s)
    consumer.startup()
    consumer.subscribe(topic, FilterExpression(tags))
    try:
        yield consumer
    finally:
        consumer.shutdown()


@contextmanager
def pushing(
    endpoint: str,
    group: str,
    topic: str,
    listen: Callable[[Any], ConsumeResult],
    namespace: str = "",
    wanted: FilterExpression | None = None,
) -> Iterator[None]:
    class Listener(MessageListener):  # type: ignore[misc]  # of a library without types
        def consume(self, message: Any) -> ConsumeResult:
            return listen(message)

    filters = {topic: wanted or FilterExpression()}
    consumer = PushConsumer(configuration(endpoint, namespace), group, Listener(), filters)
    consumer.startup()
    try:
        yield
    finally:
        consumer.shutdown()


def message(
    topic: str,
    body: bytes,
    *,
    tag: str = "",
    group: str = "",
    keys: tuple[str, ...] = (),
    properties: dict[str, str] | None = None,
) -> Any:
    made = Message()
    made.topic = topic
    made.body = body
    if tag:
        made.tag = tag
    if group:
        made.message_group = group
    for key in keys:
        made.keys = key
    made.properties.update(properties or {})
    return made


def report_received(received: Any, **values: object) -> None:
    report_fact(
        "received",
        id=received.message_id,
        topic=received.topic,
        tag=received.tag,
        group=received.message_group,
        keys=sorted(received.keys),
        properties=received.properties,
        size=len(received.body),
        sha=hashlib.sha256(received.body).hexdigest(),
        body=received.body[:40].decode(errors="replace"),
        attempt=received.delivery_attempt,
        type=received.message_type,
        is_corrupted=received.corrupted,
        **values,
    )


def receive(consumer: SimpleConsumer, wanted: int, invisible_s: int = INVISIBLE_S) -> list[Any]:
    """Receive until `wanted` messages have come."""
    deadline = time.monotonic() + WAIT_S
    found: list[Any] = []
    while len(found) < wanted:
        if time.monotonic() > deadline:
            raise SystemExit(f"{len(found)} of {wanted} messages came")
        found += consumer.receive(32, invisible_s) or []
    return found


def report_error(during: str, call: Callable[[], object]) -> None:
    """Call, and tell the error, or that there was none."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  # Every error is a fact here.
        code = getattr(error, "code", None)
        report_fact("error", during=during, code=code, type=type(error).__name__, text=str(error))
    else:
        report_fact("error", during=during, code=None, type="", text="")


# ------------------------------------------------------------ the scenarios


def round_trip(endpoints: list[str], topic: str, group: str) -> None:
    """Send messages of every kind and size, receive and ack them, and find nothing left."""
    sent = [
        message(topic, b"x"),
        message(topic, b"tagged", tag="tag"),
        message(topic, b"keyed", keys=("key-1", "key-2")),
        message(topic, b"with properties", properties={"name": "wert", "grün": "🌊 \\ \"'"}),
        *(message(topic, bytes([n]) * size) for n, size in enumerate((100, 65_536, 1 << 20))),
        message(topic, b"4" * (4 << 20)),
    ]
    [endpoint] = endpoints
    with producing(endpoint, topic) as producer, consuming(endpoint, group, topic) as consumer:
        for each in sent:
            receipt = producer.send(each)
            report_fact("sent", id=receipt.message_id, sha=hashlib.sha256(each.body).hexdigest())
        for received in receive(consumer, len(sent)):
            report_received(received)
            consumer.ack(received)
        report_fact("left", count=len(consumer.receive(32, INVISIBLE_S) or []))


def tls_round_trip(endpoints: list[str], topic: str, group: str, authority: str) -> None:
    """Send, receive and ack with TLS, one message after the other."""
    # The client trusts what gRPC does, and tells no other authority.
    os.environ["GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"] = authority
    [endpoint] = endpoints
    producer = Producer(configuration(endpoint), [topic], tls_enable=True)
    producer.startup()
    consumer = SimpleConsumer(
        configuration(endpoint), group, await_duration=AWAIT_S, tls_enable=True
    )
    consumer.startup()
    consumer.subscribe(topic, FilterExpression("*"))
    for number in range(TLS_MESSAGES):
        body = str(number).encode()
        receipt = producer.send(message(topic, body))
        report_fact("sent", id=receipt.message_id, sha=hashlib.sha256(body).hexdigest())
        for received in receive(consumer, 1):
            report_received(received)
            consumer.ack(received)
    consumer.shutdown()
    producer.shutdown()


def redelivery(endpoints: list[str], topic: str, group: str) -> None:
    """Let a delivery expire; then give one back, and see that its old handle is void."""
    [endpoint] = endpoints
    with producing(endpoint, topic) as producer, consuming(endpoint, group, topic) as consumer:
        producer.send(message(topic, b"expires"))
        [first] = receive(consumer, 1, invisible_s=2)
        popped_at = time.monotonic()
        report_received(first)
        [second] = receive(consumer, 1)
        report_received(second, after_s=time.monotonic() - popped_at)
        report_error("expired", lambda: consumer.ack(first))
        old = second.receipt_handle
        consumer.change_invisible_duration(second, 1)
        changed_at = time.monotonic()
        new = second.receipt_handle
        report_fact("changed", is_new=new != old)
        second.receipt_handle = old
        report_error("replaced", lambda: consumer.ack(second))
        [third] = receive(consumer, 1)
        report_received(third, after_s=time.monotonic() - changed_at)
        consumer.ack(third)


def extension(endpoints: list[str], topic: str, group: str) -> None:
    """Prolong a delivery beyond its first duration, and ack it then."""
    [endpoint] = endpoints
    with producing(endpoint, topic) as producer, consuming(endpoint, group, topic) as consumer:
        producer.send(message(topic, b"takes long"))
        [received] = receive(consumer, 1, invisible_s=2)
        consumer.change_invisible_duration(received, INVISIBLE_S)
        # The poll lasts longer than the first duration.
        report_fact("left", count=len(consumer.receive(32, INVISIBLE_S) or []))
        report_error("prolonged", lambda: consumer.ack(received))


def tag_filter(endpoints: list[str], topic: str, group: str) -> None:
    """Receive by tag."""
    [endpoint] = endpoints
    with producing(endpoint, topic) as producer:
        for tag in ("red", "green", "", "blue", "Red", "re"):
            producer.send(message(topic, f"is {tag}".encode(), tag=tag))
    with consuming(endpoint, group, topic, "red || blue") as consumer:
        for received in receive(consumer, 2):
            report_received(received)
            consumer.ack(received)
        report_fact("left", count=len(consumer.receive(32, INVISIBLE_S) or []))


def priorities(endpoints: list[str], topic: str, group: str) -> None:
    """Send several priorities, the lowest first; receive them."""
    [endpoint] = endpoints
    with producing(endpoint, topic) as producer:
        producer.send(message(topic, b"none"))
        for priority in (0, 1, 7, 100):
            one = message(topic, f"{priority}".encode())
            one.priority = priority
            producer.send(one)
    report_error("negative", lambda: setattr(message(topic, b"negative"), "priority", -1))
    with consuming(endpoint, group, topic) as consumer:
        for received in receive(consumer, 5):
            report_received(received, priority=received.priority)
            consumer.ack(received)


def fifo(endpoints: list[str], topic: str, group: str) -> None:
    """Send message groups in turn; receive them without acks, then with."""
    [endpoint] = endpoints
    with producing(endpoint, topic) as producer, consuming(endpoint, group, topic) as consumer:
        for n in range(12):
            name = f"group-{n % 3}"
            producer.send(message(topic, f"{name} {n}".encode(), group=name))
        popped = 0
        while popped < 12:
            batch = consumer.receive(4, 2) or []
            for received in batch:
                if received.delivery_attempt == 1 and received.body == b"group-0 3":
                    # Not acked: what follows it in its group must wait for it.
                    report_fact("skipped", body="group-0 3")
                    break
                report_received(received)
                consumer.ack(received)
                popped += 1


def push(endpoints: list[str], topic: str, group: str, messages: int) -> None:
    """Let a listener succeed, but for the first time it sees one of the messages."""
    [endpoint] = endpoints
    done: set[str] = set()
    is_done = threading.Event()

    def listen(received: Any) -> ConsumeResult:
        body = received.body.decode()
        succeeds = body != "2" or received.delivery_attempt > 1
        report_received(received, succeeds=succeeds)
        if not succeeds:
            return ConsumeResult.FAILURE
        done.add(body)
        if len(done) == messages:
            is_done.set()
        return ConsumeResult.SUCCESS

    with pushing(endpoint, group, topic, listen), producing(endpoint, topic) as producer:
        for n in range(messages):
            producer.send(message(topic, str(n).encode()))
        report_fact("done", is_done=is_done.wait(WAIT_S))
    with consuming(endpoint, group, topic) as consumer:
        report_fact("left", count=len(consumer.receive(32, INVISIBLE_S) or []))


def sql_push(endpoints: list[str], topic: str, group: str, sql: str) -> None:
    """Start a push consumer with a wrong SQL filter, and report the error of the start."""

    class Listener(MessageListener):  # type: ignore[misc]  # of a library without types
        def consume(self, _message: Any) -> ConsumeResult:
            return ConsumeResult.SUCCESS

    filters = {topic: FilterExpression(sql, SQL)}
    consumer = PushConsumer(configuration(endpoints[0]), group, Listener(), filters)
    report_error("start", consumer.startup)


def transaction(endpoints: list[str], topic: str) -> None:
    """Commit one message, roll one back, and let the checker decide about two others."""
    decided = threading.Semaphore(0)
    answers = {
        b"checked yes": TransactionResolution.COMMIT,
        b"checked no": TransactionResolution.ROLLBACK,
    }

    class Checker(TransactionChecker):  # type: ignore[misc]  # of a library without types
        def check(self, checked: Any) -> TransactionResolution:
            report_fact("checked", body=checked.body.decode(), id=checked.message_id)
            decided.release()
            return answers[checked.body]

    producer = Producer(configuration(endpoints[0]), (topic,), checker=Checker())
    producer.startup()
    try:
        for body in ("commit", "rollback", *(each.decode() for each in answers)):
            started = producer.begin_transaction()
            sent = producer.send(message(topic, body.encode()), started)
            report_fact("sent", id=sent.message_id, transaction=sent.transaction_id)
            if body == "commit":
                started.commit()
            elif body == "rollback":
                started.rollback()
        report_fact("done", is_done=all(decided.acquire(timeout=WAIT_S) for _ in answers))
        time.sleep(1)  # for the last decision, which the client sends after the check
    finally:
        producer.shutdown()


def dedup(endpoints: list[str], topic: str) -> None:
    """Send messages with one dedup key."""
    with producing(endpoints[0], topic) as producer:
        for body in ("first", "first", "another"):
            sent = producer.send(message(topic, body.encode(), properties={"dedup-key": "k"}))
            report_fact("sent", id=sent.message_id)


def push_fifo(endpoints: list[str], topic: str, group: str, messages: int) -> None:
    """Let a listener of an ordered group take its time with the first message of each group."""
    [endpoint] = endpoints
    bodies: list[str] = []
    is_done = threading.Event()

    def listen(received: Any) -> ConsumeResult:
        body = received.body.decode()
        report_received(received)
        bodies.append(body)
        if len(bodies) == messages:
            is_done.set()
        return ConsumeResult.SUCCESS

    with pushing(endpoint, group, topic, listen), producing(endpoint, topic) as producer:
        for n in range(messages):
            name = f"group-{n % 3}"
            producer.send(message(topic, f"{name} {n}".encode(), group=name))
        report_fact("done", is_done=is_done.wait(WAIT_S))


def dead_letter(endpoints: list[str], topic: str, group: str, attempts: int) -> None:
    """Refuse a message as often as its group permits, and read it from the dead-letter topic."""
    [endpoint] = endpoints
    with producing(endpoint, topic) as producer, consuming(endpoint, group, topic) as consumer:
        receipt = producer.send(message(topic, b"poison", tag="tag", properties={"a": "b"}))
        report_fact("sent", id=receipt.message_id)
        for _ in range(attempts):
            [received] = receive(consumer, 1)
            report_received(received)
            consumer.change_invisible_duration(received, 1)
    dead_letters = f"%DLQ%{group}"
    with consuming(endpoint, f"{group}-reader", dead_letters) as consumer:
        [received] = receive(consumer, 1)
        report_received(received)
        consumer.ack(received)


def replayed(endpoints: list[str], topic: str, group: str, other: str) -> None:
    """Receive and ack what both groups get: the one of the dead letter, and another one."""
    [endpoint] = endpoints
    for name in (group, other):
        with consuming(endpoint, name, topic) as consumer:
            [received] = receive(consumer, 1)
            report_received(received, by=name)
            consumer.ack(received)
            for more in consumer.receive(32, INVISIBLE_S) or []:
                report_received(more, by=name)


def repeated_dead_letter(endpoints: list[str], topic: str, group: str) -> None:
    """Have the client repeat the forward of a message, as after a lost answer, with one thread."""
    [endpoint] = endpoints
    is_forwarded, is_done = threading.Event(), threading.Event()

    class Listener(MessageListener):  # type: ignore[misc]  # of a library without types
        def consume(self, received: Any) -> ConsumeResult:
            report_received(received)
            if received.body == b"last":
                is_done.set()
                return ConsumeResult.SUCCESS
            # The client sends the same request after this failure.
            consumer._PushConsumer__forward_message_to_dead_letter_queue(received)
            is_forwarded.set()
            return ConsumeResult.FAILURE

    consumer = PushConsumer(
        configuration(endpoint),
        group,
        Listener(),
        {topic: FilterExpression("*")},
        consumption_thread_count=1,
    )
    consumer.startup()
    with producing(endpoint, topic) as producer:
        producer.send(message(topic, b"first", group="first"))
        report_fact("forwarded", is_forwarded=is_forwarded.wait(WAIT_S))
        producer.send(message(topic, b"last", group="last"))
    report_fact("done", is_done=is_done.wait(WAIT_S))
    if is_done.is_set():
        consumer.shutdown()  # Waits for its threads.


def two_endpoints(endpoints: list[str], topic: str, group: str) -> None:
    """Send, receive, renew and ack, each at another proxy than the call before."""
    one, other = endpoints
    with (
        producing(one, topic) as producer,
        consuming(one, group, topic) as here,
        consuming(other, group, topic) as there,
    ):
        producer.send(message(topic, b"1"))
        [received] = receive(there, 1)
        report_received(received)
        received.endpoints = here.client_configuration.rpc_endpoints
        here.change_invisible_duration(received, INVISIBLE_S)
        received.endpoints = there.client_configuration.rpc_endpoints
        report_error("ack elsewhere", lambda: there.ack(received))
        received.endpoints = here.client_configuration.rpc_endpoints
        report_error("ack again", lambda: here.ack(received))
        report_fact("left", count=len(here.receive(32, INVISIBLE_S) or []))


def outage(endpoints: list[str], topic: str, group: str, pids: list[int]) -> None:
    """Kill processes of the server one after the other, and go on with the same clients."""
    [endpoint] = endpoints
    arrived: set[str] = set()
    has_arrived = threading.Condition()

    def listen(received: Any) -> ConsumeResult:
        with has_arrived:
            arrived.add(received.body.decode())
            has_arrived.notify_all()
        return ConsumeResult.SUCCESS

    def send(producer: Producer, body: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                producer.send(message(topic, body.encode()))
            except Exception as error:  # Whatever an outage looks like.
                if time.monotonic() > deadline:
                    raise SystemExit(f"{body} could not be sent: {error}") from error
                time.sleep(0.1)
            else:
                return

    def expect(body: str) -> None:
        with has_arrived:
            is_there = has_arrived.wait_for(lambda: body in arrived, WAIT_S)
        report_fact("arrived", body=body, is_there=is_there)

    with pushing(endpoint, group, topic, listen), producing(endpoint, topic) as producer:
        send(producer, "before")
        expect("before")
        for n, pid in enumerate(pids):
            os.kill(pid, signal.SIGKILL)
            send(producer, f"after {n}")
            expect(f"after {n}")


def unknown_topic(endpoints: list[str], topic: str, group: str) -> None:
    """Use a topic that does not exist."""
    [endpoint] = endpoints
    with producing(endpoint) as producer:
        report_error("send", lambda: producer.send(message(topic, b"1")))
    consumer = SimpleConsumer(configuration(endpoint), group, await_duration=AWAIT_S)
    consumer.startup()
    report_error("subscribe", lambda: consumer.subscribe(topic))
    consumer.shutdown()


def delayed(endpoints: list[str], topic: str, group: str) -> None:
    """Schedule two messages, recall one, receive the other, and try to recall that too late."""
    [endpoint] = endpoints
    with producing(endpoint, topic) as producer:
        due_s = int(time.time()) + DELAY_S  # The client sends whole seconds.
        handles = []
        for body in (b"delivered", b"recalled"):
            made = message(topic, body)
            made.delivery_timestamp = due_s
            receipt = producer.send(made)
            handles.append(receipt.recall_handle)
            report_fact("sent", id=receipt.message_id, body=body.decode(), due_ms=due_s * 1000)
        for _ in range(2):
            report_fact("recalled", id=producer.recall_message(topic, handles[1]))
        with consuming(endpoint, group, topic) as consumer:
            [received] = receive(consumer, 1)
            at_ms = time.time() * 1000
            report_received(received, at_ms=at_ms, due_ms=received.delivery_timestamp)
            consumer.ack(received)
            # This client takes "not found" for no error; the id that it returns is empty then.
            report_fact("too late", id=producer.recall_message(topic, handles[0]))
            report_error("forged", lambda: producer.recall_message(topic, handles[0][:-1] + "!"))
            report_fact("left", count=len(consumer.receive(32, INVISIBLE_S) or []))


def namespaces(endpoints: list[str], topic: str, group: str, names: list[str]) -> None:
    """Send to one topic name in several namespaces; receive, retry and dead-letter in each."""
    [endpoint] = endpoints
    for namespace in names:
        with producing(endpoint, topic, namespace=namespace) as producer:
            for n in range(2):
                producer.send(message(topic, f"{namespace} {n}".encode(), tag="tag"))
    for namespace in names:
        with consuming(endpoint, group, topic, "tag", namespace=namespace) as consumer:
            for _ in range(2):
                for received in receive(consumer, 2):
                    shown = received.namespace
                    report_received(received, during="receive", of=namespace, shown=shown)
                    consumer.change_invisible_duration(received, 1)
            report_fact("left", of=namespace, count=len(consumer.receive(32, INVISIBLE_S) or []))
        dead_letters = f"%DLQ%{group}"
        with consuming(endpoint, f"{group}-d", dead_letters, namespace=namespace) as consumer:
            for received in receive(consumer, 2):
                shown = received.namespace
                report_received(received, during="dead letters", of=namespace, shown=shown)
                consumer.ack(received)


def recall_in_namespaces(endpoints: list[str], topic: str, group: str, names: list[str]) -> None:
    """Schedule a message per namespace; recall that of the second in the first, and in its own."""
    [endpoint] = endpoints
    first, second = names
    with (
        producing(endpoint, topic, namespace=first) as stranger,
        producing(endpoint, topic, namespace=second) as owner,
        consuming(endpoint, group, topic, namespace=first) as consumer,
        consuming(endpoint, group, topic, namespace=second) as empty,
    ):
        handles = []
        for producer, namespace in ((stranger, first), (owner, second)):
            made = message(topic, namespace.encode())
            made.delivery_timestamp = int(time.time()) + DELAY_S
            handles.append(producer.send(made).recall_handle)
        report_error("recall by a stranger", lambda: stranger.recall_message(topic, handles[1]))
        report_error("recall by the owner", lambda: owner.recall_message(topic, handles[1]))
        [received] = receive(consumer, 1)
        report_received(received)
        report_error("ack by a stranger", lambda: empty.ack(received))
        consumer.ack(received)
        report_fact("left", count=len(empty.receive(32, INVISIBLE_S) or []))


def push_in_namespaces(endpoints: list[str], topic: str, group: str, names: list[str]) -> None:
    """Run a push consumer of one group name per namespace beside each other."""
    [endpoint] = endpoints
    bodies: dict[str, list[str]] = {name: [] for name in names}
    is_done = threading.Event()

    def listen(namespace: str, received: Any) -> ConsumeResult:
        report_received(received, of=namespace)
        bodies[namespace].append(received.body.decode())
        if all(len(of_one) >= PUSHED for of_one in bodies.values()):
            is_done.set()
        return ConsumeResult.SUCCESS

    with ExitStack() as stack:
        for namespace in names:
            callback = partial(listen, namespace)
            stack.enter_context(pushing(endpoint, group, topic, callback, namespace))
        for namespace in names:
            with producing(endpoint, topic, namespace=namespace) as producer:
                for n in range(PUSHED):
                    producer.send(message(topic, f"{namespace} {n}".encode()))
        report_fact("done", is_done=is_done.wait(WAIT_S))


def lite(endpoints: list[str], topic: str) -> None:
    """Send a message to a lite topic."""
    made = message(topic, b"x")
    made.lite_topic = "one"
    with producing(endpoints[0], topic) as producer:
        report_error("send", lambda: producer.send(made))


def wrong_type(endpoints: list[str], normal: str, fifo: str) -> None:
    """Send what a topic does not take; the client knows it from the route, the server anyway."""
    [endpoint] = endpoints
    with producing(endpoint, normal, fifo) as producer:
        for topic, name in ((normal, "group"), (fifo, "")):
            made = message(topic, b"1", group=name)
            report_error(f"to {topic}", partial(producer.send, made))
        made = message(normal, b"1")
        made.delivery_timestamp = int(time.time()) + 60
        report_error("delayed", lambda: producer.send(made))


def consume_all(
    endpoints: list[str], topic: str, group: str, messages: int, receivers: int, wait_s: float
) -> None:
    """Receive and ack all that is there, with several polls at a time; tell how calls ended."""
    [endpoint] = endpoints
    lock = threading.Lock()
    ids: set[str] = set()
    ended: Counter[str] = Counter()
    received_bytes = 0
    began = last = time.monotonic()
    deadline = began + wait_s

    def count(during: str, call: Callable[[], Any]) -> Any:
        """Call, and count how that has ended."""
        try:
            result = call()
        except Exception as error:  # noqa: BLE001  # Every error is a fact here.
            outcome, result = f"{during}: {error}", None
        else:
            outcome = f"{during}: OK"
        with lock:
            ended[outcome] += 1
        return result

    def is_over() -> bool:
        return len(ids) >= messages or time.monotonic() > deadline

    def work(consumer: SimpleConsumer) -> None:
        nonlocal received_bytes, last
        while not is_over():
            for received in count("receive", lambda: consumer.receive(32, CONSUMED_S)) or []:
                with lock:
                    ids.add(received.message_id)
                    received_bytes += len(received.body)
                    last = time.monotonic()
                count("ack", partial(consumer.ack, received))

    with consuming(endpoint, group, topic, await_s=LONG_AWAIT_S) as consumer:
        threads = [
            threading.Thread(target=work, args=(consumer,), daemon=True) for _ in range(receivers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    report_fact(
        "consumed", messages=len(ids), bytes=received_bytes, ended=ended, tookS=last - began
    )


def stay(
    endpoints: list[str],
    topic: str,
    group: str,
    namespace: str = "",
    tags: str = "*",
    sql: str = "",
) -> None:
    """Consume until standard input ends; poison fails, and work is held until the process ends."""

    def listen(received: Any) -> ConsumeResult:
        report_received(received)
        if received.body == b"work":
            threading.Event().wait()
        return ConsumeResult.FAILURE if received.body == b"poison" else ConsumeResult.SUCCESS

    wanted = FilterExpression(sql, SQL) if sql else FilterExpression(tags)
    with (
        producing(endpoints[0], topic, namespace=namespace) as producer,
        pushing(endpoints[0], group, topic, listen, namespace, wanted),
    ):
        report_fact("ready")
        for line in sys.stdin:
            # A message to send, so that this process has something to measure.
            report_fact("sent", id=producer.send(message(topic, line.strip().encode())).message_id)


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
