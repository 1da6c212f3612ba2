"""Pulls while brokers are killed, replaced by another replica, and delete old messages."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import grpc
import httpx
import pytest

from tests.support.clients.pulling import PullAnswer, PullClient
from tests.support.eventually import eventually
from tests.support.processes.killing import child_pid
from tests.support.processes.processes import Standalone, standalone
from tests.support.processes.replicated_standalone import FLAGS, ReplicatedStandalone, send_signal
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2_grpc

TOPIC, GROUP = "kept", "keepers"
PATIENCE_S = 60.0  # The longest restart of a killed broker.
STARTS_S = 60.0
MESSAGES = 60  # Between two faults.


@contextlib.contextmanager
def connected(running: Standalone) -> Iterator[PullClient]:
    with grpc.insecure_channel(running.grpc) as channel:
        yield PullClient(channel)


class Sender:
    """A client that sends one message after the other and records the stored offsets."""

    def __init__(self, running: Standalone) -> None:
        self.stored: dict[int, bytes] = {}  # by offset
        self._running = running
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_over.set()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        with connected(self._running) as client:
            number = 0
            while not self._is_over.is_set():
                number += 1
                with contextlib.suppress(grpc.RpcError, AssertionError):
                    body = b"m%d" % number
                    self.stored[client.send(TOPIC, body).offset] = body


class Reader:
    """A client that pulls a queue repeatedly and checks that the queue only grows."""

    def __init__(self, client: PullClient) -> None:
        self._client = client
        self.found: dict[int, bytes] = {}
        self.offset = 0

    def pull(self) -> PullAnswer | None:
        try:
            pulled = self._client.pull(TOPIC, self.offset, batch_size=16)
        except grpc.RpcError:
            return None
        if pulled.code not in {v2.OK, v2.MESSAGE_NOT_FOUND}:
            return None  # The broker is down, or its successor is about to take over.
        for offset, body in zip(pulled.offsets, pulled.bodies, strict=True):
            assert offset not in self.found, "an offset is returned once"
            self.found[offset] = body
        assert pulled.next_offset >= self.offset
        self.offset = pulled.next_offset
        return pulled

    def until(self, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline_s, "no progress"
            if self.pull() is None:
                time.sleep(0.05)  # Avoids a busy loop while the broker starts.

    def read_on(self, count: int = MESSAGES) -> None:
        goal = len(self.found) + count
        self.until(lambda: len(self.found) >= goal)


def mark(client: PullClient, offset: int) -> None:
    """Report the consumer group's offset; repeat until a broker accepts it."""
    deadline_s = time.monotonic() + PATIENCE_S
    while client.update_offset(GROUP, TOPIC, offset).status.code != v2.OK:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def check_faults(running: Standalone, fault: Callable[[], None], *, times: int) -> None:
    """Pull and send during a fault; then compare."""
    running.put(f"topics/{TOPIC}", queues=1)
    running.put(f"groups/{GROUP}")
    with connected(running) as client:
        reader, marked = Reader(client), 0
        with Sender(running) as sender:
            for _ in range(times):
                reader.read_on()
                marked = reader.offset
                mark(client, marked)
                fault()
                reader.read_on()
                assert client.get_offset(GROUP, TOPIC).offset == marked
        reader.until(lambda: reader.offset > max(sender.stored))
        assert {offset: reader.found[offset] for offset in sender.stored} == sender.stored
        assert sorted(reader.found) == list(range(len(reader.found))), "no offset is left out"


def test_pulls_continue_at_their_offset_after_a_broker_kill(tmp_path: Path) -> None:
    with standalone(tmp_path / "data") as running:
        check_faults(
            running, lambda: send_signal([child_pid(running, "broker-0")], signal.SIGKILL), times=2
        )


@pytest.mark.heavy
def test_pulls_continue_after_a_failover(tmp_path: Path) -> None:
    with standalone(tmp_path / "data", *FLAGS, start_s=STARTS_S) as running:
        group = ReplicatedStandalone(running)
        asyncio.run(group.in_sync())

        def kill_master() -> None:
            asyncio.run(group.in_sync())
            send_signal(group.pids(group.master()), signal.SIGKILL)

        check_faults(running, kill_master, times=2)


def test_a_pull_of_expired_messages_returns_the_first_offset(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("segment_bytes: 16777216\nretention_bytes: 33554432\n")
    with (
        standalone(tmp_path / "data", f"--config={config}") as running,
        grpc.insecure_channel(
            running.grpc, options=[("grpc.max_receive_message_length", 16 << 20)]
        ) as channel,
    ):
        running.put(f"topics/{TOPIC}", queues=1)
        client, source = PullClient(channel), pipeline_pb2_grpc.PipelineSourceStub(channel)
        number, body, gone = 0, bytes(1 << 20), PullAnswer()
        deadline_s = time.monotonic() + PATIENCE_S
        while gone.code != v2.OFFSET_NOT_FOUND:
            assert time.monotonic() < deadline_s, "nothing is retired"
            for _ in range(16):
                client.send(TOPIC, body, message_id=f"id-{number}")
                number += 1
            gone = client.pull(TOPIC, 0, batch_size=1)
        first = gone.next_offset
        assert f"begins at {first}" in gone.text
        assert client.pull(TOPIC, first).offsets[0] == first
        assert client.query(TOPIC, v2.BEGINNING).offset >= first
        replies = list(source.ReadMessages(pb.ReadMessagesRequest(topic=TOPIC, broker="broker-0")))
        assert (replies[0].is_gone, replies[0].gone_from) == (True, 0)
        read = [m.system_properties.queue_offset for reply in replies for m in reply.messages]
        assert read == list(range(replies[0].min_offset, number))


def test_a_pull_that_waits_is_answered_when_everything_stops(tmp_path: Path) -> None:
    with standalone(tmp_path / "data") as running, connected(running) as client:
        running.put(f"topics/{TOPIC}", queues=1)
        answers: list[PullAnswer] = []
        waiting = threading.Thread(
            target=lambda: answers.append(client.pull(TOPIC, 0, wait_s=25)), daemon=True
        )
        waiting.start()
        # The pull waits once the proxy has a stream for it.
        metrics = running.processes["proxy-0"].metrics
        shown = re.compile(r'rocketmq_proxy_streams\{[^}]*kind="pull"[^}]*\} 1')
        eventually(lambda: shown.search(httpx.get(metrics, trust_env=False).text))
        assert running.stop() == 0
        waiting.join(PATIENCE_S)
        assert [one.code for one in answers] == [v2.MESSAGE_NOT_FOUND]
