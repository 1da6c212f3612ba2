"""Bans of real processes: REST API, command line and proxies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from tests.support.clients.api import METADATA, api, message
from tests.support.clients.commands import tidemill
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

CLIENT_ID = dict(METADATA)["x-mq-client-id"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("bans") / "data") as started:
        started.put("topics/orders", messageType="NORMAL", queues=2)
        yield started


@pytest.fixture
def http(running: Standalone) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{running.admin}/api/v1", trust_env=False, timeout=20) as client:
        yield client


def send(running: Standalone) -> v2.Status | grpc.StatusCode:
    """Send on a new connection; return the status of the answer, or that of the call."""

    async def once() -> v2.Status | grpc.StatusCode:
        async with api(running.grpc) as client:
            try:
                status = (await client.send(message("orders", b"m"))).status
            except grpc.aio.AioRpcError as error:
                return error.code()
        assert isinstance(status, v2.Status)
        return status

    return asyncio.run(once())


def code(running: Standalone) -> int:
    status = send(running)
    return status.code if isinstance(status, v2.Status) else 0


def test_a_banned_client_is_refused_until_its_ban_is_deleted(running: Standalone) -> None:
    assert code(running) == v2.OK
    planned = tidemill(running, "ban", "create", "--client", CLIENT_ID, "--dry-run")
    assert planned.stdout == f"client {CLIENT_ID}: would be banned, until deleted\n"
    assert code(running) == v2.OK
    tidemill(running, "ban", "create", "--client", CLIENT_ID, "--for", "1h", "--reason", "a loop")
    eventually(lambda: code(running) == v2.UNAUTHORIZED)
    [header, row] = tidemill(running, "ban", "list").stdout.splitlines()
    assert header.split() == ["KIND", "SUBJECT", "UNTIL", "REASON"]
    assert row.startswith(f"client  {CLIENT_ID}")
    assert row.rstrip().endswith("a loop")
    deleted = tidemill(running, "ban", "delete", "--client", CLIENT_ID)
    assert deleted.stdout == f"ban of client {CLIENT_ID}: deleted\n"
    eventually(lambda: code(running) == v2.OK)


def test_a_banned_address_loses_its_connections_and_loopback_undoes_it(
    running: Standalone, http: httpx.Client
) -> None:
    refused = http.post("/bans", json={"address": "127.0.0.0/8"})
    assert (refused.status_code, refused.json()["title"]) == (409, "Conflict")
    assert "with force (--force)" in refused.json()["detail"]
    tidemill(running, "ban", "create", "--address", "127.0.0.0/8", "--force")
    eventually(lambda: send(running) == grpc.StatusCode.UNAVAILABLE)
    [ban] = http.get("/bans").raise_for_status().json()["bans"]
    assert (ban["name"], ban["value"]) == ("address:127.0.0.0%2F8", "127.0.0.0/8")
    assert http.get("/bans/address:127.0.0.0%252F8").json() == ban
    deleted = tidemill(running, "ban", "delete", "--address", "127.0.0.0/8")
    assert deleted.stdout == "ban of address 127.0.0.0/8: deleted\n"
    eventually(lambda: code(running) == v2.OK)


def test_a_ban_names_one_known_subject(http: httpx.Client) -> None:
    for body, status in (
        ({}, 400),
        ({"clientId": "c", "address": "10.0.0.1"}, 400),
        ({"address": "10.0.0.1/8"}, 400),
        ({"user": "unknown"}, 404),
        ({"clientId": "c", "forMs": 0}, 400),
        ({"clientId": "c", "ifVersion": 7}, 409),
    ):
        assert http.post("/bans", json=body).status_code == status, body
    assert http.get("/bans/client:c").status_code == 404
    assert http.delete("/bans/client:c").status_code == 404


def test_ended_bans_are_listed_until_they_are_deleted(
    running: Standalone, http: httpx.Client
) -> None:
    for name in ("one", "two"):
        http.post("/bans", json={"clientId": name, "forMs": 1}).raise_for_status()
    http.post("/bans", json={"clientId": "three"}).raise_for_status()
    planned = tidemill(running, "ban", "delete", "--ended", "--dry-run").stdout
    assert planned == "2 ended bans: would be deleted\n"
    assert tidemill(running, "ban", "delete", "--ended").stdout == "2 ended bans: deleted\n"
    [left] = http.get("/bans").json()["bans"]
    assert (left["value"], left["ended"]) == ("three", False)
    http.delete("/bans/client:three").raise_for_status()


def test_only_a_super_user_bans_a_super_user(tmp_path: Path) -> None:
    with (
        standalone(tmp_path / "data") as running,
        httpx.Client(base_url=f"{running.admin}/api/v1", trust_env=False, timeout=20) as http,
    ):
        secrets = {}
        for name, body in (
            ("root", {"type": "SUPER"}),
            ("ops", {"roles": ["operator"]}),
            ("shop", {}),
        ):
            made = http.put(f"/users/{name}", json=body).raise_for_status().json()
            secrets[name] = made["secret"]
        http.put("/security", json={"mode": "on"}).raise_for_status()

        def mode_is_on() -> bool:
            return http.get("/users/shop").status_code == 401

        eventually(mode_is_on)
        http.auth = "ops", secrets["ops"]
        assert http.post("/bans", json={"user": "root"}).status_code == 403
        own = http.post("/bans", json={"user": "ops"})
        assert own.status_code == 409
        assert http.post("/bans", json={"user": "shop"}).is_success
        http.auth = "shop", secrets["shop"]

        def is_refused() -> bool:
            answer = http.get("/topics")
            return answer.status_code == 401 and "banned" in json.dumps(answer.json())

        eventually(is_refused)
        http.auth = "ops", secrets["ops"]
        http.delete("/bans/user:shop").raise_for_status()
