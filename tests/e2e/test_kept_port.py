"""A proxy that dies: its port stays open, and who connects meanwhile is served by the next life."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.support.api import METADATA
from tests.support.eventually import eventually
from tests.support.processes import START_S, STOP_S, broker, command, descendants, environment
from tidemill.proxy.keeper import LIVES_MAX
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.apache.rocketmq.v2 import service_pb2_grpc

WITHIN_MS = int(START_S * 1000)
KILLS = 3
EXIT_USAGE = 2


class KeptProxy:
    """`tidemill proxy` as a container runs it: its first process, and the one that serves."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in lines if line["event"] == name]

    def serving(self, life: int = 0) -> tuple[int, str]:
        """Return the id of the process of a life, and its address, once it serves."""
        told = eventually(lambda: self.events("proxy serving")[life], within_ms=WITHIN_MS)
        [pid] = descendants(self.process.pid)[1:]
        return pid, str(told["grpc"])

    def kill(self, life: int = 0) -> str:
        """Kill the process of a life; return its address."""
        pid, address = self.serving(life)
        os.kill(pid, signal.SIGKILL)
        return address


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[KeptProxy]:
    with contextlib.ExitStack() as running:
        _, address, _ = running.enter_context(broker(tmp_path / "data", "--auto-create"))
        log = tmp_path / "proxy.log"
        stderr = running.enter_context(log.open("w"))
        flags = [f"--brokers={address}", "--grpc-port=0", "--metrics-port=0", "--drain-delay-ms=0"]
        process = subprocess.Popen(command("proxy", *flags), env=environment(), stderr=stderr)
        try:
            yield KeptProxy(process, log)
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


def send(address: str) -> int:
    """Send a message over a new connection, without another try; return the status code."""
    message = v2.Message(topic=v2.Resource(name="t"), body=b"x")
    message.system_properties.message_id = "01"
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
    with grpc.insecure_channel(address, options=options) as channel:
        stub = service_pb2_grpc.MessagingServiceStub(channel)
        answer = stub.SendMessage(
            service.SendMessageRequest(messages=[message]), metadata=METADATA, timeout=START_S
        )
    return int(answer.status.code)


def test_who_connects_while_a_proxy_is_dead_is_served_by_its_next_life(kept: KeptProxy) -> None:
    for life in range(KILLS):
        address = kept.kill(life)
        assert not refuses(address)
        assert send(address) == v2.OK
    ends = [told["ended"] for told in kept.events("the proxy died, and was started again")]
    assert ends == ["signal 9"] * KILLS
    metrics = kept.events("proxy serving")[-1]["metrics"]
    with httpx.Client(trust_env=False) as client:
        scraped = client.get(metrics).text
    [line] = [each for each in scraped.splitlines() if each.startswith("rocketmq_proxy_restarts")]
    assert line.endswith(f" {KILLS}.0")


def test_one_that_is_stopped_ends_with_its_port_closed(kept: KeptProxy) -> None:
    kept.kill()
    _, address = kept.serving(1)
    kept.process.terminate()
    assert kept.process.wait(STOP_S) == 0
    assert kept.events("proxy stopped")
    assert refuses(address)


def test_a_reload_is_handed_on(kept: KeptProxy) -> None:
    kept.serving()
    kept.process.send_signal(signal.SIGHUP)
    assert eventually(lambda: kept.events("reload asked for"), within_ms=WITHIN_MS)
    assert kept.process.poll() is None


def test_one_that_keeps_dying_is_given_up(kept: KeptProxy) -> None:
    """So that the platform sees it. Lives are shorter than the time in which they are counted."""
    for life in range(LIVES_MAX):
        address = kept.kill(life)
    assert kept.process.wait(STOP_S) == 128 + signal.SIGKILL
    assert refuses(address)


def test_the_proxy_ends_with_its_keeper(kept: KeptProxy) -> None:
    pid, address = kept.serving()
    kept.process.kill()
    assert eventually(lambda: refuses(address), within_ms=WITHIN_MS)
    assert eventually(lambda: not Path(f"/proc/{pid}/cmdline").exists(), within_ms=WITHIN_MS)


def test_what_the_proxy_says_of_its_settings_and_its_status_are_the_keepers(tmp_path: Path) -> None:
    line = command("proxy", "--grpc-port=99999")
    ended = subprocess.run(line, env=environment(), capture_output=True, timeout=START_S)  # noqa: PLW1510
    assert ended.returncode == EXIT_USAGE
    assert b"grpc_port" in ended.stderr
