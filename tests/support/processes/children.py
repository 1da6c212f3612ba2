"""Single processes for tests: a broker, or proxies with their own ports."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes.processes import START_S, STOP_S, command, environment


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningProcess:
    """A process that serves."""

    process: subprocess.Popen[bytes]
    grpc: str
    metrics: str
    log: Path


@contextlib.contextmanager
def child(log: Path, *arguments: object) -> Iterator[RunningProcess]:
    """Run `tidemill ARGUMENTS` on free ports during the block, and supervise it."""
    ours, theirs = socket.socketpair()
    with ours, log.open("a") as output:
        with theirs:
            fd = theirs.fileno()
            process = subprocess.Popen(
                command(*arguments, "--grpc-port=0", "--metrics-port=0", f"--supervisor-fd={fd}"),
                env=environment(),
                stdout=output,
                stderr=output,
                pass_fds=(fd,),
            )
        try:
            ours.settimeout(START_S)
            with ours.makefile() as lines:
                line = lines.readline()
            assert line, f"the process did not start:\n{log.read_text()}"
            ready = json.loads(line)
            yield RunningProcess(
                process=process, grpc=ready["grpc"], metrics=ready["metrics"], log=log
            )
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            finally:
                process.kill()


@contextlib.contextmanager
def two_proxies(
    folder: Path, *broker_flags: str
) -> Iterator[tuple[RunningProcess, RunningProcess]]:
    """Run two proxies in front of one broker, each with its own endpoint."""
    with contextlib.ExitStack() as running:
        data_dir = f"--data-dir={folder / 'data'}"
        broker = running.enter_context(
            child(
                folder / "broker.log",
                "broker",
                data_dir,
                "--auto-create-topics",
                "--auto-create-groups",
                *broker_flags,
            )
        )
        first, second = (
            running.enter_context(
                child(folder / f"{name}.log", "proxy", f"--brokers={broker.grpc}", f"--name={name}")
            )
            for name in ("proxy-0", "proxy-1")
        )
        yield first, second
