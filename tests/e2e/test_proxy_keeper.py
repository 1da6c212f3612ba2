"""The port of a dead proxy stays open, and the next proxy process serves waiting clients."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import socket
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.support.clients.api import METADATA
from tests.support.eventually import eventually
from tests.support.processes.processes import (
    START_S,
    STOP_S,
    broker,
    command,
    descendants,
    environment,
)
from tidemill.proxy.keeper import SHORT_LIFE_S, SHORT_LIVES_MAX
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.apache.rocketmq.v2 import service_pb2_grpc

WITHIN_MS = int(START_S * 1000)
KILLS = 3
EXIT_USAGE = 2
SECOND_SIGNAL_STATUS = 130


class KeptProxy:
    """`tidemill proxy` as in a container: its first process and the serving process."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, broker_pid: int) -> None:
        self.process = process
        self.log = log
        self.broker_pid = broker_pid

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in lines if line["event"] == name]

    def serving(self, life: int = 0) -> tuple[int, str]:
        """Return id and address of the process of a life, once it serves."""
        event = eventually(lambda: self.events("proxy serving")[life], within_ms=WITHIN_MS)
        return self.pid(), str(event["grpc"])

    def pid(self) -> int:
        """Return the id of the serving or starting process."""
        [pid] = descendants(self.process.pid)[1:]
        return pid

    def next_pid(self, former: int) -> int:
        """Return the id of the process after `former`, once it exists."""
        return eventually(
            lambda: [one for one in descendants(self.process.pid)[1:] if one != former],
            within_ms=WITHIN_MS,
            every_s=0.001,
        )[0]

    def kill(self, life: int = 0) -> str:
        """Kill the process of a life; return its address."""
        pid, address = self.serving(life)
        os.kill(pid, signal.SIGKILL)
        return address


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[KeptProxy]:
    with kept_proxy(tmp_path) as running:
        yield running


@contextlib.contextmanager
def kept_proxy(folder: Path, *more: str, **started: Any) -> Iterator[KeptProxy]:
    """Run a proxy and its broker for the block, with the options of subprocess.Popen."""
    with contextlib.ExitStack() as running:
        stored, address, _ = running.enter_context(
            broker(folder / "data", "--auto-create-topics", "--auto-create-groups")
        )
        log = folder / "proxy.log"
        stderr = running.enter_context(log.open("w"))
        flags = [f"--brokers={address}", "--grpc-port=0", "--metrics-port=0", "--drain-delay-ms=0"]
        process = subprocess.Popen(
            command("proxy", *flags, *more), env=environment(), stderr=stderr, **started
        )
        try:
            yield KeptProxy(process, log, stored.pid)
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait(STOP_S)


def refuses(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), STOP_S).close()
    except ConnectionError:
        return True
    return False


def is_ready(kept: KeptProxy) -> bool:
    metrics: str = kept.events("proxy serving")[-1]["metrics"]
    with httpx.Client(trust_env=False) as client:
        return client.get(metrics.replace("/metrics", "/readyz")).is_success


def send(address: str) -> int:
    """Send a message over a new connection, without a retry; return the status code."""
    message = v2.Message(topic=v2.Resource(name="t"), body=b"x")
    message.system_properties.message_id = "01"
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
    with grpc.insecure_channel(address, options=options) as channel:
        stub = service_pb2_grpc.MessagingServiceStub(channel)
        answer = stub.SendMessage(
            service.SendMessageRequest(messages=[message]), metadata=METADATA, timeout=START_S
        )
    return int(answer.status.code)


def test_a_client_that_connects_to_a_dead_proxy_is_served_after_its_restart(
    kept: KeptProxy,
) -> None:
    for life in range(KILLS):
        address = kept.kill(life)
        assert not refuses(address)
        assert send(address) == v2.OK
    ends = [event["ended"] for event in kept.events("the proxy died, and was started again")]
    assert ends == ["signal 9"] * KILLS
    metrics = kept.events("proxy serving")[-1]["metrics"]
    with httpx.Client(trust_env=False) as client:
        scraped = client.get(metrics).text
    [line] = [each for each in scraped.splitlines() if each.startswith("rocketmq_proxy_restarts")]
    assert line.endswith(f" {KILLS}.0")


def test_a_stopped_keeper_closes_its_port(kept: KeptProxy) -> None:
    kept.kill()
    _, address = kept.serving(1)
    kept.process.terminate()
    assert kept.process.wait(STOP_S) == 0
    assert kept.events("proxy stopped")
    assert refuses(address)


