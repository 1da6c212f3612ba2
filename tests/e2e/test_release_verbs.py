"""What the jobs of a Helm release run, against real processes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.support.processes.processes import Standalone, command, environment, standalone

COMMAND_S = 60.0


def release(running: Standalone, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("--admin", running.admin, "release", *arguments),
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_S,
        env=environment(),
    )


def groups(running: Standalone) -> list[tuple[str, str]]:
    with httpx.Client(trust_env=False) as client:
        items = client.get(f"{running.admin}/api/v1/broker-groups").json()["items"]
    return [(item["name"], item["address"]) for item in items]


def test_a_trial_sends_delays_pops_and_acks(running: Standalone) -> None:
    done = release(running, "trial", f"--endpoint={running.grpc}")
    assert done.returncode == 0, done.stderr
    assert "the trial passed" in done.stdout


def test_a_trial_has_a_user_of_its_own(tmp_path: Path) -> None:
    with standalone(tmp_path / "data") as running, httpx.Client(trust_env=False) as client:
        url, root = f"{running.admin}/api/v1", ("root", "a-secret-of-sixteen")
        user = {"type": "SUPER", "secret": root[1]}
        assert client.put(f"{url}/users/{root[0]}", json=user).status_code == 200
        assert client.put(f"{url}/security", json={"mode": "on"}).status_code == 200
        file = tmp_path / "secret"
        file.write_text(root[1])
        file.chmod(0o600)
        line = command("--admin", running.admin, "--user", root[0], "--secret-file", file)
        trial = [*line, "release", "trial", f"--endpoint={running.grpc}"]
        done = subprocess.run(
            trial, capture_output=True, text=True, check=False, timeout=60, env=environment()
        )
        assert done.returncode == 0, done.stderr
        assert "the trial passed" in done.stdout
        users = client.get(f"{url}/users", auth=root).json()["users"]
        assert [each["name"] for each in users] == ["root"]
        send = [*line, "message", "send", "tidemill-trial", "good morning"]
        subprocess.run(send, check=True, timeout=60, env=environment(), capture_output=True)
        receive = ["receive", "tidemill-trial", "--group=tidemill-trial"]
        for signed in (False, True):
            begin = line if signed else command("--admin", running.admin)
            done = subprocess.run(
                [*begin, "release", *receive, f"--endpoint={running.grpc}"],
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
                env=environment(),
            )
            assert (done.stdout == "good morning\n") is signed
            assert ("UNAUTHORIZED" in done.stderr) is not signed


def test_a_trial_without_a_proxy_fails_with_its_address(running: Standalone) -> None:
    done = release(running, "trial", "--endpoint=127.0.0.1:1", "--patience-s=5")
    assert done.returncode == 3
    assert "127.0.0.1:1 does not answer as a proxy does" in done.stderr


def test_provisioning_creates_the_named_objects_and_is_idempotent(
    running: Standalone, tmp_path: Path
) -> None:
    [(name, address)] = groups(running)
    wanted = tmp_path / "wanted.json"
    wanted.write_text(
        json.dumps(
            {
                "brokerGroups": [{"name": name, "address": address}],
                "topics": [{"name": "orders", "messageType": "FIFO", "queues": 2}],
                "groups": [{"name": "billing", "deliveryOrder": "FIFO", "maxAttempts": 3}],
            }
        )
    )
    for _ in range(2):
        done = release(running, "provision", f"--file={wanted}")
        assert done.returncode == 0, done.stderr
    with httpx.Client(trust_env=False) as client:
        topic = client.get(f"{running.admin}/api/v1/topics/orders").json()
    assert (topic["messageType"], topic["queues"]) == ("FIFO", 2)


def test_an_upgrade_that_loses_a_group_is_refused(running: Standalone) -> None:
    [(name, _)] = groups(running)
    assert release(running, "check", f"--kept={name},other").returncode == 0
    done = release(running, "check", "--kept=other")
    assert done.returncode == 1
    assert f"{name} is the home" in done.stderr


@pytest.mark.parametrize(
    ("mode", "is_refused"), [(None, True), ("off", True), ("permissive", True), ("on", False)]
)
def test_an_upgrade_does_not_refuse_clients_without_notice(
    running: Standalone, tmp_path: Path, mode: str | None, is_refused: bool
) -> None:
    [(name, _)] = groups(running)
    check = ["check", f"--kept={name}", f"--installed={tmp_path}"]
    assert release(running, *check, "--default-security").returncode == 0, "a new release"
    (tmp_path / "broker-groups").write_text(name)
    if mode is not None:
        (tmp_path / "security-mode").write_text(mode)
    done = release(running, *check, "--default-security")
    assert (done.returncode == 1) is is_refused
    assert ("security.mode is not set" in done.stderr) is is_refused
    assert release(running, *check).returncode == 0, "the values set the mode"


def test_messages_are_received_and_acked(running: Standalone) -> None:
    running.put("topics/hello", queues=1)
    running.put("groups/readers")
    with httpx.Client(trust_env=False) as client:
        url = f"{running.admin}/api/v1/topics/hello/messages"
        client.post(url, json={"body": "good morning"}).raise_for_status()
    receive = ["receive", "hello", "--group=readers", f"--endpoint={running.grpc}"]
    assert release(running, *receive).stdout == "good morning\n"
    assert running.lag("readers") == 0
