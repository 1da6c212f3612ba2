"""A broker process, as its proxies and an operator see it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from tests.support.clients.grpcio_client import is_serving, read, reflected_services
from tests.support.eventually import eventually
from tests.support.processes.processes import broker, descendants, is_running
from tests.support.worlds.engine_world import blob
from tidemill.common.errors import Overloaded
from tidemill.proxy.link import BrokerLink, LinkLimits
from tidemill.proxy.link.commands import ENSURE
from tidemill.proxy.metrics import ProxyMetrics
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.stubs.tidemill.broker.v1 import broker_pb2_grpc

LARGE = blob("large", size=4 << 20)
TIMEOUT_MS = 30_000


def with_channel(address: str, scenario: Callable[[grpc.aio.Channel], Awaitable[None]]) -> None:
    async def main() -> None:
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with asyncio.timeout(20), grpc.aio.insecure_channel(address, options) as channel:
            await scenario(channel)

    asyncio.run(main())


def ensure(request_id: int, topic: str) -> pb.RequestFrame:
    return pb.RequestFrame(
        sequence=request_id, ensures=[pb.EnsureRequest(request_id=request_id, topic=topic)]
    )


def test_health_and_reflection_are_served(tmp_path: Path) -> None:
    async def scenario(channel: grpc.aio.Channel) -> None:
        for service in ("", "tidemill.broker.v1.BrokerLink"):
            assert await is_serving(channel, service)
        assert "tidemill.broker.v1.BrokerAdmin" in await reflected_services(channel)

    with broker(tmp_path / "data") as (_, address, _):
        with_channel(address, scenario)


def test_the_configuration_comes_first_and_changes_follow(tmp_path: Path) -> None:
    async def scenario(channel: grpc.aio.Channel) -> None:
        call = broker_pb2_grpc.BrokerLinkStub(channel).Exchange()
        config = (await read(call, pb.ReplyFrame)).config
        assert config.is_complete
        assert len(config.handle_secret) == 32
        assert config.broker_name == "broker-0"
        await call.write(ensure(1, "orders"))
        reply = await read(call, pb.ReplyFrame)
        assert [topic.name for topic in reply.config.topics] == ["orders"]
        assert [done.request_id for done in reply.ensures] == [1]
        call.cancel()

    with broker(tmp_path / "data", "--auto-create-topics", "--auto-create-groups") as (
        _,
        address,
        _,
    ):
        with_channel(address, scenario)


def test_columns_of_different_lengths_end_the_stream(tmp_path: Path) -> None:
    async def scenario(channel: grpc.aio.Channel) -> None:
        call = broker_pb2_grpc.BrokerLinkStub(channel).Exchange()
        await call.read()
        await call.write(pb.RequestFrame(acks=pb.AckBatch(request_ids=[1, 2], slots=[1])))
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT

    with broker(tmp_path / "data") as (_, address, _):
        with_channel(address, scenario)


def test_a_start_after_a_clean_stop_replays_nothing(tmp_path: Path) -> None:
    async def scenario(channel: grpc.aio.Channel) -> None:
        call = broker_pb2_grpc.BrokerLinkStub(channel).Exchange()
        await call.read()
        for number in range(100):
            await call.write(ensure(number, f"topic-{number}"))
            await read(call, pb.ReplyFrame)
        call.cancel()

    flags = "--auto-create-topics", "--auto-create-groups"
    with broker(tmp_path / "data", *flags) as (_, address, _):
        with_channel(address, scenario)
    with broker(tmp_path / "data", *flags) as (_, _, log):
        lines = map(json.loads, log.read_text().splitlines())
        recovered = [one for one in lines if one["event"] == "store recovered"][-1]
    assert not recovered["is_new"]
    assert recovered["log_bytes"] > 0
    assert recovered["replayed_records"] == 0


def test_the_admin_service_returns_the_secret_and_error_names(tmp_path: Path) -> None:
    async def scenario(channel: grpc.aio.Channel) -> None:
        stub = broker_pb2_grpc.BrokerAdminStub(channel)
        config = await stub.GetConfig(pb.GetConfigRequest())
        assert len(config.handle_secret) == 32
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.DeleteTopic(pb.DeleteTopicRequest(name="none"))
        assert refusal.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert dict(refusal.value.trailing_metadata())["tidemill-error"] == "TopicNotFound"

    with broker(tmp_path / "data") as (_, address, _):
        with_channel(address, scenario)


def warnings_of(log: Path) -> list[str]:
    """Return the lines with problems; a topic of a first use has the only expected warning."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    own = [line for line in lines if line["event"] != "topic created on first use"]
    return [json.dumps(line) for line in own if line["level"] != "info"]