def test_a_reload_is_handed_on(kept: KeptProxy) -> None:
    kept.serving()
    kept.process.send_signal(signal.SIGHUP)
    assert eventually(lambda: kept.events("reload requested"), within_ms=WITHIN_MS)
    assert kept.process.poll() is None


def test_a_proxy_that_dies_repeatedly_is_given_up(kept: KeptProxy) -> None:
    """The platform then sees it."""
    for life in range(SHORT_LIVES_MAX):
        address = kept.kill(life)
    assert kept.process.wait(STOP_S) == 128 + signal.SIGKILL
    assert refuses(address)
    [line] = kept.events("the proxy ends again and again, and is given up")
    assert line["ended"] == "signal 9"


def test_a_proxy_that_is_killed_while_it_serves_is_never_given_up(kept: KeptProxy) -> None:
    for life in range(SHORT_LIVES_MAX + 1):
        kept.serving(life)
        since_s = time.monotonic()
        eventually(lambda: time.monotonic() - since_s >= SHORT_LIFE_S)  # noqa: B023  # It is called in this turn.
        address = kept.kill(life)
    assert not refuses(address)
    kept.serving(SHORT_LIVES_MAX + 1)
    assert kept.process.poll() is None


def test_a_proxy_that_dies_before_serving_is_restarted(kept: KeptProxy) -> None:
    pid, address = kept.serving()
    for _ in range(2):
        os.kill(pid, signal.SIGKILL)
        pid = kept.next_pid(pid)  # Of a life that ended before it served.
    assert not refuses(address)
    assert send(address) == v2.OK


def test_a_slow_restart_closes_the_port_until_the_proxy_serves(kept: KeptProxy) -> None:
    """New clients then use another proxy while the brokers are down."""
    pid, address = kept.serving()
    os.kill(kept.broker_pid, signal.SIGSTOP)
    try:
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: refuses(address), within_ms=2 * WITHIN_MS)
        assert kept.process.poll() is None
    finally:
        os.kill(kept.broker_pid, signal.SIGCONT)
    _, address = kept.serving(1)
    assert send(address) == v2.OK


def test_a_signal_for_both_processes_is_one(tmp_path: Path) -> None:
    """Like systemd and `pkill`: calls in flight still end."""
    with kept_proxy(tmp_path, "--drain-delay-ms=1000") as kept:
        pid, _ = kept.serving()
        for each in (kept.process.pid, pid):
            os.kill(each, signal.SIGTERM)
        assert kept.process.wait(STOP_S) == 0
        assert kept.events("proxy stopped")


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with kept_proxy(tmp_path, "--drain-delay-ms=60000") as kept:
        kept.serving()
        kept.process.terminate()
        eventually(lambda: not is_ready(kept), within_ms=WITHIN_MS)
        kept.process.terminate()
        assert kept.process.wait(STOP_S) == SECOND_SIGNAL_STATUS


def test_a_closed_terminal_ends_the_keeper(tmp_path: Path) -> None:
    ours, terminal = pty.openpty()
    with kept_proxy(
        tmp_path,
        stdin=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(terminal, termios.TIOCSCTTY, 0),
    ) as kept:
        kept.serving()
        os.close(terminal)
        os.close(ours)
        assert kept.process.wait(STOP_S) == 0


def test_a_folder_of_our_name_is_not_taken_for_the_program(tmp_path: Path) -> None:
    (tmp_path / "tidemill").mkdir()
    with kept_proxy(tmp_path, cwd=tmp_path) as kept:
        assert send(kept.serving()[1]) == v2.OK


def test_the_proxy_ends_with_its_keeper(kept: KeptProxy) -> None:
    pid, address = kept.serving()
    kept.process.kill()
    assert eventually(lambda: refuses(address), within_ms=WITHIN_MS)
    assert eventually(lambda: not Path(f"/proc/{pid}/cmdline").exists(), within_ms=WITHIN_MS)


def test_a_frozen_proxy_ends_with_its_keeper(kept: KeptProxy) -> None:
    pid, address = kept.serving()
    os.kill(pid, signal.SIGSTOP)
    kept.process.kill()
    assert eventually(lambda: refuses(address), within_ms=WITHIN_MS)


def test_the_keeper_passes_on_usage_errors_and_the_exit_status(tmp_path: Path) -> None:
    line = command("proxy", "--grpc-port=99999")
    ended = subprocess.run(line, env=environment(), capture_output=True, timeout=START_S)  # noqa: PLW1510
    assert ended.returncode == EXIT_USAGE
    assert b"grpc_port" in ended.stderr
