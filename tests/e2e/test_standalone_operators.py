"""`tidemill standalone --replicas 3`: clients and operators survive the loss of a master."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.clients.api import api, message
from tests.support.eventually import eventually
from tests.support.processes.controlled_group import parent_of
from tests.support.processes.processes import (
    ADMIN_S,
    STOP_S,
    Standalone,
    command,
    environment,
    standalone,
)
from tidemill.controller.election.failure import Failure
from tidemill.controller.election.history import HANDED_OVER

WITHIN_MS = 120_000  # Timeout of a delivery, with other tests on the machine.
COMMAND_S = 120.0  # Timeout of a command that waits or reads whole segments.


def get(running: Standalone, path: str) -> Any:
    """GET a path of the REST API; raise LookupError on an error response, so tests can retry."""
    with httpx.Client(trust_env=False, timeout=ADMIN_S) as client:
        answer = client.get(f"{running.admin}/api/v1/{path}")
    if not answer.is_success:
        raise LookupError(answer.text)
    return answer.json()


def post(running: Standalone, path: str, **body: object) -> None:
    with httpx.Client(trust_env=False, timeout=ADMIN_S) as client:
        client.post(f"{running.admin}/api/v1/{path}", json=body).raise_for_status()


def has_put(running: Standalone, path: str) -> bool:
    """Return whether the REST API has created a topic."""
    with httpx.Client(trust_env=False, timeout=ADMIN_S) as client:
        answer = client.put(f"{running.admin}/api/v1/{path}", json={"queues": 4})
    # Without a master the API answers with an error. The process continues.
    if answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR:
        raise RuntimeError(answer.text)
    return answer.is_success


def drained(running: Standalone, replica: str, *flags: str) -> str:
    """Drain a replica on the command line; return the output, also of a rejection."""
    return operate(running, "replica", "drain", replica, *flags)


def operate(running: Standalone, *arguments: str) -> str:
    done = subprocess.run(
        [*command(*arguments), f"--admin={running.admin}"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    return done.stdout + done.stderr


def role_of(running: Standalone, replica: int) -> str:
    return str(group_of(running)["replicas"][replica]["role"])


def group_of(running: Standalone) -> Any:
    return get(running, "replicas")["items"][0]


def await_in_sync(running: Standalone) -> None:
    eventually(lambda: group_of(running)["inSync"] == 3, within_ms=WITHIN_MS)


def move_master(running: Standalone, target: int) -> None:
    """Make a replica the master, repeat rejected requests, and wait for the result."""

    def is_there() -> bool:
        if group_of(running)["master"] == target:
            return True
        if "transfer" not in group_of(running):
            # On a busy machine, a target without a report for a second is rejected.
            with contextlib.suppress(httpx.HTTPStatusError):
                post(running, "replicas/broker-0:transfer", target=target)
        return False

    eventually(is_there, within_ms=WITHIN_MS)


def test_replicas_on_a_laptop_outlive_their_master(tmp_path: Path) -> None:
    async def send(endpoint: str, body: bytes) -> None:
        async with api(endpoint, call_s=WITHIN_MS / 1000) as client:
            answer = await client.send(message("orders", body))
            assert answer.status.code == 20000, answer.status

    with standalone(tmp_path / "data", "--replicas=3") as running:
        await_in_sync(running)
        running.put("topics/orders", queues=4)
        asyncio.run(send(running.grpc, b"one"))
        move_master(running, 1)
        asyncio.run(send(running.grpc, b"two"))
        # The REST API also finds the master, or waits for it.
        post(running, "topics/orders/messages", body="by an operator")
        assert has_put(running, "topics/second")
        move_master(running, 1)  # If another replica is the master.
        epoch = group_of(running)["epoch"]
        os.kill(running.processes["broker-0-1"].pid, signal.SIGKILL)
        asyncio.run(send(running.grpc, b"three"))
        await_in_sync(running)

        def election() -> Any:
            """Return the first election after the kill. The history has the newest first."""
            return [one for one in group_of(running)["history"] if one["epoch"] > epoch][-1]

        assert (election()["source"], election()["reason"]) == (1, Failure.DIED.value)
        # A second later the history has the duration without sends.
        eventually(lambda: "awayMs" in election(), within_ms=WITHIN_MS)
        assert election()["awayMs"] < WITHIN_MS
        names = {topic["name"] for topic in get(running, "topics")["topics"]}
        assert {"orders", "second"} <= names
        assert running.stop() == 0


def test_a_replica_is_drained_and_counts_again(tmp_path: Path) -> None:
    with standalone(tmp_path / "data", "--replicas=3") as running:
        await_in_sync(running)
        master = group_of(running)["master"]
        assert "hands over" in drained(running, f"broker-0-{master}")
        eventually(lambda: role_of(running, master) == "retired", within_ms=WITHIN_MS)
        moved = group_of(running)
        assert moved["master"] != master
        assert HANDED_OVER in [one["reason"] for one in moved["history"]]
        # The broker group has two remaining replicas, and min-in-sync is 2.
        refused = drained(running, f"broker-0-{moved['master']}")
        assert "the group has 1 of the 2 replicas" in refused
        assert "full replica" in operate(running, "replica", "undrain", f"broker-0-{master}")
        await_in_sync(running)
        assert role_of(running, master) == "in-sync"
        assert "is not a replica" in drained(running, "broker")


@pytest.mark.heavy
def test_a_blocked_group_reports_it_and_continues_with_one_replica(tmp_path: Path) -> None:
    with standalone(tmp_path / "data", "--replicas=3") as running:
        await_in_sync(running)
        running.put("topics/orders", queues=1)
        master = group_of(running)["master"]
        target = next(n for n in range(3) if n != master)
        said = operate(running, "broker-group", "transfer", "broker-0", f"--to={target}", "--wait")
        assert f"replica {target} is master" in said
        assert f"replica {target} is master" in operate(
            running, "broker-group", "transfer", "broker-0", f"--to={target}"
        )
        await_in_sync(running)
        still = [n for n in range(3) if n != target]
        stopped = [running.processes[f"broker-0-{n}"].pid for n in still]
        stopped += [parent_of(pid) for pid in stopped]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            # At first the API may know only one of the two states.
            alarm = f"replicas {still[0]} and {still[1]} are down"
            eventually(lambda: alarm in group_of(running).get("alarm", ""), within_ms=WITHIN_MS)
            assert (
                "`tidemill broker-group set broker-0 --min-in-sync 1`" in group_of(running)["alarm"]
            )
            assert alarm in operate(running, "replica", "list", "-o", "json")
            assert "add --yes" in operate(
                running, "broker-group", "set", "broker-0", "--min-in-sync=1"
            )
            said = operate(running, "broker-group", "set", "broker-0", "--min-in-sync=1", "--yes")
            assert "1 of its replicas must have a message" in said
            post(running, "topics/orders/messages", body="on one disk")
            eventually(lambda: "alarm" not in group_of(running), within_ms=WITHIN_MS)
            assert "is live; stop it first" in operate(
                running, "broker-group", "remove", "broker-0", "--record-only", "--yes"
            )
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        await_in_sync(running)
        operate(running, "broker-group", "set", "broker-0", "--min-in-sync=2")
        assert group_of(running)["minInSync"] == 2


@pytest.mark.heavy
def test_replicas_started_once_with_other_folders_keep_their_data(tmp_path: Path) -> None:
    data, aside = tmp_path / "data", tmp_path / "aside"
    with standalone(data, "--replicas=3") as running:
        await_in_sync(running)
        running.put("topics/orders", queues=1)
        post(running, "topics/orders/messages", body="kept")
        assert running.stop() == 0
    aside.mkdir()
    stores = [each for each in data.iterdir() if each.name != "controller-0"]
    for each in stores:
        each.rename(aside / each.name)
    log = (tmp_path / "empty.log").open("w")
    with log:
        once = subprocess.Popen(
            command(
                "standalone",
                f"--data-dir={data}",
                "--replicas=3",
                "--grpc-port=0",
                "--admin-port=0",
                "--metrics-port=0",
            ),
            env=environment(),
            stdout=log,
            stderr=log,
        )
        try:
            eventually(
                lambda: "started with another store" in (tmp_path / "empty.log").read_text(),
                within_ms=WITHIN_MS,
            )
        finally:
            once.terminate()
            once.wait(STOP_S)
    for each in data.iterdir():
        if each.name != "controller-0":
            shutil.rmtree(each) if each.is_dir() else each.unlink()
    for each in stores:
        (aside / each.name).rename(each)
    with standalone(data, "--replicas=3") as running:
        await_in_sync(running)
        assert "uncleanSince" not in group_of(running)
        assert len(get(running, "topics/orders/queues/0/messages")["messages"]) == 1
        post(running, "topics/orders/messages", body="more")
        assert running.stop() == 0


@pytest.mark.heavy
def test_a_group_of_replicas_goes_back_to_a_backup(tmp_path: Path) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    with standalone(data, "--replicas=3") as running:
        await_in_sync(running)
        running.put("topics/orders", queues=1)
        post(running, "topics/orders/messages", body="kept")
        copied = subprocess.run(
            command("store", "copy", str(data), str(backup)),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        assert copied.returncode == 0, copied.stderr
        post(running, "topics/orders/messages", body="later")
        assert running.stop() == 0
    # The controllers' records remain. Replica 0 has the copy. The others are empty.
    for each in [each for each in data.iterdir() if each.name != "controller-0"]:
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    for each in [each for each in backup.iterdir() if not each.name.startswith("broker-0-")]:
        each.rename(data / each.name)
    log_file = tmp_path / "restored.log"
    with log_file.open("w") as log:
        restored = subprocess.Popen(
            command(
                "standalone",
                f"--data-dir={data}",
                "--replicas=3",
                "--grpc-port=0",
                "--admin-port=0",
                "--metrics-port=0",
            ),
            env=environment(),
            stdout=log,
            stderr=log,
        )
        try:
            eventually(
                lambda: "started with another store" in log_file.read_text(), within_ms=WITHIN_MS
            )
            serves = eventually(
                lambda: [
                    line for line in log_file.read_text().splitlines() if "admin serves" in line
                ],
                within_ms=WITHIN_MS,
            )
            at = Standalone.__new__(Standalone)
            at.admin = json.loads(serves[0])["admin"]
            # If another replica connects first, this is rejected until replica 0 connects.
            options = ("--unclean", "--to=0", "--reason=restored", "--yes")
            replace = ("broker-group", "transfer", "broker-0", *options)
            eventually(lambda: "replica 0 is master" in operate(at, *replace), within_ms=WITHIN_MS)
            eventually(lambda: group_of(at)["inSync"] == 3, within_ms=WITHIN_MS)
            eventually(lambda: count_of(at) == 1, within_ms=WITHIN_MS)
        finally:
            restored.terminate()
            restored.wait(STOP_S)


def count_of(running: Standalone) -> int:
    return len(get(running, "topics/orders/queues/0/messages")["messages"])
