"""How processes start where something is missing or wrong: what they say."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from tests.support.eventually import eventually
from tests.support.processes import STOP_S, command, environment


def events(log: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize(("process", "flag"), [("proxy", "--brokers"), ("admin", "--broker")])
def test_a_missing_broker_is_told_and_the_process_stops_cleanly(
    tmp_path: Path, process: str, flag: str
) -> None:
    log = tmp_path / "log"
    port = "--grpc-port=0" if process == "proxy" else "--port=0"
    with log.open("w") as stderr:
        started = subprocess.Popen(
            command(process, f"{flag}=127.0.0.1:1", port, "--metrics-port=0"),
            env=environment(), stderr=stderr,
        )  # fmt: skip

    def waiting() -> list[object]:
        return [e["address"] for e in events(log) if e["event"] == "waiting for the broker"]

    assert eventually(waiting) == ["127.0.0.1:1"]
    started.send_signal(signal.SIGTERM)
    assert started.wait(STOP_S) == 0
    assert events(log)[-1]["event"] == f"{process} stopped"
