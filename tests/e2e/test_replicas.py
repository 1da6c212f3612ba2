"""Broker processes that are replicas of one group: acknowledged messages survive the master."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias
from zlib import crc32

import grpc
import httpx
import pytest

from tests.support.bodies import body_of
from tests.support.clients.grpcio_client import read
from tests.support.eventually import eventually
from tests.support.processes.replica_group import ReplicaGroup, replica_group
from tests.support.worlds.engine_world import blob
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.stubs.tidemill.broker.v1 import broker_pb2_grpc

LIMIT_S = 180.0
Exchange: TypeAlias = "grpc.aio.StreamStreamCall[pb.RequestFrame, pb.ReplyFrame]"
HOUR_MS = 3_600_000


class Client:
    """A client with one link to the current master."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self._sequence = 0
        self.acknowledged: set[str] = set()
        self.sent: set[str] = set()
        self._progress = asyncio.Condition()
        self._call: Exchange | None = None
        self._lost: Exchange | None = None
        self.topic_id = 0
        self.group_id = 0

    async def on_link(self, work: Callable[[Exchange], Awaitable[None]]) -> None:
        """Work on a stream to the master; raise grpc.RpcError if the stream is lost."""
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(self._group.master.address, options) as channel:
            call = broker_pb2_grpc.BrokerLinkStub(channel).Exchange()
            first = await read(call, pb.ReplyFrame)
            if first.HasField("not_master"):
                raise ConnectionError("not the master yet")
            self._call = call
            await work(call)
            call.cancel()

    async def exchange(self, call: Exchange, frame: pb.RequestFrame) -> list[pb.ReplyFrame]:
        self._sequence += 1
        frame.sequence = self._sequence
        try:
            await call.write(frame)
            replies = []
            while True:
                reply = await call.read()
                if not isinstance(reply, pb.ReplyFrame):
                    raise ConnectionError("the stream has ended")
                replies.append(reply)
                if reply.answered_sequence == self._sequence:
                    return replies
        except asyncio.CancelledError:
            # The error of grpcio if the call or its caller was cancelled.
            if call is not self._lost:
                raise
            raise ConnectionError("the stream was given up") from None

    def lose_link(self) -> None:
        """End the stream, like a proxy after a change of the master."""
        assert self._call is not None
        self._lost = self._call
        self._call.cancel()

    async def found(self, group: str = "billing") -> None:
        """Create the topic and the consumer group."""

        async def work(call: Exchange) -> None:
            frame = pb.RequestFrame(
                ensures=[pb.EnsureRequest(request_id=1, topic="orders", group=group)]
            )
            for reply in await self.exchange(call, frame):
                for topic in reply.config.topics:
                    if topic.name == "orders":
                        self.topic_id = topic.id
                for one in reply.config.groups:
                    if one.name == group:
                        self.group_id = one.id

        await self.on_link(work)
        assert self.topic_id
        assert self.group_id

    async def send_until(self, stop: asyncio.Event) -> None:
        """Send one message after the other to the current master."""
        number = 0

        async def work(call: Exchange) -> None:
            nonlocal number
            while not stop.is_set():
                number += 1
                text = f"m{number}"
                self.sent.add(text)
                data = blob(text, size=200)
                frame = pb.RequestFrame()
                frame.appends.request_ids.append(number)
                frame.appends.topic_ids.append(self.topic_id)
                frame.appends.queue_ids.append(0)
                frame.appends.crcs.append(crc32(data))
                frame.appends.blobs.append(data)
                for reply in await self.exchange(call, frame):
                    if number in reply.appends.request_ids:
                        self.acknowledged.add(text)
                async with self._progress:
                    self._progress.notify_all()

        while not stop.is_set():
            try:
                await self.on_link(work)
            except (grpc.RpcError, ConnectionError, asyncio.InvalidStateError):
                await asyncio.sleep(0.01)  # The master is down. Its successor starts soon.

    async def receive_all(self) -> list[str]:
        """Pop until the backlog is empty.

        After the loss of a link, read everything again in another consumer group: the messages of
        the lost reply stay invisible.
        """
        bodies: list[str] = []

        async def work(call: Exchange) -> None:
            while True:
                frame = pb.RequestFrame()
                frame.pops.add(
                    request_id=1,
                    group_id=self.group_id,
                    topic_id=self.topic_id,
                    max_messages=32,
                    invisible_duration_ms=HOUR_MS,
                )
                replies = await self.exchange(call, frame)
                messages = [
                    message
                    for reply in replies
                    for pop in reply.pops
                    for message in messages_of(pop)
                ]
                if not messages:
                    return
                bodies.extend(messages)

        for group_number in itertools.count():
            try:
                if group_number:
                    bodies.clear()
                    await self.found(f"billing-{group_number}")
                await self.on_link(work)
            except (grpc.RpcError, ConnectionError):
                await asyncio.sleep(0.01)
            else:
                break
        return bodies

    async def acknowledged_more(self, count: int) -> None:
        """Wait until `count` more messages are acknowledged."""
        wanted = len(self.acknowledged) + count
        async with self._progress:
            await self._progress.wait_for(lambda: len(self.acknowledged) >= wanted)


