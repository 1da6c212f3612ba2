"""What runs, with which settings; log levels and slow calls, of real processes."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.clients.api import api, message
from tests.support.clients.commands import tidemill
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone
from tests.support.processes.replicated_standalone import FLAGS, send_signal

STOPPED_S = 1.5  # far longer than slow_call_ms and than the way to the broker
ROUNDED_MS = 4  # each part is rounded


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    folder = tmp_path_factory.mktemp("processes")
    # Every call takes at least the time that makes it slow.
    settings = folder / "settings.yaml"
    settings.write_text("slow_call_ms: 1\n")
    with standalone(folder / "data", f"--config={settings}") as started:
        # Brokers know a proxy some time after its start.
        eventually(lambda: "proxy-0" in names(started))
        yield started


async def send(running: Standalone, topic: str) -> None:
    async with api(running.grpc) as client:
        await client.send(message(topic, b"m"))


def names(running: Standalone) -> set[str]:
    return {each["name"] for each in running.get("processes")["items"]}


def test_all_processes_are_listed(running: Standalone) -> None:
    found = running.get("processes")
    assert {each["name"]: each["kind"] for each in found["items"]} == {
        "admin": "admin",
        "broker-0": "broker",
        "proxy-0": "proxy",
    }
    assert {each["pid"] for each in found["items"]} < set(running.pids())
    assert all(each["ready"] for each in found["items"])
    assert "unreachable" not in found


def test_settings_in_effect_have_their_source(running: Standalone) -> None:
    found = running.get("processes/proxy-0/settings")
    settings = {each["name"]: each for each in found["items"]}
    assert settings["slow_call_ms"] == {
        "name": "slow_call_ms",
        "value": 1,
        "default": 500,
        "source": "FILE",
    }
    shown = tidemill(running, "process", "settings", "proxy-0", "--changed")
    assert "slow_call_ms" in shown.stdout


def test_a_debug_line_appears_while_the_level_is_debug(running: Standalone) -> None:
    def lines(event: str) -> list[str]:
        logged = map(json.loads, running.log.read_text().splitlines())
        return [each["process"] for each in logged if each["event"] == event]

    assert not lines("round")
    done = tidemill(running, "process", "set-log-level", "broker-0", "debug", "--for", "1h")
    assert "broker-0 logs debug (was info) until" in done.stdout
    running.put("topics/noted", messageType="NORMAL", queues=1)
    asyncio.run(send(running, "noted"))
    eventually(lambda: bool(lines("round")))
    [broker] = [each for each in running.get("processes")["items"] if each["kind"] == "broker"]
    assert broker["logLevel"] == "debug"
    assert broker["logLevelUntilMs"] > broker["startedAtMs"]
    back = tidemill(running, "process", "set-log-level", "broker-0", "default")
    assert "broker-0 logs info (was debug)" in back.stdout
    # One round may be under way.
    eventually(lambda: "logLevelUntilMs" not in running.get("processes/broker-0"))


def test_one_call_changes_the_level_of_all_processes(running: Standalone) -> None:
    done = tidemill(running, "process", "set-log-level", "*", "warning", "--for", "1h")
    assert len(done.stdout.splitlines()) == len(names(running))
    tidemill(running, "process", "set-log-level", "*", "default")
    levels = {each["logLevel"] for each in running.get("processes")["items"]}
    assert levels == {"info"}


def test_a_change_of_a_level_is_in_the_audit_log(running: Standalone) -> None:
    tidemill(running, "process", "set-log-level", "proxy-0", "info")
    found = running.get("audit?resource=Process:proxy-0")
    assert [each["result"] for each in found["records"]][:2] == ["ok", "begun"]


def test_a_misspelt_name_gets_the_nearest_one(running: Standalone) -> None:
    refused = httpx.get(f"{running.admin}/api/v1/processes/brokr-0", trust_env=False)
    assert refused.status_code == httpx.codes.NOT_FOUND
    assert refused.json()["detail"] == "there is no process 'brokr-0'; did you mean broker-0?"


def test_slow_calls_name_topic_and_client(running: Standalone) -> None:
    running.put("topics/slow", messageType="NORMAL", queues=1)
    asyncio.run(send(running, "slow"))
    [call] = running.get("slow-calls?topic=slow")["items"]
    assert (call["method"], call["code"], call["process"]) == ("send_message", "OK", "proxy-0")
    assert call["clientId"]
    assert call["durationMs"] >= 1
    shown = tidemill(running, "process", "slow-calls", "--topic", "slow")
    assert call["clientId"] in shown.stdout
    assert running.get("slow-calls?minMs=3600000")["items"] == []


async def send_while_stopped(running: Standalone, topic: str, pids: list[int]) -> None:
    """Send a message to a broker that misses these processes for a while."""
    async with api(running.grpc) as client:
        await client.send(message(topic, b"m"))  # The proxy knows the topic then.
        send_signal(pids, signal.SIGSTOP)
        try:
            sending = asyncio.create_task(client.send(message(topic, b"m")))
            done, _ = await asyncio.wait({sending}, timeout=STOPPED_S)
            assert not done
        finally:
            send_signal(pids, signal.SIGCONT)
        await sending


def longest_call(running: Standalone, topic: str) -> dict[str, Any]:
    calls: list[dict[str, Any]] = running.get(f"slow-calls?topic={topic}")["items"]
    return max(calls, key=lambda call: int(call["durationMs"]))


def test_a_slow_call_shows_that_the_disk_was_slow(running: Standalone) -> None:
    running.put("topics/synced", messageType="NORMAL", queues=1)
    broker = running.processes["broker-0"].pid
    syncs = Path(f"/proc/{broker}/task/{broker}/children").read_text("ascii").split()
    asyncio.run(send_while_stopped(running, "synced", [int(pid) for pid in syncs]))
    call = longest_call(running, "synced")
    parts = call["parts"]
    assert parts["syncMs"] >= STOPPED_S * 500, parts
    assert "replicateMs" not in parts
    assert sum(parts.values()) <= call["durationMs"] + ROUNDED_MS
    shown = tidemill(running, "process", "slow-calls", "--topic", "synced")
    assert f"{parts['syncMs']} ms" in shown.stdout
    page = httpx.get(f"{running.admin}/ui/settings?topic=synced", trust_env=False, timeout=30)
    assert ">Replicate<" in page.text


def test_replicas_and_controllers_are_listed_and_missing_ones_are_named(tmp_path: Path) -> None:
    with standalone(tmp_path / "data", *FLAGS) as running:
        everyone = {"admin", "controller-0", "proxy-0", *(f"broker-0-{n}" for n in range(3))}
        eventually(lambda: names(running) == everyone)
        [replica] = [
            each for each in running.get("processes")["items"] if each["name"] == "broker-0-1"
        ]
        send_signal([replica["pid"]], signal.SIGSTOP)
        try:
            found = running.get("processes")
            assert "broker-0-1" in found["unreachable"]
            assert "broker-0-1" not in {each["name"] for each in found["items"]}
        finally:
            send_signal([replica["pid"]], signal.SIGCONT)
        running.put("topics/replicated", messageType="NORMAL", queues=1)
        master = running.get("replicas")["items"][0]["master"]
        others = [
            each["pid"]
            for each in running.get("processes")["items"]
            if each["kind"] == "broker" and each["name"] != f"broker-0-{master}"
        ]
        asyncio.run(send_while_stopped(running, "replicated", others))
        call = longest_call(running, "replicated")
        assert call["parts"]["replicateMs"] >= STOPPED_S * 500, call
