"""Show Tidemill at work through the official Python client, for `make demo`.

Starts `tidemill standalone` on free ports in a folder of its own and drives the unmodified client
in a process of its own: sends and acks a thousand messages, lets some expire, gives one back,
refuses one until it is a dead letter, and delays some, of which one is moved and one is recalled.
Prints what happened as a table, and ends with status 0 only if all of it did.
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
FORGOTTEN = 5  # of them more, that are received and not acked
EXPIRY_S = 3  # invisible duration of those
LONG_S = 60  # invisible duration of all others: longer than the demonstration
MAX_ATTEMPTS = 2  # of the group whose message dies
DAY_S = 24 * 3600
WAIT_S = 30.0  # for any step, on a slow machine
START_S = 30.0
CLIENT_S = 120.0
POLL_S = 3  # a poll's least time for this client; a message ends it at once
TOPIC, GROUP, STRICT_TOPIC, STRICT_GROUP = "demo", "demo", "demo-strict", "demo-strict"
DELAYED_TOPIC, DELAYED_GROUP = "demo-delayed", "demo-delayed"


class DemoFailed(Exception):
    """Something did not happen; the message says what."""


# ------------------------------------------------------------ the process that shows


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
            if log.exists() and (said := log.read_text(errors="replace").strip()):
                console.print("The end of the log of the standalone:", said[-2000:], markup=False)
            return 1
    return 0


@contextlib.contextmanager
def standalone(folder: Path, log: Path) -> Iterator[dict[str, str]]:
    """Run a standalone for the block; yield its ready line and the time that it took."""
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
    """Make the group whose messages die after a few attempts."""
    import httpx

    try:
        with httpx.Client(base_url=f"{admin}/api/v1", trust_env=False) as client:
            group = {"maxAttempts": MAX_ATTEMPTS}
            client.put(f"/groups/{STRICT_GROUP}", json=group).raise_for_status()
    except httpx.HTTPError as error:
        raise DemoFailed(f"the admin API did not make a group: {error}") from error


def show(console, ready: dict[str, str], folder: Path) -> None:
    """Run the client and show its steps as they come."""
    from rich import box
    from rich.live import Live
    from rich.table import Table

    table = Table(title="Tidemill, by the official RocketMQ client for Python", box=box.SIMPLE_HEAD)
    table.add_column("what happened")
    table.add_column("messages", justify="right")
    table.add_column("time", justify="right")
    table.add_column("seen")
    table.add_row("standalone started", "", ready["took"], f"gRPC at {ready['grpc']}")
    with Live(table, console=console, transient=False) as live, client(ready, folder) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            step = json.loads(line)
            table.add_row(step["what"], f"{step['messages']:,}", step["time"], step["seen"])
            live.refresh()
    if not console.is_terminal:
        console.print()  # A live table ends its last line on terminals only.
    if process.returncode:
        raise DemoFailed((folder / "client.log").read_text().strip() or "the client ended early")
    console.print("[bold green]All of it happened as it should.[/]")


@contextlib.contextmanager
def client(ready: dict[str, str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the client for the block, and to its end."""
    with (folder / "client.log").open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, __file__, ready["grpc"], ready["admin"]],
            # The client logs below its home folder; it shall leave nothing behind.
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
    """Be the client; return the exit status."""
    try:
        from rocketmq import ClientConfiguration, Credentials, Producer, SimpleConsumer
    except ImportError:
        sys.stderr.write("the official client is not installed; run it by `make demo`\n")
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
        die(producer, consumer_of(STRICT_GROUP, STRICT_TOPIC))
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
    """Send many at once."""
    with step("sent", count) as seen:
        receipts = [producer.send_async(message(TOPIC, f"hello {n}")) for n in range(count)]
        ids = {receipt.result(WAIT_S).message_id for receipt in receipts}
        expect(len(ids) == count, f"{count} messages were sent and {len(ids)} were stored")
        seen("each durable before its answer")


def receive_and_ack(consumer: SimpleConsumer) -> None:
    """Receive all of them, each once, and ack them."""
    bodies: list[str] = []
    with step("received and acked", MESSAGES) as seen, ThreadPoolExecutor(16) as pool:
        for batch in receiving(consumer, MESSAGES, LONG_S):
            bodies += [each.body.decode() for each in batch]
            list(pool.map(consumer.ack, batch))
        expect(len(set(bodies)) == len(bodies) == MESSAGES, "not every message came exactly once")
        seen("every one exactly once")


def expire(producer: Producer, consumer: SimpleConsumer) -> None:
    """Receive some and do nothing, until they come back."""
    for n in range(FORGOTTEN):
        producer.send(message(TOPIC, f"forgotten {n}"))
    with step("received and forgotten", FORGOTTEN) as seen:
        first = collect(consumer, FORGOTTEN, EXPIRY_S)
        seen(f"invisible for {EXPIRY_S} s")
    with step("came back, acked", FORGOTTEN) as seen:
        again = collect(consumer, FORGOTTEN, LONG_S)
        expect(
            {each.message_id for each in first} == {each.message_id for each in again},
            "other messages came back than were forgotten",
        )
        attempts = {each.delivery_attempt for each in again}
        expect(attempts == {2}, f"their delivery attempts were {attempts}, not 2")
        for each in again:
            consumer.ack(each)
        seen("delivery attempt 2")


