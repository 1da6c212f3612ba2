"""Replicas with damaged logs: each replica mends its log from another replica."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.e2e.test_replicas import Client, Exchange, messages_of, run
from tests.support.eventually import eventually
from tests.support.processes.replica_group import ReplicaGroup, replica_group
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

MESSAGES = 40
HIDDEN_MS = 6_000  # Enough for the bit flips on the slowest machine.
BACK_S = 120.0
WITHIN_MS = 120_000
MENDED = "log mended from a replica"
GIVEN_UP = "damaged message dead-lettered without its body"
FIRST = "log/00000000000000000000.log"


def flip(folder: Path, number: int, text: str) -> None:
    """Flip a bit in the body of the message `text`, in the log of a replica."""
    path = folder / str(number) / FIRST
    data = path.read_bytes()
    at = data.index(f"{text}.".encode())
    with path.open("r+b") as file:
        file.seek(at + len(text) + 20)
        byte = file.read(1)
        file.seek(at + len(text) + 20)
        file.write(bytes([byte[0] ^ 1]))


async def sent(group: ReplicaGroup) -> Client:
    client, stop = Client(group), asyncio.Event()
    await client.found()
    sending = asyncio.create_task(client.send_until(stop))
    await client.acknowledged_more(MESSAGES)
    stop.set()
    await sending
    return client


async def received(client: Client, count: int) -> list[str]:
    """Pop until `count` messages have come."""
    bodies: list[str] = []
    async with asyncio.timeout(BACK_S):
        while len(bodies) < count:
            bodies += await client.receive_all()
    return bodies


def logged_events(folder: Path, number: int) -> list[str]:
    """Return the log lines of a replica."""
    lines = (folder / f"replica-{number}.log").read_text().splitlines(keepends=True)
    return [json.loads(line)["event"] for line in lines if line.endswith("\n")]


def was_mended(folder: Path, number: int) -> bool:
    """Return whether a replica has mended its log without a cut."""
    text = (folder / f"replica-{number}.log").read_text()
    whole = text[: text.rfind("\n") + 1].splitlines()
    cut = [fields.get("cut_bytes", 0) for fields in map(json.loads, whole)]
    return MENDED in logged_events(folder, number) and not any(cut)


async def popped(client: Client, *, hidden_ms: int) -> list[str]:
    bodies: list[str] = []

    async def work(call: Exchange) -> None:
        frame = pb.RequestFrame()
        frame.pops.add(
            request_id=1,
            group_id=client.group_id,
            topic_id=client.topic_id,
            max_messages=32,
            invisible_duration_ms=hidden_ms,
        )
        for reply in await client.exchange(call, frame):
            for one in reply.pops:
                bodies.extend(messages_of(one))

    await client.on_link(work)
    return bodies


def test_a_master_mends_messages_damaged_during_their_delivery(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with replica_group(tmp_path) as group:
            client = await sent(group)
            first = await popped(client, hidden_ms=HIDDEN_MS)
            assert len(first) == 32
            # When the invisible duration ends, the broker copies the messages and checks them.
            flip(tmp_path, 0, "m7")
            bodies = await received(client, len(client.acknowledged))
            assert sorted(bodies) == sorted(client.acknowledged)
            assert MENDED in logged_events(tmp_path, 0)

    run(scenario)


@pytest.mark.heavy
def test_only_messages_damaged_at_every_replica_are_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with replica_group(tmp_path) as group:
            client = await sent(group)
            await popped(client, hidden_ms=HIDDEN_MS)
            for number in range(3):
                flip(tmp_path, number, "m7")
            bodies = await received(client, len(client.acknowledged) - 1)
            assert sorted(bodies) == sorted(client.acknowledged - {"m7"})
            await asyncio.to_thread(
                eventually, lambda: GIVEN_UP in logged_events(tmp_path, 0), within_ms=WITHIN_MS
            )
            assert (
                logged_events(tmp_path, 0).count("replica does not have the damaged records") >= 2
            )

    run(scenario)


def test_a_replica_mends_its_damaged_log_from_others_at_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with replica_group(tmp_path) as group:
            client = await sent(group)
            await group.kill(2)
            flip(tmp_path, 2, "m7")
            flip(tmp_path, 2, "m9")
            await group.start(2)
            await group.in_sync(3)
            await group.kill(0)
            await group.elect(2, members=(1, 2))
            bodies = await received(client, len(client.acknowledged))
            assert sorted(bodies) == sorted(client.acknowledged)
            master, mended = (tmp_path / str(n) / FIRST for n in (1, 2))
            assert was_mended(tmp_path, 2)
            data = mended.read_bytes()
            at = data.index(b"m9.")
            assert data[at : at + 200] == master.read_bytes()[at : at + 200]

    run(scenario)


def test_two_that_have_each_lost_another_message_help_each_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with replica_group(tmp_path) as group:
            client = await sent(group)
            await group.kill(1)
            await group.kill(2)
            flip(tmp_path, 1, "m7")
            flip(tmp_path, 2, "m7")
            flip(tmp_path, 2, "m9")
            # Only the first replica has the message.
            await asyncio.gather(group.start(1), group.start(2))
            await group.in_sync(3)
            assert was_mended(tmp_path, 1)
            assert was_mended(tmp_path, 2)
            await group.elect(2)
            bodies = await received(client, len(client.acknowledged))
            assert sorted(bodies) == sorted(client.acknowledged)

    run(scenario)
