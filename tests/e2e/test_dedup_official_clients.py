"""Official clients repeat sends after lost answers: a topic with deduplication stores each once.

A relay between each client and the proxy passes requests and loses answers. The client then sends
the message again with the same message id. Each client sends to two topics, with and without
deduplication, and loses answers of both. The second topic proves that the clients send again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import grpc

from tests.support.clients.client_process import (
    GO_PROGRAM,
    JAVA_CLASSES,
    NODE_PACKAGES,
    Fact,
    needs,
)
from tests.support.clients.disturbed_clients import client_commands
from tests.support.clients.looping_clients import LoopingClient
from tests.support.clients.pulling import PullClient
from tests.support.eventually import eventually
from tests.support.processes.processes import standalone
from tests.support.processes.tcp_links import BACK, Link, tcp_links
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

pytestmark = [needs("node", NODE_PACKAGES), needs("go", GO_PROGRAM), needs("java", JAVA_CLASSES)]

WITH, WITHOUT = TOPICS = ("normal", "filtered")  # with and without deduplication
LOSSES: Final = 4  # of each client and topic
HOUR_MS: Final = 3_600_000  # longer than the test on any machine


class StoredMessage(NamedTuple):
    """A message in the log."""

    key: str
    message_id: str


class Log:
    """The messages of one queue of a topic, in the order of the log."""

    def __init__(self, client: PullClient, topic: str) -> None:
        self._client = client
        self._topic = topic
        self._found: list[StoredMessage] = []

    def read(self) -> list[StoredMessage]:
        """Return all stored messages."""
        while messages := self._pull():
            self._found += [
                StoredMessage(one.body.decode(), one.system_properties.message_id)
                for one in messages
            ]
        return self._found

    def keys_of(self, client: LoopingClient) -> set[str]:
        """Return the keys of a client's stored messages."""
        return {one.key for one in self.read() if one.key.startswith(f"{client.name}/")}

    def _pull(self) -> list[v2.Message]:
        answer = self._client.pull(self._topic, len(self._found))
        assert answer.code in (v2.OK, v2.MESSAGE_NOT_FOUND), answer
        return answer.messages


class LossyClients:
    """Clients behind relays, and the topics that they send to."""

    def __init__(self, links: Mapping[LoopingClient, Link], logs: Mapping[str, Log]) -> None:
        self._links = links
        self._logs = logs

    def lose_answers(self) -> None:
        """Lose the answer to one send of each client to each topic. Wait for later sends."""
        for link in self._links.values():
            link.cut(BACK)
        eventually(lambda: all(map(self._waits_for_answers, self._links)))
        for link in self._links.values():
            link.reset()
            link.heal()
        ended = {client: len(sends_of(client)) for client in self._links}
        # One more send of each topic than those that wait for an answer.
        self.all_clients(lambda one: len(sends_of(one)) >= ended[one] + 2 * len(TOPICS))

    def _waits_for_answers(self, client: LoopingClient) -> bool:
        """Return whether a message of each topic is stored without an answer."""
        ended = {fact["key"] for fact in sends_of(client)}
        return all(log.keys_of(client) - ended for log in self._logs.values())

    def stop_sending(self) -> None:
        """Stop all sends, and wait for the last answers."""
        for client in self._links:
            client.stop_sending()
        self.all_clients(lambda one: one.report.line_counts["stopped"] > 0)

    def all_clients(self, check: Callable[[LoopingClient], bool]) -> None:
        """Wait until `check` holds for each client."""
        eventually(lambda: all(map(check, self._links)))


def sends_of(client: LoopingClient) -> list[Fact]:
    """Return the sends that have returned to the application."""
    return [fact for fact in list(client.report.facts) if fact["fact"] == "send"]


def repeated_keys(log: Log, client: LoopingClient) -> list[str]:
    """Return the keys that a client's messages have in common."""
    counts = Counter(one.key for one in log.read())
    return [key for key in log.keys_of(client) if counts[key] > 1]


def test_lost_answers_to_official_clients_store_no_message_twice(tmp_path: Path) -> None:
    clients: dict[LoopingClient, Link] = {}
    with (
        standalone(tmp_path / "data") as running,
        tcp_links() as links,
        grpc.insecure_channel(running.grpc) as channel,
    ):
        running.put(f"topics/{WITH}", queues=1, dedup={"windowMs": HOUR_MS, "keyFrom": "messageId"})
        running.put(f"topics/{WITHOUT}", queues=1)
        logs = {topic: Log(PullClient(channel), topic) for topic in TOPICS}
        try:
            for name, command in client_commands(tmp_path).items():
                link = links.make(running.grpc)
                client = LoopingClient(name, command, link.address, tmp_path / name, TOPICS)
                clients[client] = link
            lossy = LossyClients(clients, logs)
            lossy.all_clients(lambda one: one.report.line_counts["ready"] > 0)
            for _ in range(LOSSES):
                lossy.lose_answers()
            lossy.stop_sending()
        finally:
            for client in clients:
                client.kill()
        twice = {client.name: repeated_keys(logs[WITH], client) for client in clients}
        assert not any(twice.values()), twice
        ids = {one.key: one.message_id for one in logs[WITH].read()}
        for client in clients:
            answered = [one for one in sends_of(client) if not one["error"]]
            for sent in answered:
                assert sent["topic"] == WITHOUT or ids[sent["key"]] == sent["id"], client.name
            assert repeated_keys(logs[WITHOUT], client), client.name
        # Each client has lost answers, so each has sent messages again.
        assert running.get(f"topics/{WITH}/dedup")["hits"] >= len(clients)
