"""Paused consumer groups over real processes with several broker groups."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator

import httpx
import pytest

from tests.support.clients.api import POLL_MS_MIN, Api, api, message
from tests.support.clients.commands import tidemill
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone

TOPIC = "orders"
COUNT = 30  # messages, spread over the broker groups


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("pauses") / "data", "--groups=3") as started:
        started.put(f"topics/{TOPIC}", messageType="NORMAL", queues=3)
        yield started


async def send(client: Api) -> None:
    for number in range(COUNT):
        sent = await client.send(message(TOPIC, b"%d" % number))
        assert sent.status.code == 20000, sent


async def receive(client: Api, group: str, count: int) -> set[bytes]:
    """Receive and ack messages until there are `count` different ones."""
    bodies: set[bytes] = set()
    while len(bodies) < count:
        found = await client.receive(TOPIC, group, poll_ms=POLL_MS_MIN)
        await client.ack(TOPIC, group, [one.system_properties.receipt_handle for one in found])
        bodies |= {one.body for one in found}
    return bodies


def lag(running: Standalone, group: str) -> int:
    total: dict[str, int] = running.get(f"groups/{group}/progress")["total"]
    return total["lag"]


async def wait_until_paused(client: Api, group: str) -> None:
    """Receive single messages until all broker groups know of the pause; ready ones remain."""
    async with asyncio.timeout(60):
        while await client.receive(TOPIC, group, invisible_ms=1_000, batch_size=1):
            pass


def test_a_paused_group_gets_nothing_until_it_is_resumed(running: Standalone) -> None:
    running.put("groups/billing")
    running.put("groups/other")

    async def consume() -> None:
        async with api(running.grpc) as client:
            await send(client)
            arguments = "group", "pause", "billing", "--for", "2h", "--reason", "repairs"
            done = await asyncio.to_thread(tidemill, running, *arguments)
            assert "group billing is paused until" in done.stdout
            await wait_until_paused(client, "billing")
            assert len(await receive(client, "other", COUNT)) == COUNT
            # A poll that waits is answered as soon as the group is resumed.
            waiting = asyncio.create_task(receive(client, "billing", COUNT))
            ended, _ = await asyncio.wait({waiting}, timeout=1)
            assert not ended
            resumed = await asyncio.to_thread(tidemill, running, "group", "resume", "billing")
            assert "group billing receives messages" in resumed.stdout
            assert len(await asyncio.wait_for(waiting, 60)) == COUNT

    asyncio.run(consume())
    assert "paused" not in running.get("groups/billing")


def test_a_pause_counts_as_lag_and_not_as_demand(running: Standalone) -> None:
    running.put("groups/slow")

    async def begin() -> None:
        async with api(running.grpc) as client:
            await send(client)
            assert await client.receive(TOPIC, "slow", invisible_ms=1_000, batch_size=1)

    asyncio.run(begin())
    eventually(lambda: running.get("groups/slow/scaling")["topics"][0]["ready"] >= COUNT)
    tidemill(running, "group", "pause", "slow")
    eventually(lambda: running.get("groups/slow/scaling")["topics"][0]["ready"] == 0)
    assert lag(running, "slow") >= COUNT
    [row] = [one for one in running.get("groups")["groups"] if one["name"] == "slow"]
    assert row["state"] == "PAUSED"
    tidemill(running, "group", "resume", "slow")


def test_a_pause_is_in_the_audit_log_with_its_end(running: Standalone) -> None:
    running.put("groups/audited")
    tidemill(running, "group", "pause", "audited", "--for", "1h", "--reason", "why")
    [record] = running.get("audit?resource=Group:audited&action=update")["records"]
    assert record["after"]["pauseReason"] == "why"
    assert record["after"]["pausedUntilMs"] > record["atMs"]


def test_the_diagnosis_names_the_pause_and_its_command_ends_it(running: Standalone) -> None:
    running.put("groups/diagnosed")
    tidemill(running, "group", "pause", "diagnosed", "--reason", "repairs")
    first = running.get("groups/diagnosed/diagnosis")["findings"][0]
    assert first["code"] == "PAUSED"
    assert "repairs" in first["text"]
    shown = tidemill(running, "group", "show", "diagnosed")
    assert f"PAUSED: {first['text']}" in shown.stdout
    assert shlex.split(first["command"])[0] == "tidemill"
    assert tidemill(running, *shlex.split(first["command"])[1:]).returncode == 0
    codes = [each["code"] for each in running.get("groups/diagnosed/diagnosis")["findings"]]
    assert "PAUSED" not in codes
    assert tidemill(running, "group", "show", "diagnosed").returncode == 0


def test_a_dry_run_pauses_nothing(running: Standalone) -> None:
    running.put("groups/dry")
    done = tidemill(running, "group", "pause", "dry", "--dry-run")
    assert "group dry would be paused until" in done.stdout
    assert "paused" not in running.get("groups/dry")


def test_a_pause_without_a_body_has_the_defaults(running: Standalone) -> None:
    running.put("groups/bodiless")
    url = f"{running.admin}/api/v1/groups/bodiless:pause"
    paused = httpx.post(url, trust_env=False)
    assert paused.status_code == httpx.codes.OK, paused.text
    assert paused.json()["paused"]["untilMs"] > 0
    text = {"content-type": "text/plain"}
    refused = httpx.post(url, content=b"{}", headers=text, trust_env=False)
    assert refused.status_code == httpx.codes.UNSUPPORTED_MEDIA_TYPE


def test_wrong_pauses_are_refused(running: Standalone) -> None:
    running.put("groups/refused")
    url = f"{running.admin}/api/v1/groups/refused:pause"
    for body, status in (
        ({"untilMs": 1}, httpx.codes.CONFLICT),
        ({"untilMs": 2**50}, httpx.codes.CONFLICT),
        ({"reason": "x" * 256}, httpx.codes.BAD_REQUEST),
        ({"until": 1}, httpx.codes.BAD_REQUEST),
    ):
        assert httpx.post(url, json=body, trust_env=False).status_code == status, body
    missing = httpx.post(f"{running.admin}/api/v1/groups/missing:pause", json={}, trust_env=False)
    assert missing.status_code == httpx.codes.NOT_FOUND
    assert "paused" not in running.get("groups/refused")
