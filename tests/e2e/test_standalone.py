"""The standalone command, as a user and an init system see it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import httpx
import pytest

from tests.support.eventually import eventually
from tests.support.processes.killing import child_pid, is_back
from tests.support.processes.processes import (
    ADMIN_S,
    command,
    descendants,
    environment,
    is_running,
    standalone,
    start_standalone,
)


def get(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            body: bytes = response.read()
    except urllib.error.HTTPError as refusal:
        refusal.close()  # It holds the connection.
        raise
    return body.decode()


def run_to_end(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_the_ready_line_is_all_that_standard_output_gets(tmp_path: Path) -> None:
    running = start_standalone(tmp_path / "data")
    assert running.stop() == 0
    assert running.process.stdout is not None
    with running.process.stdout as stdout:
        assert stdout.read() == ""
    ready = json.loads(running.ready_line)
    assert ready["event"] == "ready"
    assert set(ready) == {"event", "grpc", "admin", "processes"}
    assert set(ready["processes"]) == {"broker-0", "proxy-0", "admin"}


@pytest.mark.parametrize("flags", [[], ["--groups=2"], ["--replicas=3"]])
def test_a_good_start_logs_no_warning(tmp_path: Path, flags: list[str]) -> None:
    with standalone(tmp_path / "data", *flags) as running:
        running.put("topics/first")
        with httpx.Client(trust_env=False, timeout=ADMIN_S) as client:
            path = f"{running.admin}/api/v1/topics/first/messages"
            client.post(path, json={"body": "x"}).raise_for_status()
        text = running.log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line for line in lines if line["level"] not in {"debug", "info"}] == []
    assert "Errno" not in text
    at = {(line["process"], line["event"]): n for n, line in enumerate(lines)}
    serving = [n for (_, event), n in at.items() if event == "broker serves"]
    connected = [n for (process, _), n in at.items() if process in {"proxy-0", "admin"}]
    assert max(serving) < min(connected)


def test_sigterm_leaves_nothing_running(tmp_path: Path) -> None:
    with standalone(tmp_path / "data") as running:
        pids = running.pids()
        assert len(pids) == 6  # supervisor, broker with two sync helpers, proxy, admin
        assert running.stop() == 0
        eventually(lambda: not any(map(is_running, pids)))


def test_a_killed_supervisor_takes_its_children_along(tmp_path: Path) -> None:
    with standalone(tmp_path / "data") as running:
        pids = running.pids()
        running.process.kill()
        running.process.wait()
        eventually(lambda: not any(map(is_running, pids)))


@pytest.mark.parametrize("name", ["broker-0", "proxy-0", "admin"])
def test_a_killed_child_returns_on_its_ports_and_the_others_live_on(
    tmp_path: Path, name: str
) -> None:
    with standalone(tmp_path / "data") as running:
        child = running.processes[name]
        os.kill(child.pid, signal.SIGKILL)
        eventually(lambda: not is_running(child.pid))
        eventually(lambda: "rocketmq_build_info" in get(child.metrics))
        eventually(lambda: "topics" in json.loads(get(f"{running.admin}/api/v1/topics")))
        for other, process in running.processes.items():
            assert other == name or is_running(process.pid)
        assert child.pid not in descendants(running.process.pid)


def sockets_of(pid: int) -> set[str]:
    found = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # It was closed meanwhile.
            found.add(str(file.readlink()))
    return {one for one in found if one.startswith("socket:")}


@pytest.mark.parametrize("name", ["broker-0", "proxy-0", "admin"])
def test_a_child_has_its_own_name_and_group_and_no_socket_of_its_supervisor(
    tmp_path: Path, name: str
) -> None:
    """A copy of a socket of another child would hide that child's end from the supervisor."""
    with standalone(tmp_path) as running:
        first = child_pid(running, name)
        os.kill(first, signal.SIGKILL)
        eventually(lambda: is_back(running, name, first), within_ms=60_000)
        second = child_pid(running, name)
        assert os.getpgid(second) == second
        own = sockets_of(running.process.pid)
        assert own, "the supervisor has sockets"
        for other in ("broker-0", "proxy-0", "admin"):
            assert not own & sockets_of(child_pid(running, other)), other


