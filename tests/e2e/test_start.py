"""How processes start where something is missing or wrong: what they say."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.processes.processes import STOP_S, broker, command, environment
from tidemill.broker.engine.layout import store_checkpoint
from tidemill.broker.engine.layout.store_checkpoint import StoreCheckpoint
from tidemill.broker.engine.upkeep.checkpoint import CHECKPOINT_FILE


def events(log: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize(("process", "flag"), [("proxy", "--brokers"), ("admin", "--broker")])
def test_a_missing_broker_is_logged_and_the_process_stops_cleanly(
    tmp_path: Path, process: str, flag: str
) -> None:
    log = tmp_path / "log"
    port = "--grpc-port=0" if process == "proxy" else "--port=0"
    with log.open("w") as stderr:
        started = subprocess.Popen(
            command(process, f"{flag}=127.0.0.1:1", port, "--metrics-port=0"),
            env=environment(),
            stderr=stderr,
        )

    def waiting() -> list[object]:
        return [e["address"] for e in events(log) if e["event"] == "waiting for the broker"]

    assert eventually(waiting) == ["127.0.0.1:1"]
    started.send_signal(signal.SIGTERM)
    assert started.wait(STOP_S) == 0
    assert events(log)[-1]["event"] == f"{process} stopped"


@pytest.mark.parametrize("output", ["/dev/full", "closed pipe", "closed"])
def test_a_log_and_a_ready_line_that_cannot_be_written_stop_nothing(
    tmp_path: Path, output: str
) -> None:
    """The broker is asked for through the admin API, on ports that were free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    if output == "closed pipe":
        reading, fd = os.pipe()
        os.close(reading)
    else:
        fd = os.open("/dev/full", os.O_WRONLY)
    flags = [f"--data-dir={tmp_path}", f"--admin-port={port}", "--grpc-port=0", "--metrics-port=0"]
    line = command("standalone", "--log-level=debug", *flags)
    if output == "closed":
        line = ["sh", "-c", 'exec "$@" >&- 2>&- <&-', "sh", *line]
    started = subprocess.Popen(line, env=environment(), stdout=fd, stderr=fd)
    os.close(fd)

    def created() -> bool:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, 10)) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request("PUT", "/api/v1/topics/t", b"{}", headers)
            return connection.getresponse().status == HTTPStatus.OK

    try:
        assert eventually(created)
        started.send_signal(signal.SIGTERM)
        assert started.wait(STOP_S) == 0
    finally:
        started.kill()
        started.wait()


def broker_on(data_dir: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("broker", f"--data-dir={data_dir}", "--grpc-port=0", "--metrics-port=0"),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/none/data"])
def test_a_data_directory_that_cannot_be_is_refused_with_a_sentence(
    tmp_path: Path, folder: str
) -> None:
    (tmp_path / "file").touch()
    refused = broker_on(tmp_path / folder)
    assert refused.returncode == 1
    assert f"the data directory {tmp_path / folder} cannot be used: " in refused.stderr
    assert "Traceback" not in refused.stderr


def test_an_empty_name_of_the_data_directory_is_wrong_usage() -> None:
    refused = broker_on("")
    assert refused.returncode == 2
    assert "data_dir: the name of the folder is empty" in refused.stderr


def test_a_store_without_its_log_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with broker(tmp_path / "data"):
        pass
    shutil.rmtree(tmp_path / "data" / "log")
    there = StoreCheckpoint(derived_offset=0, durable_offset=0, min_offset=0, epoch=1)
    (tmp_path / "data" / CHECKPOINT_FILE).write_bytes(store_checkpoint.encode(there))
    refused = broker_on(tmp_path / "data")
    assert refused.returncode == 1
    assert "tidemill store mend DIR --from BACKUP" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("process", "prefix", "shown"),
    [
        ("broker", "grpc-", "grpc_"),
        ("broker", "metrics-", "metrics_"),
        ("standalone", "admin-", "--admin-"),
        ("standalone", "grpc-", "--grpc-"),
    ],
)
def test_an_address_that_cannot_be_served_names_its_setting(
    tmp_path: Path, process: str, prefix: str, shown: str
) -> None:
    # Else the process refuses any address but loopback before it tries.
    doors = {"broker": ["--plain-links"], "standalone": ["--admin-open", "--admin-plain"]}
    open_to_others = doors[process]

    def started(*flags: str) -> str:
        ports = {"--grpc-port": "0", "--metrics-port": "0"}
        if process == "standalone":
            ports["--admin-port"] = "0"
        ports |= dict(flag.split("=") for flag in flags)
        line = [f"{key}={value}" for key, value in ports.items()]
        refused = subprocess.run(
            command(process, f"--data-dir={tmp_path}", *line, *open_to_others),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert refused.returncode == 1
        return refused.stderr

    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = started(f"--{prefix}port={taken.getsockname()[1]}")
        assert "the port is in use" in said
        assert f"{shown}port" in said
    said = started(f"--{prefix}host=192.0.2.1")
    assert "192.0.2.1 is not an address of this machine" in said
    assert f"{shown}host" in said