def test_proxies_that_vanish_leave_no_trace_in_the_log(tmp_path: Path) -> None:
    async def scenario(channel: grpc.aio.Channel) -> None:
        call = broker_pb2_grpc.BrokerLinkStub(channel).Exchange()
        await call.read()
        await call.write(ensure(1, "orders"))

    with broker(tmp_path / "data", "--auto-create-topics", "--auto-create-groups") as (
        process,
        address,
        log,
    ):
        for _ in range(50):
            with_channel(address, scenario)
        process.terminate()
        assert process.wait(20) == 0
        assert not warnings_of(log)


def test_sigterm_answers_pending_requests_and_ends_the_stream(tmp_path: Path) -> None:
    with broker(tmp_path / "data", "--auto-create-topics", "--auto-create-groups") as (
        process,
        address,
        _,
    ):

        async def scenario(channel: grpc.aio.Channel) -> None:
            call = broker_pb2_grpc.BrokerLinkStub(channel).Exchange()
            await call.read()
            await call.write(ensure(1, "orders"))
            process.terminate()
            answered: list[int] = []
            while isinstance(reply := await call.read(), pb.ReplyFrame):
                answered.extend(done.request_id for done in reply.ensures)
            # The signal may have come before the frame.
            assert answered in ([1], [])
            assert await call.code() == grpc.StatusCode.OK

        with_channel(address, scenario)
        assert process.wait(20) == 0


@pytest.mark.parametrize("which", [0, 1])
def test_the_death_of_a_sync_helper_ends_the_broker(tmp_path: Path, which: int) -> None:
    with broker(tmp_path / "data") as (process, _, log):
        helpers = descendants(process.pid)[1:]
        assert len(helpers) == 2
        os.kill(helpers[which], signal.SIGKILL)
        assert process.wait(20) == 1
        eventually(lambda: not any(map(is_running, helpers)))
        failure = json.loads(log.read_text().splitlines()[-1])
        assert failure["event"] == "process failed"
        assert "sync: the sync process has ended" in failure["reason"]


@pytest.mark.parametrize("pops_at_once", [1, 10])
def test_many_large_messages_are_received_over_one_connection(
    tmp_path: Path, pops_at_once: int
) -> None:
    count = 32

    async def scenario(link: BrokerLink) -> None:
        await link.configured.wait()
        wanted = pb.EnsureRequest(topic="orders", group="billing")
        await link.ask(ENSURE, wanted, timeout_ms=TIMEOUT_MS)
        topic = link.configuration.topics["orders"].id
        group = link.configuration.groups["billing"].id
        await asyncio.gather(
            *[link.append(topic, 0, LARGE, timeout_ms=TIMEOUT_MS) for _ in range(count)]
        )

        async def pop() -> int | None:
            request = pb.PopRequest(
                group_id=group, topic_id=topic, max_messages=32, invisible_duration_ms=600_000
            )
            try:
                reply = await link.pop(request, timeout_ms=TIMEOUT_MS)
            except Overloaded:
                return None  # Nothing was popped: this process was slow to read.
            assert all(blob == LARGE for batch in reply.batches for blob in batch.blobs)
            return sum(len(batch.blobs) for batch in reply.batches)

        received = 0
        while received < count:
            counts = await asyncio.gather(*[pop() for _ in range(pops_at_once)])
            assert counts != [0] * pops_at_once, "there are more, and nobody was given one"
            received += sum(filter(None, counts))
        assert received == count

    async def main(address: str) -> None:
        link = BrokerLink(
            address,
            ProxyMetrics(),
            LinkLimits(
                pending_max=1_000, pending_bytes_max=1 << 30, patience_ms=10_000, clients_max=100
            ),
        )
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(link.run())
            await scenario(link)
            running.cancel()

    with broker(tmp_path / "data", "--auto-create-topics", "--auto-create-groups") as (
        _,
        address,
        log,
    ):
        asyncio.run(main(address))
        assert not warnings_of(log)
