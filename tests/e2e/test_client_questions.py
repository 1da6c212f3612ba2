"""Operators list the official clients and ask them questions, as documented per language."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.support.clients.api import METADATA, api
from tests.support.clients.client_process import (
    GO_PROGRAM,
    JAVA_CLASSES,
    JAVA_LIBRARIES,
    NODE_PACKAGES,
    StayingClient,
    needs,
    staying_client,
)
from tests.support.clients.grpcio_client import read
from tests.support.eventually import eventually
from tests.support.processes.processes import (
    ADMIN_S,
    START_S,
    Standalone,
    command,
    environment,
    standalone,
)
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

CLI_S = 30.0
BRIEF = "--timeout=1s"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    data_dir = tmp_path_factory.mktemp("asked") / "data"
    with standalone(data_dir, "--proxies=2", "--groups=2") as started:
        yield started


@pytest.fixture
def ask(running: Standalone) -> Any:
    """Return a function that runs a command and returns its output or its error."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*arguments, "--admin", running.admin),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=CLI_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    return run


def send(running: Standalone, topic: str, body: str) -> str:
    with httpx.Client(trust_env=False, timeout=ADMIN_S) as client:
        url = f"{running.admin}/api/v1/topics/{topic}/messages"
        message_id = client.post(url, json={"body": body}).raise_for_status().json()["messageId"]
    assert isinstance(message_id, str)
    return message_id


def the_client(ask: Any, group: str) -> dict[str, Any]:
    """Return the only consumer of a consumer group, once its proxy knows it."""

    def look() -> dict[str, Any]:
        clients = json.loads(ask("client", "list", "--group", group, "-o", "json").stdout)[
            "clients"
        ]
        assert len(clients) == 1, clients
        assert isinstance(clients[0], dict)
        return clients[0]

    return eventually(look)


def prepare(running: Standalone, name: str) -> None:
    running.put(f"topics/{name}", queues=2)
    running.put(f"groups/{name}")


def test_python_clients_are_seen_and_do_not_answer(
    tmp_path: Path, running: Standalone, ask: Any
) -> None:
    prepare(running, "python")
    with staying_client("python", tmp_path, running.grpc, topic="python", group="python"):
        client = the_client(ask, "python")
        assert (client["kind"], client["language"]) == ("pushConsumer", "PYTHON")
        assert client["subscriptions"] == [
            {"topic": "python", "filterType": "TAG", "expression": "*"}
        ]

        def listed_all() -> dict[str, Any]:
            found: dict[str, Any] = json.loads(
                ask("client", "list", "--topic", "python", "-o", "json").stdout
            )
            assert {each["kind"] for each in found["clients"]} == {"pushConsumer", "producer"}
            return found

        listed = eventually(listed_all)
        assert not listed.get("unreachable")
        shown = ask("client", "show", client["clientId"])
        assert "can be asked" in shown.stdout
        refused = ask("client", "stack", client["clientId"], BRIEF)
        assert refused.returncode == 1
        assert "ClientTimeout" in refused.stderr
    refused = ask("client", "stack", "nobody", BRIEF)
    assert "ClientNotFound" in refused.stderr


@needs("java", JAVA_CLASSES, JAVA_LIBRARIES)
def test_a_java_push_consumer_shows_its_stack_and_verifies_messages(
    tmp_path: Path, running: Standalone, ask: Any
) -> None:
    prepare(running, "java")
    with staying_client("java", tmp_path, running.grpc, topic="java", group="java") as client:
        client_id = the_client(ask, "java")["clientId"]
        assert "RocketmqClientScheduler" in ask("client", "stack", client_id).stdout
        good, poison = send(running, "java", "good"), send(running, "java", "poison")
        client.wait_for("received", id=good)
        verified = ask("message", "verify", "java", good, "--client", client_id)
        assert (verified.returncode, "consumed message" in verified.stdout) == (0, True)
        client.wait_for("received", 2, id=good)
        failed = ask("message", "verify", "java", poison, "--client", client_id)
        assert failed.returncode == 1
        assert "FAILED to consume" in failed.stdout
        missing = ask("message", "verify", "java", "no such id", "--client", client_id)
        assert "MessageNotFound" in missing.stderr