def messages_of(pop: pb.PopReply) -> list[str]:
    return [
        body_of(bytes(one)).decode().rstrip(".") for batch in pop.batches for one in batch.blobs
    ]


def metrics_of(url: str) -> dict[str, float]:
    """Return the broker group's metrics of a process, by name."""
    text = httpx.get(url, trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith("rocketmq_ha_")]
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}


def check_exported(group: ReplicaGroup) -> bool:
    """Check the metrics of all replicas, once each replica has the in-sync set and the log."""
    exported = [metrics_of(group.up[number].metrics) for number in range(3)]
    assert [one["rocketmq_ha_role"] for one in exported] == [0, 1, 0]
    assert [one["rocketmq_ha_epoch"] for one in exported] == [2, 2, 2]
    assert {one["rocketmq_ha_in_sync_replicas"] for one in exported} == {3}
    assert len({one["rocketmq_ha_max_offset"] for one in exported}) == 1
    return True


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S):
            await scenario()

    asyncio.run(main())


@pytest.mark.heavy
def test_acknowledged_messages_survive_kills_of_the_master(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with replica_group(tmp_path) as group:
            client, stop = Client(group), asyncio.Event()
            await client.found()
            sending = asyncio.create_task(client.send_until(stop))
            for _ in range(3):
                await client.acknowledged_more(100)
                number = group.master.number
                await group.kill(number)
                await group.elect()
                await client.acknowledged_more(100)
                await group.start(number)
                await group.in_sync(3)
            stop.set()
            await sending
            received = await client.receive_all()
            assert client.acknowledged <= set(received)
            assert set(received) <= client.sent
            assert len(received) == len(set(received))

    run(scenario)


def test_a_master_that_was_frozen_steps_down_and_follows(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with replica_group(tmp_path) as group:
            client, stop = Client(group), asyncio.Event()
            await client.found()
            sending = asyncio.create_task(client.send_until(stop))
            await client.acknowledged_more(100)
            frozen = group.master
            frozen.process.send_signal(signal.SIGSTOP)
            await group.elect(1, without=(0,))
            client.lose_link()
            await client.acknowledged_more(100)
            frozen.process.send_signal(signal.SIGCONT)
            await group.in_sync(3)
            assert group.view.master == group.up[1].member
            stop.set()
            await sending
            await asyncio.to_thread(eventually, lambda: check_exported(group))
            # The replica that was frozen has the whole log, so it becomes master next.
            await group.elect(0)
            received = await client.receive_all()
            assert client.acknowledged <= set(received)
            assert set(received) <= client.sent
            assert len(received) == len(set(received))

    run(scenario)


def test_a_replica_whose_volume_is_empty_is_copied(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with replica_group(tmp_path) as group:
            client, stop = Client(group), asyncio.Event()
            await client.found()
            sending = asyncio.create_task(client.send_until(stop))
            await client.acknowledged_more(100)
            await group.kill(2)
            shutil.rmtree(tmp_path / "2")
            await group.start(2)
            await group.in_sync(3)
            await group.kill(0)
            await group.elect(2)
            await client.acknowledged_more(10)
            stop.set()
            await sending
            assert client.acknowledged <= set(await client.receive_all())

    run(scenario)


def test_all_are_stopped_and_started_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with replica_group(tmp_path) as group:
            client, stop = Client(group), asyncio.Event()
            await client.found()
            sending = asyncio.create_task(client.send_until(stop))
            await client.acknowledged_more(50)
            stop.set()
            await sending
            for number in (1, 2, 0):
                assert await group.stop(number) == 0
            for number in range(3):
                await group.start(number)
            await group.elect(1, members=(0, 1, 2))
            received = await client.receive_all()
            assert client.acknowledged <= set(received)

    run(scenario)
