"""The demonstration of `make demo`: the official Python client against `tidemill standalone`.

The standalone runs on free ports in a temporary folder. The unmodified client runs in a second
process. It sends and acks 1,000 messages, lets some expire, gives one back, rejects one until it is
a dead letter, and delays some. It reschedules one delayed message and recalls another. Each step is
a row of the printed table. The exit status is 0 if all steps succeed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rocketmq import Message, Producer, SimpleConsumer

MESSAGES = 1_000
UNACKED = 5  # messages that are received and expire
EXPIRY_S = 3  # their invisible duration
LONG_S = 60  # invisible duration of all others: longer than the demonstration
MAX_ATTEMPTS = 2  # of the consumer group that rejects a message
DAY_S = 24 * 3600
WAIT_S = 30.0  # limit of one step, on a slow machine
START_S = 30.0
CLIENT_S = 120.0
POLL_S = 3  # the shortest poll of this client; a message ends the poll at once
TOPIC, GROUP, STRICT_TOPIC, STRICT_GROUP = "demo", "demo", "demo-strict", "demo-strict"
DELAYED_TOPIC, DELAYED_GROUP = "demo-delayed", "demo-delayed"


class DemoFailed(Exception):
    """A failed step; the message names the failure."""


# ------------------------------------------------------------ the process that prints


def main() -> int:
    """Run the demonstration; return the exit status."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 100)
    with tempfile.TemporaryDirectory(prefix="tidemill-demo-") as folder:
        log = Path(folder) / "standalone.log"
        try:
            with standalone(Path(folder), log) as ready:
                limit_attempts(ready["admin"])
                show(console, ready, Path(folder))
        except DemoFailed as failure:
            console.print(f"\n[bold red]The demonstration failed:[/] {failure}", highlight=False)
            if log.exists() and (lines := log.read_text(errors="replace").strip()):
                console.print("The end of the log of the standalone:", lines[-2000:], markup=False)
            return 1
    return 0


@contextlib.contextmanager
def standalone(folder: Path, log: Path) -> Iterator[dict[str, str]]:
    """Run a standalone for the block; yield its ready line and its start time."""
    flags = [f"--data-dir={folder / 'data'}", "--grpc-port=0", "--admin-port=0", "--metrics-port=0"]
    began = time.monotonic()
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "tidemill", "standalone", "--log-level=warning", *flags],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert process.stdout is not None
    watchdog = threading.Timer(START_S, process.kill)
    watchdog.start()
    try:
        line = process.stdout.readline()
        watchdog.cancel()
        if not line:
            raise DemoFailed("the standalone did not start")
        yield {**json.loads(line), "took": f"{time.monotonic() - began:.1f} s"}
    finally:
        watchdog.cancel()
        process.send_signal(signal.SIGTERM)
        process.wait()
        process.stdout.close()


def limit_attempts(admin: str) -> None:
    """Create the consumer group that gives up a message after a few attempts."""
    import httpx

    try:
        with httpx.Client(base_url=f"{admin}/api/v1", trust_env=False) as client:
            group = {"maxAttempts": MAX_ATTEMPTS}
            client.put(f"/groups/{STRICT_GROUP}", json=group).raise_for_status()
    except httpx.HTTPError as error:
        raise DemoFailed(f"the admin API did not create a consumer group: {error}") from error


def show(console, ready: dict[str, str], folder: Path) -> None:
    """Run the client and print each step when it ends."""
    from rich import box
    from rich.live import Live
    from rich.table import Table

    table = Table(
        title="Tidemill with the official RocketMQ client for Python", box=box.SIMPLE_HEAD
    )
    table.add_column("step")
    table.add_column("messages", justify="right")
    table.add_column("time", justify="right")
    table.add_column("result")
    table.add_row("standalone started", "", ready["took"], f"gRPC at {ready['grpc']}")
    with Live(table, console=console, transient=False) as live, client(ready, folder) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            step = json.loads(line)
            table.add_row(step["name"], f"{step['messages']:,}", step["time"], step["result"])
            live.refresh()
    if not console.is_terminal:
        console.print()  # Only on a terminal, a live table ends its last line.
    if process.returncode:
        raise DemoFailed((folder / "client.log").read_text().strip() or "the client ended early")
    console.print("[bold green]All steps succeeded.[/]")