def give_back(producer: Producer, consumer: SimpleConsumer) -> None:
    """Receive one and make it visible again."""
    producer.send(message(TOPIC, "not now"))
    [first] = collect(consumer, 1, LONG_S)
    with step("given back, came again, acked", 1) as seen:
        consumer.change_invisible_duration(first, 1)
        [again] = collect(consumer, 1, LONG_S)
        expect(again.message_id == first.message_id, "another message came")
        consumer.ack(again)
        seen(f"after 1 s, delivery attempt {again.delivery_attempt}")


def die(producer: Producer, consumer: SimpleConsumer) -> None:
    """Give one back as often as its group permits."""
    producer.send(message(STRICT_TOPIC, "poison"))
    with step(f"refused {MAX_ATTEMPTS} times", 1) as seen:
        for _ in range(MAX_ATTEMPTS):
            [received] = collect(consumer, 1, LONG_S)
            consumer.change_invisible_duration(received, 1)
        expect(not consumer.receive(1, LONG_S), "it came once more than its group permits")
        seen("as its group permits; then no more")


def read_dead_letter(consumer: SimpleConsumer) -> None:
    """Find the message in the dead-letter topic."""
    with step("read as a dead letter", 1) as seen:
        [dead] = collect(consumer, 1, LONG_S)
        expect(dead.body == b"poison", f"the dead letter says {dead.body!r}")
        consumer.ack(dead)
        seen(f"in {dead.topic}")


def delay(producer: Producer, consumer: SimpleConsumer, admin: str) -> None:
    """Delay some messages; move one, recall one, and receive the others when they are due."""
    # The client counts in whole seconds.
    now_s = int(time.time())
    due_at_s = {
        "first": now_s + 3,
        "second": now_s + 4,
        "recalled": now_s + 4,
        "moved": now_s + DAY_S,
    }
    with step("delayed", len(due_at_s)) as seen:
        receipts = {}
        for body, at_s in due_at_s.items():
            made = message(DELAYED_TOPIC, body)
            made.delivery_timestamp = at_s
            receipts[body] = producer.send(made)
        seen("three by seconds, one by a day")
    due_at_ms = {body: at_s * 1000 for body, at_s in due_at_s.items()}
    with step("moved over REST", 1) as seen:
        due_at_ms["moved"] = move(admin, receipts["moved"].message_id, (now_s + 5) * 1000)
        seen("from a day to 5 s")
    with step("recalled", 1) as seen:
        recalled = receipts["recalled"]
        told = producer.recall_message(DELAYED_TOPIC, recalled.recall_handle)
        expect(told == recalled.message_id, f"{told} was recalled, not {recalled.message_id}")
        seen("it will not come")
    del due_at_ms["recalled"]
    with step("came when due, acked", len(due_at_ms)) as seen:
        late_ms: dict[str, int] = {}
        for batch in receiving(consumer, len(due_at_ms), LONG_S):
            at_ms = int(time.time() * 1000)
            for each in batch:
                body = each.body.decode()
                expect(body in due_at_ms, f"the message {body!r} came, which was recalled")
                late_ms[body] = at_ms - due_at_ms[body]
                consumer.ack(each)
        expect(min(late_ms.values()) >= 0, f"a message came early: {late_ms}")
        seen("late: " + ", ".join(f"{body} {late} ms" for body, late in late_ms.items()))


def move(admin: str, message_id: str, due_at_ms: int) -> int:
    """Let a delayed message be due at another time; return when it is."""
    import httpx

    try:
        with httpx.Client(base_url=f"{admin}/api/v1", trust_env=False) as client:
            waiting = client.get("/timers", params={"topic": DELAYED_TOPIC}).raise_for_status()
            [timer] = [each for each in waiting.json()["timers"] if each["messageId"] == message_id]
            answer = client.post(
                f"/timers/{timer['timerId']}:reschedule", json={"dueAtMs": due_at_ms}
            ).raise_for_status()
    except httpx.HTTPError as error:
        raise DemoFailed(f"the admin API did not move a message: {error}") from error
    moved: int = answer.json()["dueAtMs"]
    return moved


@contextlib.contextmanager
def step(what: str, messages: int) -> Iterator[Callable[[str], None]]:
    """Time a step and tell it to the process that shows."""
    began = time.monotonic()
    notes: list[str] = []
    yield notes.append
    took_s = time.monotonic() - began
    told = {"what": what, "messages": messages, "time": f"{took_s:.1f} s", "seen": notes[0]}
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def collect(consumer: SimpleConsumer, count: int, invisible_s: int) -> list[Message]:
    """Receive `count` messages."""
    batches = list(receiving(consumer, count, invisible_s))
    found = [each for batch in batches for each in batch]
    expect(len(found) == count, f"{len(found)} messages came, not {count}")
    return found


def receiving(consumer: SimpleConsumer, count: int, invisible_s: int) -> Iterator[list[Message]]:
    """Yield batches until there are `count` messages; fail when they take too long."""
    deadline = time.monotonic() + WAIT_S
    received = 0
    while received < count:
        expect(time.monotonic() < deadline, f"messages did not arrive within {WAIT_S:.0f} s")
        batch = consumer.receive(32, invisible_s) or []
        received += len(batch)
        yield batch


def expect(is_so: bool, otherwise: str) -> None:
    """End the demonstration unless what was promised is so."""
    if not is_so:
        raise DemoFailed(otherwise)


def message(topic: str, body: str) -> Message:
    """Make a message."""
    from rocketmq import Message

    made = Message()
    made.topic = topic
    made.body = body.encode()
    return made


if __name__ == "__main__":
    sys.exit(run_client(*sys.argv[1:3]) if len(sys.argv) > 1 else main())
