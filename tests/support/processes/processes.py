"""Real processes for tests: the standalone command on free ports, in its own folder."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tidemill.common.item_bytes import ITEM_BYTES_MAX_OF_ALL

# Far longer than the start or stop of eleven processes beside other tests.
START_S = 120.0
STOP_S = 60.0
ADMIN_S = 30.0  # for a call of the REST API
# Bodies of 4 MiB with properties, which not every official client receives.
LARGEST_MESSAGES = f"--message-item-bytes-max={ITEM_BYTES_MAX_OF_ALL}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One child, as reported in the ready line."""

    pid: int
    metrics: str


class Standalone:
    """A running `tidemill standalone`."""

    def __init__(self, process: subprocess.Popen[str], ready_line: str, log: Path) -> None:
        self.process = process
        self.ready_line = ready_line
        self.log = log
        ready = json.loads(ready_line)
        self.grpc: str = ready["grpc"]
        self.admin: str = ready["admin"]
        self.scaler: str = ready.get("scaler", "")  # empty if no port is set
        self.admin_grpc: str = ready.get("adminGrpc", "")  # the same
        self.processes = {name: Process(**child) for name, child in ready["processes"].items()}

    def stop(self) -> int:
        """Send SIGTERM and return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)

    def put(self, path: str, **body: object) -> None:
        """Send a PUT to the REST API: `put("topics/orders", queues=4)`."""
        with httpx.Client(trust_env=False, timeout=ADMIN_S) as client:
            client.put(f"{self.admin}/api/v1/{path}", json=body).raise_for_status()

    def delete(self, path: str) -> None:
        """Send a DELETE to the REST API: `delete("groups/billing")`."""
        with httpx.Client(trust_env=False, timeout=ADMIN_S) as client:
            client.delete(f"{self.admin}/api/v1/{path}").raise_for_status()

    def get(self, path: str) -> dict[str, Any]:
        """Send a GET to the REST API: `get("topics/orders")`."""
        with httpx.Client(trust_env=False, timeout=ADMIN_S) as client:
            answer = client.get(f"{self.admin}/api/v1/{path}").raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def lag(self, group: str) -> int:
        """Return the consumer group's number of unacked messages, ready or in flight."""
        return int(self.get(f"groups/{group}/progress")["total"]["lag"])

    def pids(self) -> list[int]:
        """Return the ids of the supervisor and all its descendants."""
        return descendants(self.process.pid)


def command(*arguments: object, python: Path | str = sys.executable) -> list[str]:
    """Return the command line of `tidemill` with `arguments`."""
    return [str(python), "-m", "tidemill", *map(str, arguments)]


def environment() -> dict[str, str]:
    """Return this process's environment without settings of ours."""
    return {key: value for key, value in os.environ.items() if not key.startswith("TIDEMILL_")}


def start_standalone(data_dir: Path, *flags: str, start_s: float = START_S) -> Standalone:
    """Start a standalone and wait for the ready line. Without it, fail with the log."""
    log = data_dir.with_name(f"{data_dir.name}.log")
    with log.open("a") as stderr:
        process = subprocess.Popen(
            command(
                "standalone",
                f"--data-dir={data_dir}",
                "--grpc-port=0",
                "--admin-port=0",
                "--metrics-port=0",
                *flags,
            ),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], start_s)
    line = process.stdout.readline() if readable else ""
    if not line:
        process.kill()
        process.wait()
        raise AssertionError(f"standalone did not start:\n{log.read_text()}")
    return Standalone(process, line, log)


@contextlib.contextmanager
def standalone(data_dir: Path, *flags: str, start_s: float = START_S) -> Iterator[Standalone]:
    """Run a standalone during the block, and end all its processes afterwards."""
    running = start_standalone(data_dir, *flags, start_s=start_s)
    pids = running.pids()
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.stop()
        if running.process.stdout is not None:
            running.process.stdout.close()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def broker(
    data_dir: Path, *flags: str, python: Path | str = sys.executable
) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """Run a broker during the block; yield its process, its gRPC address and its log."""
    log = data_dir.with_name(f"{data_dir.name}.log")
    ours, theirs = socket.socketpair()
    with ours, log.open("a") as stderr:
        with theirs:
            process = subprocess.Popen(
                command(
                    "broker",
                    f"--data-dir={data_dir}",
                    "--grpc-port=0",
                    "--metrics-port=0",
                    f"--supervisor-fd={theirs.fileno()}",
                    *flags,
                    python=python,
                ),
                env=environment(),
                stderr=stderr,
                pass_fds=[theirs.fileno()],
            )
        ours.settimeout(START_S)
        line = ours.recv(4096)
        assert line, f"the broker did not start:\n{log.read_text()}"
        try:
            yield process, json.loads(line)["grpc"], log
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait(STOP_S)


def descendants(pid: int) -> list[int]:
    """Return `pid` and all processes below it."""
    found = [pid]
    for parent in found:
        # Read the children of all threads: a JVM starts workers from any thread.
        # A process or a thread may end between two looks.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            threads = list(Path(f"/proc/{parent}/task").glob("*/children"))
            for thread in threads:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    found.extend(map(int, thread.read_text("ascii").split()))
    return found


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text("ascii")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
