"""Transactions through the real processes: half messages, decisions, checks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.api import METADATA, api
from tests.support.clients.client_process import (
    GO_PROGRAM,
    JAVA_CLASSES,
    NODE_PACKAGES,
    RUST_PROGRAM,
    Facts,
    needs,
    run_go_client,
    run_java_client,
    run_node_client,
    run_python_client,
    run_rust_client,
)
from tests.support.clients.commands import tidemill
from tests.support.clients.transactions import (
    CheckingProducer,
    checking_producer,
    end_transaction,
    half_message,
    send_half,
)
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

POLL_MS = 5_000


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("transactions") / "data") as started:
        yield started


def test_a_committed_message_is_delivered_once_and_a_rolled_back_one_never(
    running: Standalone,
) -> None:
    async def run() -> None:
        async with api(running.grpc) as client:
            topic, group = "decided", "decided"
            assert await client.receive(topic, group) == []
            halves = [half_message(topic, body) for body in (b"yes", b"no", b"open")]
            ids = [await send_half(client, half) for half in halves]
            assert await client.receive(topic, group) == []
            for n, resolution in ((1, v2.ROLLBACK), (0, v2.COMMIT)):
                status = await end_transaction(client, halves[n], ids[n], resolution)
                assert status.code == v2.OK, status
                again = await end_transaction(client, halves[n], ids[n], resolution)
                assert again.code == v2.OK, again
            (received,) = await client.receive(topic, group, poll_ms=POLL_MS)
            assert received.body == b"yes"
            assert received.system_properties.message_type == v2.TRANSACTION
            assert await client.receive(topic, group) == []
            for n, resolution in ((1, v2.COMMIT), (0, v2.ROLLBACK)):
                status = await end_transaction(client, halves[n], ids[n], resolution)
                assert status.code == v2.INVALID_TRANSACTION_ID, status
            forged = await end_transaction(client, halves[2], ids[1], v2.COMMIT)
            assert forged.code == v2.INVALID_TRANSACTION_ID, forged

    asyncio.run(run())


def test_a_producer_of_the_topic_gets_the_check_and_commits(running: Standalone) -> None:
    async def run() -> None:
        async with api(running.grpc) as client:
            topic, group = "checked", "checked"
            assert await client.receive(topic, group) == []
            half = half_message(topic, b"forgotten", first_check_ms=1_000)
            half.user_properties["order"] = "7"
            transaction_id = await send_half(client, half)
            # The sender had no stream. Another producer of the topic connects later.
            async with checking_producer(client, [topic], client_id="another") as producer:
                check = await producer.next_check()
                assert check.transaction_id == transaction_id
                assert check.message.body == b"forgotten"
                assert check.message.topic.name == topic
                assert check.message.user_properties == {"order": "7"}
                assert check.message.system_properties.message_id == b"forgotten".hex()
            status = await end_transaction(client, check.message, transaction_id, v2.COMMIT)
            assert status.code == v2.OK, status
            (received,) = await client.receive(topic, group, poll_ms=POLL_MS)
            assert received.body == b"forgotten"

    asyncio.run(run())


def test_a_check_never_goes_to_a_producer_of_another_topic(running: Standalone) -> None:
    async def run() -> None:
        async with api(running.grpc) as client:
            half = half_message("mine", b"half", first_check_ms=1_000)
            transaction_id = await send_half(client, half)
            async with (
                checking_producer(client, ["theirs"], client_id="other") as other,
                checking_producer(client, ["mine"], client_id="right") as right,
            ):
                check = await right.next_check()
                assert check.transaction_id == transaction_id
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.1):
                        await other.next_check()

    asyncio.run(run())


@pytest.mark.parametrize(
    "run_client",
    [
        pytest.param(run_python_client, id="python"),
        pytest.param(run_go_client, id="go", marks=needs("go", GO_PROGRAM)),
        pytest.param(run_java_client, id="java", marks=needs("java", JAVA_CLASSES)),
        pytest.param(run_node_client, id="node", marks=needs("node", NODE_PACKAGES)),
        pytest.param(
            run_rust_client, id="rust", marks=[needs("cargo", RUST_PROGRAM), pytest.mark.large]
        ),
    ],
)
def test_official_clients_decide_and_answer_checks(
    run_client: Callable[..., Facts],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    running: Standalone,
) -> None:
    topic = f"official-{request.node.callspec.id}"
    received: list[str] = []

    async def receive_all() -> None:
        async with api(running.grpc) as client:
            while found := await client.receive(topic, topic, poll_ms=POLL_MS):
                received.extend(one.body.decode() for one in found)

    async def first_use() -> None:
        async with api(running.grpc) as client:
            assert await client.receive(topic, topic) == []

    asyncio.run(first_use())
    facts = run_client(tmp_path, "transaction", running.grpc, topic=topic)
    assert facts.the("done")["is_done"], facts
    assert sorted(one["body"] for one in facts.of("checked")) == ["checked no", "checked yes"]
    asyncio.run(receive_all())
    assert sorted(received) == ["checked yes", "commit"]


def test_a_producer_that_sends_its_settings_again_still_gets_its_checks(
    running: Standalone,
) -> None:
    """Its settings name no topics, and its stream knows the topic from the half message."""

    async def run() -> None:
        async with api(running.grpc) as client:
            stream = client.stub.Telemetry(metadata=METADATA)
            settings = v2.Settings(
                client_type=v2.PRODUCER,
                publishing=v2.Publishing(),
                user_agent=v2.UA(language=v2.JAVA),
            )
            await stream.write(service.TelemetryCommand(settings=settings))
            await stream.read()
            half = half_message("again", b"half", first_check_ms=2_000)
            transaction_id = await send_half(client, half)
            await stream.write(service.TelemetryCommand(settings=settings))
            await stream.read()
            check = await CheckingProducer(stream).next_check()
            assert check.transaction_id == transaction_id
            stream.cancel()

    asyncio.run(run())


def test_a_producer_that_sends_its_settings_late_gets_its_checks(running: Standalone) -> None:
    """The Python client opens its stream again minutes before it sends its settings."""

    async def run() -> None:
        async with api(running.grpc) as client:
            stream = client.stub.Telemetry(metadata=METADATA)
            await stream.write(service.TelemetryCommand())  # So that the stream is open.
            half = half_message("late-settings", b"half", first_check_ms=1_000)
            transaction_id = await send_half(client, half)
            check = await CheckingProducer(stream).next_check()
            assert check.transaction_id == transaction_id
            stream.cancel()

    asyncio.run(run())


def test_a_check_goes_to_the_stream_that_publishes_its_topic(running: Standalone) -> None:
    """X-6, for two streams with one client id."""

    async def run() -> None:
        async with (
            api(running.grpc) as client,
            checking_producer(client, ["x6-mine"], client_id="same") as mine,
            checking_producer(client, ["x6-theirs"], client_id="same") as theirs,
        ):
            await send_half(client, half_message("x6-mine", b"half", first_check_ms=1_000))
            first = asyncio.create_task(mine.next_check())
            second = asyncio.create_task(theirs.next_check())
            done, _ = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
            first.cancel()
            second.cancel()
            assert done == {first}

    asyncio.run(run())


def test_an_operator_decides_and_recovers_transactions(running: Standalone) -> None:
    """A message expires, is recovered under a new id, and an operator commits it."""
    topic = "operated"
    set_up = ("topic", "create", topic, "--type", "TRANSACTION")
    checks = ("--first-check", "1s", "--check-period", "1s", "--check-attempts", "1")
    created = tidemill(running, *set_up, *checks)
    assert "half messages checked after 1 s, then every 1 s, 1 times" in created.stdout
    assert "checked after 1 s" in tidemill(running, "topic", "show", topic).stdout

    def listed(*options: str) -> list[dict[str, Any]]:
        done = tidemill(running, "transaction", "list", "--topic", topic, *options, "-o", "json")
        found = json.loads(done.stdout)
        assert isinstance(found, list)
        return found

    async def expire() -> str:
        async with api(running.grpc) as client, checking_producer(client, [topic]):
            transaction_id = await send_half(client, half_message(topic, b"late"))
            await asyncio.to_thread(eventually, lambda: listed("--state", "expired"))
            return transaction_id

    expired_id = asyncio.run(expire())
    shown = tidemill(running, "transaction", "show", expired_id).stdout
    assert "expired: its message is on %DLQ%HALF" in shown
    refused = tidemill(running, "transaction", "commit", expired_id, "--yes")
    assert refused.returncode == 1
    assert "InvalidTransactionId" in refused.stderr
    planned = tidemill(running, "transaction", "recover", "--topic", topic, "--dry-run").stdout
    assert "1 expired transaction of topic operated would be recovered" in planned
    assert expired_id in planned
    recovered = tidemill(running, "transaction", "recover", expired_id, "--yes").stdout
    assert "expired -> recovered" in recovered
    (old, new) = listed()
    assert (old["state"], old["transactionId"]) == ("RECOVERED", expired_id)
    assert new["state"] == "OPEN"
    assert new["transactionId"] in recovered
    again = tidemill(running, "transaction", "recover", expired_id, "--yes")
    assert (again.returncode, "Conflict" in again.stderr) == (1, True)
    check = tidemill(running, "transaction", "check", new["transactionId"], "--yes")
    assert "the check waits for one" in check.stderr

    async def receive() -> None:
        async with api(running.grpc) as client:
            assert await client.receive(topic, topic) == []
            commit = ("transaction", "commit", new["transactionId"], "--yes")
            done = await asyncio.to_thread(tidemill, running, *commit)
            assert "open -> committed" in done.stdout
            (received,) = await client.receive(topic, topic, poll_ms=POLL_MS)
            assert received.body == b"late"

    asyncio.run(receive())
    message = tidemill(running, "message", "show", topic, b"late".hex()).stdout
    assert "transaction_expired" in message