@contextlib.contextmanager
def client(ready: dict[str, str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the client; wait for its end when the block ends."""
    with (folder / "client.log").open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, __file__, ready["grpc"], ready["admin"]],
            # The client writes its log below its home folder.
            env={**os.environ, "HOME": str(folder)},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    watchdog = threading.Timer(CLIENT_S, process.kill)
    watchdog.start()
    try:
        yield process
        process.wait()
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()


# ------------------------------------------------------------ the process of the client


def run_client(endpoint: str, admin: str) -> int:
    """Run all steps against the proxy at `endpoint`; return the exit status."""
    try:
        from rocketmq import ClientConfiguration, Credentials, Producer, SimpleConsumer
    except ImportError:
        sys.stderr.write("the official client is not installed; run `make demo`\n")
        return 1

    configuration = ClientConfiguration(endpoint, Credentials())
    producer = Producer(configuration, (TOPIC, STRICT_TOPIC, DELAYED_TOPIC))
    producer.startup()
    consumers = []

    def consumer_of(group: str, topic: str) -> SimpleConsumer:
        consumer = SimpleConsumer(configuration, group, await_duration=POLL_S)
        consumer.startup()
        consumers.append(consumer)
        consumer.subscribe(topic)
        return consumer

    try:
        consumer = consumer_of(GROUP, TOPIC)
        send(producer, MESSAGES)
        receive_and_ack(consumer)
        expire(producer, consumer)
        give_back(producer, consumer)
        reject(producer, consumer_of(STRICT_GROUP, STRICT_TOPIC))
        read_dead_letter(consumer_of("demo-dead-letters", f"%DLQ%{STRICT_GROUP}"))
        delay(producer, consumer_of(DELAYED_GROUP, DELAYED_TOPIC), admin)
    except DemoFailed as failure:
        sys.stderr.write(f"{failure}\n")
        return 1
    except Exception as error:  # noqa: BLE001  # The client raises bare exceptions too.
        sys.stderr.write(f"the client raised {type(error).__name__}: {error}\n")
        return 1
    finally:
        for each in (*consumers, producer):
            each.shutdown()
    return 0


def send(producer: Producer, count: int) -> None:
    """Send `count` messages concurrently."""
    with step("sent", count) as note:
        receipts = [producer.send_async(message(TOPIC, f"hello {n}")) for n in range(count)]
        ids = {receipt.result(WAIT_S).message_id for receipt in receipts}
        expect(len(ids) == count, f"{count} messages were sent, but {len(ids)} were stored")
        note("each on disk before its reply")


def receive_and_ack(consumer: SimpleConsumer) -> None:
    """Receive each message once and ack it."""
    bodies: list[str] = []
    with step("received and acked", MESSAGES) as note, ThreadPoolExecutor(16) as pool:
        for batch in receiving(consumer, MESSAGES, LONG_S):
            bodies += [each.body.decode() for each in batch]
            list(pool.map(consumer.ack, batch))
        expect(len(set(bodies)) == len(bodies) == MESSAGES, "a message was lost or duplicated")
        note("each exactly once")


def expire(producer: Producer, consumer: SimpleConsumer) -> None:
    """Receive messages without an ack; receive them again when they expire."""
    for n in range(UNACKED):
        producer.send(message(TOPIC, f"unacked {n}"))
    with step("received, not acked", UNACKED) as note:
        first = collect(consumer, UNACKED, EXPIRY_S)
        note(f"invisible for {EXPIRY_S} s")
    with step("redelivered and acked", UNACKED) as note:
        again = collect(consumer, UNACKED, LONG_S)
        expect(
            {each.message_id for each in first} == {each.message_id for each in again},
            "the redelivered messages are not those that expired",
        )
        attempts = {each.delivery_attempt for each in again}
        expect(attempts == {2}, f"the delivery attempts were {attempts}, not 2")
        for each in again:
            consumer.ack(each)
        note("delivery attempt 2")


def give_back(producer: Producer, consumer: SimpleConsumer) -> None:
    """Give one message back and receive it again."""
    producer.send(message(TOPIC, "not now"))
    [first] = collect(consumer, 1, LONG_S)
    with step("given back, redelivered, acked", 1) as note:
        consumer.change_invisible_duration(first, 1)
        [again] = collect(consumer, 1, LONG_S)
        expect(again.message_id == first.message_id, "a different message arrived")
        consumer.ack(again)
        note(f"after 1 s, delivery attempt {again.delivery_attempt}")


def reject(producer: Producer, consumer: SimpleConsumer) -> None:
    """Give one message back at each attempt that its consumer group allows."""
    producer.send(message(STRICT_TOPIC, "poison"))
    with step(f"rejected {MAX_ATTEMPTS} times", 1) as note:
        for _ in range(MAX_ATTEMPTS):
            [received] = collect(consumer, 1, LONG_S)
            consumer.change_invisible_duration(received, 1)
        expect(not consumer.receive(1, LONG_S), f"it arrived more than {MAX_ATTEMPTS} times")
        note("the limit of its consumer group")


def read_dead_letter(consumer: SimpleConsumer) -> None:
    """Receive the message from the dead-letter topic."""
    with step("read as a dead letter", 1) as note:
        [dead] = collect(consumer, 1, LONG_S)
        expect(dead.body == b"poison", f"the body of the dead letter is {dead.body!r}")
        consumer.ack(dead)
        note(f"in {dead.topic}")


def delay(producer: Producer, consumer: SimpleConsumer, admin: str) -> None:
    """Delay messages, reschedule one, recall one, and receive the others when they are due."""
    # The client uses whole seconds.
    now_s = int(time.time())
    due_at_s = {
        "first": now_s + 3,
        "second": now_s + 4,
        "recalled": now_s + 4,
        "moved": now_s + DAY_S,
    }
    with step("delayed", len(due_at_s)) as note:
        receipts = {}
        for body, at_s in due_at_s.items():
            made = message(DELAYED_TOPIC, body)
            made.delivery_timestamp = at_s
            receipts[body] = producer.send(made)
        note("three by seconds, one by a day")
    due_at_ms = {body: at_s * 1000 for body, at_s in due_at_s.items()}
    with step("recalled", 1) as note:
        receipt = receipts["recalled"]
        recalled_id = producer.recall_message(DELAYED_TOPIC, receipt.recall_handle)
        expect(
            recalled_id == receipt.message_id,
            f"{recalled_id} was recalled, not {receipt.message_id}",
        )
        note("it is not delivered")
    with step("rescheduled over REST", 1) as note:
        message_id = receipts["moved"].message_id
        due_at_ms["moved"] = reschedule(admin, message_id, (now_s + 5) * 1000)
        note("from a day to 5 s")
    del due_at_ms["recalled"]
    with step("delivered when due, acked", len(due_at_ms)) as note:
        late_ms: dict[str, int] = {}
        for batch in receiving(consumer, len(due_at_ms), LONG_S):
            at_ms = int(time.time() * 1000)
            for each in batch:
                body = each.body.decode()
                expect(body in due_at_ms, f"the recalled message {body!r} was delivered")
                late_ms[body] = at_ms - due_at_ms[body]
                consumer.ack(each)
        expect(min(late_ms.values()) >= 0, f"a message was delivered early: {late_ms}")
        note("late: " + ", ".join(f"{body} {late} ms" for body, late in late_ms.items()))


def reschedule(admin: str, message_id: str, due_at_ms: int) -> int:
    """Change the due time of a delayed message; return the new time."""
    import httpx

    try:
        with httpx.Client(base_url=f"{admin}/api/v1", trust_env=False) as client:
            waiting = client.get("/timers", params={"topic": DELAYED_TOPIC}).raise_for_status()
            [timer] = [each for each in waiting.json()["timers"] if each["messageId"] == message_id]
            answer = client.post(
                f"/timers/{timer['timerId']}:reschedule", json={"dueAtMs": due_at_ms}
            ).raise_for_status()
    except httpx.HTTPError as error:
        raise DemoFailed(f"the admin API did not reschedule a message: {error}") from error
    new_due_at_ms: int = answer.json()["dueAtMs"]
    return new_due_at_ms


@contextlib.contextmanager
def step(name: str, messages: int) -> Iterator[Callable[[str], None]]:
    """Time a step and report it to the printing process; yield a function that takes the result."""
    began = time.monotonic()
    notes: list[str] = []
    yield notes.append
    took_s = time.monotonic() - began
    row = {"name": name, "messages": messages, "time": f"{took_s:.1f} s", "result": notes[0]}
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def collect(consumer: SimpleConsumer, count: int, invisible_s: int) -> list[Message]:
    """Receive `count` messages."""
    batches = list(receiving(consumer, count, invisible_s))
    messages = [each for batch in batches for each in batch]
    expect(len(messages) == count, f"{len(messages)} messages arrived, not {count}")
    return messages


def receiving(consumer: SimpleConsumer, count: int, invisible_s: int) -> Iterator[list[Message]]:
    """Yield batches until `count` messages have arrived; fail after `WAIT_S`."""
    deadline = time.monotonic() + WAIT_S
    received = 0
    while received < count:
        expect(time.monotonic() < deadline, f"messages did not arrive within {WAIT_S:.0f} s")
        batch = consumer.receive(32, invisible_s) or []
        received += len(batch)
        yield batch


def expect(is_true: bool, failure: str) -> None:
    """Fail the demonstration unless `is_true`."""
    if not is_true:
        raise DemoFailed(failure)


def message(topic: str, body: str) -> Message:
    """Build a message."""
    from rocketmq import Message

    made = Message()
    made.topic = topic
    made.body = body.encode()
    return made


if __name__ == "__main__":
    sys.exit(run_client(*sys.argv[1:3]) if len(sys.argv) > 1 else main())
