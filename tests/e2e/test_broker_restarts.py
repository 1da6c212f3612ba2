"""What applications, probes and scrapers see of a broker that dies, hangs and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import grpc
from grpc_health.v1 import health_pb2

from tests.support.clients.steady_load import GROUP, TOPIC, SteadyLoad
from tests.support.eventually import eventually
from tests.support.processes.killing import child_pid, kill, until
from tests.support.processes.processes import Standalone, standalone

PROCESSES = ("proxy-0", "admin")  # which need the broker
KILLS = 3
WORKERS = 16
# Far longer than a restart takes on a busy machine: what is judged is that calls wait for it.
DEADLINE_S = 50.0
PATIENCE_MS = 40_000
BETWEEN_KILLS = 200  # calls that end well


def test_no_call_fails_because_its_broker_restarts(tmp_path: Path) -> None:
    config = tmp_path / "tidemill.yaml"
    config.write_text(f"unready_after_ms: {PATIENCE_MS}\n")
    with standalone(tmp_path / "data", f"--config={config}") as running:
        running.put(f"topics/{TOPIC}", messageType="NORMAL", queues=4)
        running.put(f"groups/{GROUP}", maxAttempts=100)
        load = asyncio.run(kill_under_load(running))
    assert not load.errors
    assert min(load.ended[kind] for kind in ("send", "receive", "ack")) > 0


async def kill_under_load(running: Standalone) -> SteadyLoad:
    async with grpc.aio.insecure_channel(running.grpc) as channel:
        load = SteadyLoad(channel, deadline_s=DEADLINE_S, poll_ms=5_000)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run(producers=WORKERS, consumers=WORKERS))
            for _ in range(KILLS):
                enough = load.ended.total() + BETWEEN_KILLS
                await until(lambda enough=enough: load.ended.total() >= enough)  # type: ignore[misc]  # bound at once
                await kill(running, "broker-0")
            enough = load.ended.total() + BETWEEN_KILLS
            await until(lambda: load.ended.total() >= enough)
            load.stop()
    return load


def ready(running: Standalone, process: str) -> tuple[int, str]:
    """Return the status and the body of /readyz."""
    url = running.processes[process].metrics.removesuffix("/metrics") + "/readyz"
    try:
        with urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as answer:
        return answer.code, answer.read().decode()


def test_a_hanging_broker_is_reported_at_once_and_makes_processes_unready_later(
    tmp_path: Path,
) -> None:
    config = tmp_path / "tidemill.yaml"
    config.write_text("unready_after_ms: 4000\n")
    with standalone(tmp_path / "data", f"--config={config}") as running:
        for process in PROCESSES:
            wait_for(running, process, status=200, text=": up")
        broker = child_pid(running, "broker-0")
        os.kill(broker, signal.SIGSTOP)
        for process in PROCESSES:
            wait_for(running, process, text="[-]")
            assert metric(running, process, "rocketmq_broker_reachable") == 0
        for process in PROCESSES:
            wait_for(running, process, status=503, text="no broker is reachable")
            assert metric(running, process, "rocketmq_ready") == 0
        with grpc.insecure_channel(running.grpc) as channel:
            check: grpc.UnaryUnaryMultiCallable[bytes, bytes]
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            answer = health_pb2.HealthCheckResponse
            eventually(lambda: answer.FromString(check(b"")).status == answer.NOT_SERVING)
        os.kill(broker, signal.SIGCONT)
        for process in PROCESSES:
            wait_for(running, process, status=200, text=": up")


def wait_for(running: Standalone, process: str, *, text: str, status: int = 0) -> None:
    """Wait until /readyz answers with a text in its body, and a status."""

    def is_there() -> bool:
        found, body = ready(running, process)
        return text in body and status in {0, found}

    eventually(is_there, within_ms=60_000)


def metric(running: Standalone, process: str, name: str) -> float:
    with urlopen(running.processes[process].metrics, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    [line] = [line for line in lines if line.startswith(name + "{")]
    return float(line.rpartition(" ")[2])
