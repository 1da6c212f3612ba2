"""Official clients that send, receive and ack while a command changes a release.

    python -m tests.kubernetes.steady_clients HOST:PORT [--senders 4] [--period-ms 20] -- COMMAND...

They run until shortly after the end of the command. The output is one line of JSON with the numbers
of sent and received messages, the errors at applications and the longest time without a send. Run
it in the cluster's network.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import threading
import time
from collections import Counter

from rocketmq import ClientConfiguration, Credentials, Message, Producer, SimpleConsumer

TOPIC, GROUP = "steady", "steady"
AFTER_S = 5.0  # Long enough for calls in flight.
DRAIN_S = 30.0  # For the last messages to arrive.


class Clients:
    """Some producers and a consumer, with their results."""

    def __init__(self, endpoint: str, senders: int, period_s: float) -> None:
        self._configuration = ClientConfiguration(endpoint, Credentials())
        self._period_s = period_s
        self._senders = senders
        self.stop = threading.Event()
        self.sent: dict[str, float] = {}
        self.received: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.sent_at_s: list[float] = []

    def run(self, command: list[str]) -> int:
        """Run the command while the clients work; return its exit status."""
        threads = [
            threading.Thread(target=self._send, args=(number,), daemon=True)
            for number in range(self._senders)
        ]
        receiving = threading.Thread(target=self._receive, daemon=True)
        for thread in (*threads, receiving):
            thread.start()
        time.sleep(AFTER_S)
        status = subprocess.run(command, check=False).returncode
        time.sleep(AFTER_S)
        self.stop.set()
        for thread in threads:
            thread.join()
        receiving.join()
        return status

    def _send(self, number: int) -> None:
        producer = Producer(self._configuration, (TOPIC,))
        producer.startup()
        count = 0
        while not self.stop.is_set():
            count += 1
            message = Message()
            message.topic = TOPIC
            message.body = f"{number}-{count}".encode()
            try:
                producer.send(message)
            except Exception as error:  # noqa: BLE001  # Whatever an application would see.
                self.errors[f"send: {error}"[:160]] += 1
            else:
                now = time.monotonic()
                self.sent[f"{number}-{count}"] = now
                self.sent_at_s.append(now)
            time.sleep(self._period_s)
        producer.shutdown()

    def _receive(self) -> None:
        consumer = SimpleConsumer(self._configuration, GROUP)
        consumer.startup()
        consumer.subscribe(TOPIC)
        until_s = float("inf")
        while time.monotonic() < until_s and not (
            self.stop.is_set() and self.sent.keys() <= self.received.keys()
        ):
            if self.stop.is_set() and until_s == float("inf"):
                until_s = time.monotonic() + DRAIN_S
            try:
                for message in consumer.receive(32, 30):
                    self.received[message.body.decode()] += 1
                    consumer.ack(message)
            except Exception as error:  # noqa: BLE001  # Whatever an application would see.
                self.errors[f"receive: {error}"[:160]] += 1
                time.sleep(self._period_s)
        consumer.shutdown()

    def summary(self) -> dict[str, object]:
        """Return the results."""
        times = sorted(self.sent_at_s)
        gaps = [after - before for before, after in itertools.pairwise(times)]
        return {
            "sent": len(self.sent),
            "lost": len(self.sent.keys() - self.received.keys()),
            "twice": sum(count > 1 for count in self.received.values()),
            "application_errors": dict(self.errors),
            "longest_without_a_send_ms": round(max(gaps, default=0) * 1000),
        }


def main() -> None:
    """Run the clients and the command, and print the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("--senders", type=int, default=4)
    parser.add_argument("--period-ms", type=int, default=20)
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    clients = Clients(given.endpoint, given.senders, given.period_ms / 1000)
    status = clients.run(given.command)
    print(json.dumps({"status": status, **clients.summary()}, indent=1))


if __name__ == "__main__":
    main()
