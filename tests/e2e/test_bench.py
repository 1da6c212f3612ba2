"""`tidemill bench` against real processes."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.clients.commands import tidemill
from tests.support.eventually import eventually
from tests.support.processes.processes import STOP_S, Standalone, command, environment, standalone


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("bench") / "data") as started:
        yield started


def topics(running: Standalone) -> list[str]:
    return [each["name"] for each in running.get("topics")["topics"]]


def bench(running: Standalone, *arguments: str) -> dict[str, Any]:
    options = ("--proxy", running.grpc, "--for", "1s", "-o", "json")
    done = tidemill(running, "bench", *arguments, *options)
    assert done.returncode == 0, done
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["messages"] > 0
    assert found["errors"] == {}
    assert 0 < found["p50Ms"] <= found["p99Ms"] <= found["maxMs"]
    assert topics(running) == []
    assert running.get("groups")["groups"] == []
    return found


def test_sends_are_measured(running: Standalone) -> None:
    bench(running, "send", "--concurrency", "4")


def test_all_sent_messages_are_received(running: Standalone) -> None:
    found = bench(running, "receive", "--rate", "20", "--concurrency", "2")
    assert found["messages"] <= 21


def test_delayed_messages_do_not_come_early(running: Standalone) -> None:
    found = bench(running, "delay", "--delay", "1s", "--rate", "20", "--concurrency", "2")
    assert found["early"] == 0


def test_a_proxy_that_is_down_gives_errors(running: Standalone) -> None:
    done = tidemill(running, "bench", "send", "--proxy", "127.0.0.1:1", "--for", "1s")
    assert (done.returncode, "UNAVAILABLE" in done.stdout) == (1, True)
    assert topics(running) == []


def test_ctrl_c_deletes_the_topic_and_prints_the_numbers(running: Standalone) -> None:
    process = subprocess.Popen(
        command("bench", "receive", "--proxy", running.grpc, "--for", "10m"),
        env=environment() | {"TIDEMILL_ADMIN": running.admin},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - nothing else runs in this process
    )
    try:
        eventually(lambda: _has_messages(running))
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=STOP_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "P99" in output
    assert topics(running) == []
    assert running.get("groups")["groups"] == []


def _has_messages(running: Standalone) -> bool:
    return any(
        queue["maxOffset"] > 0
        for topic in topics(running)
        for queue in running.get(f"topics/{topic}")["queueStatus"]
    )