@needs("go", GO_PROGRAM)
def test_a_go_client_shows_its_stack_and_cannot_verify(
    tmp_path: Path, running: Standalone, ask: Any
) -> None:
    prepare(running, "go")
    with staying_client("go", tmp_path, running.grpc, topic="go", group="go") as client:
        client_id = the_client(ask, "go")["clientId"]
        assert "goroutine" in ask("client", "stack", client_id).stdout
        check_cannot_verify(running, ask, client, "go", client_id)


@needs("node", NODE_PACKAGES)
def test_a_node_client_cannot_verify(tmp_path: Path, running: Standalone, ask: Any) -> None:
    prepare(running, "node")
    with staying_client("node", tmp_path, running.grpc, topic="node", group="node") as client:
        client_id = the_client(ask, "node")["clientId"]
        assert ask("client", "stack", client_id).stdout == "mock stack\n"
        check_cannot_verify(running, ask, client, "node", client_id)


def test_a_kicked_client_returns_its_messages_and_may_come_back(
    running: Standalone, ask: Any
) -> None:
    prepare(running, "kicked")

    async def kick_and_receive() -> None:
        async with (
            api(running.grpc) as client,
            api(running.grpc, headers={"x-mq-client-id": "other"}) as other,
        ):
            await asyncio.to_thread(send, running, "kicked", "m")
            [held] = await client.receive("kicked", "kicked", poll_ms=5_000, renews=True)
            await client.heartbeat("kicked")
            planned = await asyncio.to_thread(ask, "client", "kick", "tests", "--dry-run")
            assert planned.stdout.startswith("client tests: would be kicked at proxy-")
            done = await asyncio.to_thread(ask, "client", "kick", "tests")
            assert done.stdout.startswith("client tests: kicked at proxy-")
            [again] = await other.receive("kicked", "kicked", poll_ms=5_000)
            assert again.body == held.body
            second = await asyncio.to_thread(ask, "client", "kick", "tests")
            assert "ClientNotFound" in second.stderr
            assert (await client.heartbeat("kicked")).status.code == v2.OK

    asyncio.run(kick_and_receive())


def test_a_stopping_proxy_sends_reconnect_commands(tmp_path: Path) -> None:
    """The command comes before the streams end, so that supporting clients have moved by then."""

    async def received_commands(running: Standalone) -> list[str | None]:
        settings = v2.Settings(client_type=v2.PRODUCER, publishing=v2.Publishing())
        announced = service.TelemetryCommand(settings=settings)
        async with asyncio.timeout(START_S), api(running.grpc) as client:
            stream = client.stub.Telemetry(metadata=METADATA)
            await stream.write(announced)
            commands: list[str | None] = []
            commands.append((await read(stream, service.TelemetryCommand)).WhichOneof("command"))
            os.kill(running.processes["proxy-0"].pid, signal.SIGTERM)
            while isinstance(command := await stream.read(), service.TelemetryCommand):
                commands.append(command.WhichOneof("command"))
            assert await stream.code() is grpc.StatusCode.OK
        return commands

    with standalone(tmp_path / "data") as running:
        assert asyncio.run(received_commands(running)) == [
            "settings",
            "reconnect_endpoints_command",
        ]


def test_a_consumer_gets_changes_of_its_group(tmp_path: Path) -> None:
    async def received_commands(running: Standalone) -> list[int]:
        subscription = v2.Subscription(group=v2.Resource(name="billing"))
        settings = v2.Settings(client_type=v2.PUSH_CONSUMER, subscription=subscription)
        announced = service.TelemetryCommand(settings=settings)
        attempts: list[int] = []
        async with asyncio.timeout(START_S), api(running.grpc) as client:
            stream = client.stub.Telemetry(metadata=METADATA)
            await stream.write(announced)
            for change in (5, 9, None):
                command = await read(stream, service.TelemetryCommand)
                attempts.append(command.settings.backoff_policy.max_attempts)
                if change is not None:
                    await asyncio.to_thread(running.put, "groups/billing", maxAttempts=change)
            await stream.done_writing()
        return attempts

    with standalone(tmp_path / "data") as running:
        running.put("groups/billing", maxAttempts=3)
        assert asyncio.run(received_commands(running)) == [3, 5, 9]


def check_cannot_verify(
    running: Standalone, ask: Any, client: StayingClient, topic: str, client_id: str
) -> None:
    message_id = send(running, topic, "good")
    client.wait_for("received", id=message_id)
    refused = ask("message", "verify", topic, message_id, "--client", client_id)
    assert refused.returncode == 1
    assert "ClientCannot" in refused.stderr
    assert "NOT_IMPLEMENTED" in refused.stderr
