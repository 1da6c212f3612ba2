"""Sends of the official Java client while two proxies on one machine are killed in turn.

Both proxies share one port. The keeper of each restarts it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.client_process import JAVA_CLASSES, JAVA_LIBRARIES, needs
from tests.support.clients.looping_clients import LoopingClient
from tests.support.eventually import eventually
from tests.support.processes.killing import RECOVERY_S
from tests.support.processes.processes import broker, command, descendants, environment
from tidemill.standalone.ports import reserve

pytestmark = [pytest.mark.heavy, needs("java", JAVA_CLASSES, JAVA_LIBRARIES)]

KILLS = 14
SENDS = 80  # between two kills, about four seconds of sends
FAILED_MAX = 0.005
WITHIN_MS = int(RECOVERY_S * 1000)
STOP_S = 30.0


@contextlib.contextmanager
def kept_proxy(brokers: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a proxy with its keeper for the block."""
    flags = [f"--brokers={brokers}", f"--grpc-port={port}", "--reuse-port", "--metrics-port=0"]
    keeper = subprocess.Popen(command("proxy", *flags), env=environment())
    try:
        yield keeper
    finally:
        keeper.terminate()
        keeper.wait(STOP_S)


def kill(keeper: subprocess.Popen[bytes]) -> None:
    """Kill the proxy of a keeper, once it runs."""
    [pid] = eventually(lambda: descendants(keeper.pid)[1:], within_ms=WITHIN_MS)
    os.kill(pid, signal.SIGKILL)


def more_sent(client: LoopingClient, count: int) -> None:
    """Wait until the client has made `count` more sends."""
    goal = client.report.line_counts["send"] + count
    eventually(lambda: client.report.line_counts["send"] >= goal, within_ms=WITHIN_MS)


def test_at_most_one_send_in_two_hundred_fails_while_proxies_are_killed(tmp_path: Path) -> None:
    home = tmp_path / "java"
    line = ["java", f"-Duser.home={home}", "-cp", f"{JAVA_CLASSES}:{JAVA_LIBRARIES}/*", "Loop"]
    with contextlib.ExitStack() as running:
        _, address, _ = running.enter_context(
            broker(tmp_path / "data", "--auto-create-topics", "--auto-create-groups")
        )
        port = running.enter_context(reserve("127.0.0.1", 0))
        keepers = [running.enter_context(kept_proxy(address, port)) for _ in range(2)]
        client = LoopingClient("java", line, f"127.0.0.1:{port}", home)
        running.callback(client.end)
        eventually(lambda: client.report.line_counts["ready"], within_ms=WITHIN_MS)
        for number in range(KILLS):
            more_sent(client, SENDS)
            kill(keepers[number % 2])
        client.stop_sending()
        eventually(lambda: client.report.line_counts["stopped"], within_ms=WITHIN_MS)
        assert [keeper.poll() for keeper in keepers] == [None, None]
    sends = [fact for fact in client.report.facts if fact["fact"] == "send"]
    failed = [fact for fact in sends if fact["error"]]
    for fact in failed:
        sys.stderr.write(f"{fact['topic']} {fact['ended'] - fact['begun']} us: {fact['error']}\n")
    sys.stderr.write(f"{len(failed)} of {len(sends)} sends failed\n")
    assert len(failed) <= FAILED_MAX * len(sends)