def test_every_process_serves_metrics_and_its_state(tmp_path: Path) -> None:
    with standalone(tmp_path / "data") as running:
        for name, process in running.processes.items():
            metrics = get(process.metrics)
            node_type = name.partition("-")[0]
            assert f'node_type="{node_type}"' in metrics
            assert "process_resident_memory_bytes" in metrics
            assert "python_gc_collections_total" in metrics
            base = process.metrics.removesuffix("/metrics")
            assert get(f"{base}/livez") == "ok\n"
            assert get(f"{base}/readyz").startswith("ready\n")


def test_a_second_broker_on_the_directory_is_refused(tmp_path: Path) -> None:
    with standalone(tmp_path / "data"):
        refused = run_to_end(
            "broker", f"--data-dir={tmp_path / 'data'}", "--grpc-port=0", "--metrics-port=0"
        )
    assert refused.returncode == 1
    assert "is in use by another broker" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_second_standalone_on_the_directory_is_refused(tmp_path: Path) -> None:
    with standalone(tmp_path / "data"):
        refused = run_to_end(
            "standalone",
            f"--data-dir={tmp_path / 'data'}",
            "--grpc-port=0",
            "--admin-port=0",
            "--metrics-port=0",
        )
    assert refused.returncode != 0
    assert refused.stdout == ""
    [line] = refused.stderr.splitlines()
    assert "is in use by another broker" in line
    assert "stop it first, or choose another --data-dir" in line


def test_a_start_with_fewer_broker_groups_than_there_are_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with standalone(data, "--groups=2"):
        pass
    refused = run_to_end(
        "standalone", f"--data-dir={data}", "--grpc-port=0", "--admin-port=0", "--metrics-port=0"
    )
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert "this data directory holds 2 broker groups: start with --groups 2" in refused.stderr


@pytest.mark.parametrize("flag", ["--grpc-port", "--admin-port", "--metrics-port"])
@pytest.mark.parametrize("proxies", [1, 2])
def test_a_taken_port_ends_the_start_with_a_sentence(
    tmp_path: Path, flag: str, proxies: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = {"--grpc-port": 0, "--admin-port": 0, "--metrics-port": 0, flag: port}
        refused = run_to_end(
            "standalone",
            f"--data-dir={tmp_path / 'data'}",
            f"--proxies={proxies}",
            *(f"{key}={value}" for key, value in flags.items()),
        )
    assert refused.returncode != 0
    assert refused.stdout == ""
    [line] = refused.stderr.splitlines()
    assert f":{port}" in line
    assert f"or change {flag}" in line


def test_several_proxies_share_the_port(tmp_path: Path) -> None:
    with standalone(tmp_path / "data", "--proxies=2") as running:
        assert {"proxy-0", "proxy-1"} < set(running.processes)
        host, _, port = running.grpc.rpartition(":")
        with socket.create_connection((host, int(port))):
            pass


def test_the_admin_api_reaches_the_broker(tmp_path: Path) -> None:
    with standalone(tmp_path / "data") as running:
        body = json.dumps({"messageType": "FIFO", "queues": 3}).encode()
        put = urllib.request.Request(
            f"{running.admin}/api/v1/topics/orders",
            data=body,
            method="PUT",
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(put, timeout=10) as response:
            assert json.load(response)["queues"] == 3
        answer = httpx.get(f"{running.admin}/api/v1/topics/none", trust_env=False)
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert answer.json()["code"] == 40402


def test_stored_topics_survive_a_restart(tmp_path: Path) -> None:
    for description in ("MIXED, 3 queues", "exists already, unchanged"):
        with standalone(tmp_path / "data") as running:
            shown = subprocess.run(
                command("topic", "create", "orders", "--queues=3", f"--admin={running.admin}"),
                env=environment(),
                capture_output=True,
                text=True,
                timeout=30,
                check=True,
            )
            assert shown.stdout == f"topic orders: {description}\n"
