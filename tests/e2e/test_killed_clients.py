"""A push consumer that is killed: its messages go to another consumer within a minute."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.clients.client_process import staying_client
from tests.support.processes.processes import standalone

# From the kill: ten seconds for a new connection, then fifty until the messages are visible.
RETURNS_S = 60.0
ROOM_S = 5.0  # for a busy machine


@pytest.mark.heavy
def test_the_messages_of_a_killed_worker_return_within_a_minute(tmp_path: Path) -> None:
    names = {"topic": "jobs", "group": "workers"}
    with (
        standalone(tmp_path / "data") as running,
        staying_client("python", tmp_path / "first", running.grpc, **names) as first,
    ):
        first.write_line("work")
        first.wait_for("received", body="work")
        with staying_client("python", tmp_path / "second", running.grpc, **names) as second:
            first.kill()
            killed_at_s = time.monotonic()
            second.wait_for("received", body="work", timeout_s=2 * RETURNS_S)
            took_s = time.monotonic() - killed_at_s
    assert took_s <= RETURNS_S + ROOM_S
