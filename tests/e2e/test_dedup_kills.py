"""Producers repeat sends after lost answers and kill -9: each message is stored once (ADR 0087)."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import Final

import grpc
import pytest

from tests.support.clients.api import POLL_MS_MIN, Api, api, message
from tests.support.processes.killing import RECOVERY_S, kill, until
from tests.support.processes.processes import Standalone, standalone
from tests.support.processes.tcp_links import BACK, Link, tcp_links
from tests.support.seeds import seed_base
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

SEED: Final = seed_base()
KEY: Final = "dedup-key"
LOST_S: Final = 1.0  # timeout of a call whose answer is lost
KILL_S: Final = 60.0
PRODUCERS: Final = 6
PROGRESS: Final = (5, 200)  # messages stored between two kills
WINDOW_MS: Final = 3_600_000  # longer than the test on any machine


async def is_sent(client: Api, topic: str, body: str, attempt: int) -> bool:
    """Send a message once; return whether an OK answer has come."""
    sent = message(topic, body.encode(), message_id=f"{body}-{attempt}", properties={KEY: body})
    try:
        [entry] = (await client.send(sent)).entries
    except grpc.aio.AioRpcError:
        return False
    return bool(entry.status.code == v2.OK)


async def received(endpoint: str, topic: str) -> list[str]:
    """Receive and ack all messages of a topic."""
    found: list[str] = []
    async with api(endpoint, call_s=30) as client:
        while some := await client.receive(topic, topic, poll_ms=POLL_MS_MIN):
            found += [one.body.decode() for one in some]
            handles = [one.system_properties.receipt_handle for one in some]
            await client.ack(topic, topic, handles)
    return sorted(found)


async def send_with_losses(link: Link, topic: str, count: int) -> None:
    """Send messages until each has its answer; every fifth first answer is lost."""
    for n in range(count):
        attempt = 0
        is_answered = False
        while not is_answered:
            assert attempt < 10, f"seed {SEED}: message {n} has no answer"
            async with api(link.address, call_s=LOST_S if attempt == 0 else 30) as client:
                # The connection is up before the answer is dropped.
                await client.heartbeat(topic)
                is_dropped = attempt == 0 and n % 5 == 4
                if is_dropped:
                    link.cut(BACK)
                is_answered = await is_sent(client, topic, f"{n}", attempt)
                assert not (is_answered and is_dropped)
            if is_dropped:
                link.reset()
                link.heal()
            attempt += 1


def test_lost_answers_store_no_message_twice(tmp_path: Path) -> None:
    topic, count = "dedup-lost-answers", 30
    with standalone(tmp_path / "data") as running, tcp_links() as links:
        running.put(f"topics/{topic}", dedup={})
        link = links.make(running.grpc)
        asyncio.run(send_with_losses(link, topic, count))
        queues = running.get(f"topics/{topic}")["queueStatus"]
        assert sum([one["maxOffset"] for one in queues]) == count
        assert asyncio.run(received(running.grpc, topic)) == sorted([f"{n}" for n in range(count)])


class Producers:
    """Producers that repeat each send until it has its answer."""

    def __init__(self, endpoint: str, topic: str) -> None:
        self._endpoint = endpoint
        self._topic = topic
        self.sent: list[str] = []  # with an OK answer
        self.repeats = 0

    async def run(self, name: int, stop: asyncio.Event) -> None:
        """Send until `stop`."""
        n = 0
        async with api(self._endpoint) as client:
            while not stop.is_set():
                body, attempt = f"{name}-{n}", 0
                end_s = asyncio.get_running_loop().time() + RECOVERY_S
                while not await is_sent(client, self._topic, body, attempt):
                    assert asyncio.get_running_loop().time() < end_s, f"seed {SEED}: {body}"
                    attempt += 1
                    await asyncio.sleep(0.05)
                self.sent.append(body)
                self.repeats += attempt
                n += 1

    async def progress(self, messages: int) -> None:
        """Wait until so many more messages have an OK answer."""
        goal = len(self.sent) + messages
        await until(lambda: len(self.sent) >= goal)


async def kill_under_repeats(running: Standalone, producers: Producers) -> int:
    """Kill processes for a minute while producers send; return the number of kills."""
    rng, stop, kills = random.Random(SEED), asyncio.Event(), 0
    end_s = asyncio.get_running_loop().time() + KILL_S
    async with asyncio.TaskGroup() as tasks:
        for name in range(PRODUCERS):
            tasks.create_task(producers.run(name, stop))
        while asyncio.get_running_loop().time() < end_s:
            await producers.progress(rng.randint(*PROGRESS))
            await kill(running, rng.choice(["broker-0", "proxy-0", "proxy-1"]))
            kills += 1
        await producers.progress(PROGRESS[1])
        stop.set()
    return kills


@pytest.mark.heavy
def test_kills_store_no_message_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topic = "dedup-kills"
    with standalone(tmp_path / "data", "--proxies=2") as running:
        running.put(f"topics/{topic}", dedup={"windowMs": WINDOW_MS})
        producers = Producers(running.grpc, topic)
        kills = asyncio.run(kill_under_repeats(running, producers))
        # At least as long as a poll, so the admin process has connected to the broker again.
        found = asyncio.run(received(running.grpc, topic))
        queues = running.get(f"topics/{topic}")["queueStatus"]
        stored = sum([one["maxOffset"] for one in queues])
    done = f"seed {SEED}: {kills} kills, {len(producers.sent)} sent, {producers.repeats} repeats"
    assert kills > 3, done
    assert producers.repeats > 0, done
    assert stored == len(producers.sent), done
    assert found == sorted(producers.sent), done
    with capsys.disabled():
        sys.stderr.write(f"\n{done}\n")
