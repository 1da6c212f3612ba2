"""The programs of `examples/` do with the official client what they say."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.clients.api import api, message
from tests.support.clients.commands import tidemill
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, environment, standalone

EXAMPLES = Path(__file__).parents[2] / "examples"
STOP_S = 60.0
RETRY_MS = 1_000


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("examples") / "data") as started:
        started.put("topics/orders", queues=2)
        started.put("topics/reminders", messageType="DELAY", queues=2)
        started.put("topics/tasks", queues=2)
        retry = {"customized": {"nextMs": [RETRY_MS]}}
        for group in ("billing", "shop"):
            started.put(f"groups/{group}", maxAttempts=2, retry=retry)
        yield started


@contextmanager
def program(
    running: Standalone, folder: Path, *arguments: object
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Run Python with arguments for the block; yield the process and the file of its output."""
    output = folder / f"output-{Path(str(arguments[-1])).name}"
    variables = {
        "ENDPOINT": running.grpc,
        "TIDEMILL_ADMIN": running.admin,
        "HOME": str(folder),
        "DATABASE": str(folder / "shop.sqlite3"),
    }
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-u", *map(str, arguments)],
            env=environment() | variables,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process, output
    finally:
        process.kill()
        process.wait(STOP_S)


def send(running: Standalone, bodies: Sequence[bytes]) -> None:
    async def all_of_them() -> None:
        async with api(running.grpc) as client:
            for body in bodies:
                await client.send(message("orders", body))

    asyncio.run(all_of_them())


def stop(process: subprocess.Popen[bytes], output: Path) -> None:
    """End a program with SIGTERM, and check that it ended in good order."""
    process.send_signal(signal.SIGTERM)
    assert process.wait(STOP_S) == 0, output.read_text()
    assert output.read_text().splitlines()[-1] == "stopped"


def test_the_worker_retries_gives_up_and_stops(running: Standalone, tmp_path: Path) -> None:
    with program(running, tmp_path, EXAMPLES / "worker.py") as (process, output):
        eventually(lambda: "started" in output.read_text())
        send(running, [b"coffee", b"poison"])
        eventually(lambda: "at attempt 1" in output.read_text())
        eventually(lambda: re.search("attempt 2 of .* failed: this order", output.read_text()))
        letters = eventually(lambda: running.get("dead-letters?group=billing")["deadLetters"])
        assert [each["attempts"] for each in letters] == [2]
        # The consumer is not corrected, so the replay fails again, with all of its attempts.
        replayed = tidemill(running, "dead-letter", "replay", "billing", letters[0]["id"], "--yes")
        assert replayed.returncode == 0, replayed.stderr
        eventually(
            lambda: (
                [
                    each["replays"]
                    for each in running.get("dead-letters?group=billing&state=OPEN")["deadLetters"]
                ]
                == [1]
            )
        )
        stop(process, output)


def test_the_asyncio_worker_processes_each_message(running: Standalone, tmp_path: Path) -> None:
    with program(running, tmp_path, EXAMPLES / "asyncio_worker.py") as (process, output):
        eventually(lambda: "started" in output.read_text())
        bodies = [b"number %d" % number for number in range(40)]
        send(running, bodies)
        done = [f"done {body.decode()}" for body in bodies]
        eventually(lambda: set(done) <= set(output.read_text().splitlines()))
        eventually(lambda: running.lag("billing") == 0)
        stop(process, output)


def test_reminders_are_scheduled_moved_and_cancelled(running: Standalone, tmp_path: Path) -> None:
    arguments = "-m", "uvicorn", "--app-dir", EXAMPLES / "fastapi_reminders", "app:app", "--port=0"

    def due(key: str) -> list[int]:
        found = running.get(f"timers?topic=reminders&key={key}")["timers"]
        return [each["dueAtMs"] for each in found]

    with program(running, tmp_path, *arguments) as (process, output):
        address = eventually(lambda: re.search(r"http://[0-9.:]+", output.read_text()))
        assert isinstance(address, re.Match)
        with httpx.Client(base_url=address[0], trust_env=False, timeout=60) as web:
            reminder = {"text": "call back", "in_seconds": 3_600}
            for key in ("first", "second"):
                done = web.put(f"/reminders/{key}", json=reminder)
                assert done.json() == {"key": key, "state": "scheduled"}
            [before] = due("first")
            moved = web.put("/reminders/first", json={**reminder, "in_seconds": 7_200})
            assert moved.json()["state"] == "moved"
            [after] = due("first")
            assert after > before
            assert web.delete("/reminders/first").json()["state"] == "cancelled"
            assert due("first") == []
            assert len(due("second")) == 1, "the others stay"
            assert web.delete("/reminders/first").status_code == httpx.codes.NOT_FOUND
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_S)


def test_django_tasks_follow_the_commit(running: Standalone, tmp_path: Path) -> None:
    manage = EXAMPLES / "django_tasks" / "manage.py"
    with program(running, tmp_path, manage, "migrate", "--run-syncdb") as (process, output):
        assert process.wait(STOP_S) == 0, output.read_text()
    with (
        program(running, tmp_path, manage, "worker") as (worker, output),
        program(running, tmp_path, manage, "runserver", "--noreload", "127.0.0.1:0") as (_, log),
    ):
        eventually(lambda: "started" in output.read_text())
        address = eventually(lambda: re.search(r"http://127\.0\.0\.1:[1-9][0-9]*", log.read_text()))
        assert isinstance(address, re.Match)
        with httpx.Client(base_url=address[0], trust_env=False, timeout=60) as web:

            def order(customer: str, cups: int) -> int:
                form = {"customer": customer, "cups": str(cups)}
                return web.post("/orders", data=form).status_code

            assert order("ada", 2) == httpx.codes.CREATED
            assert order("nobody", 2) == httpx.codes.UNPROCESSABLE_ENTITY
            assert order("grace", 101) == httpx.codes.CREATED
            letters = eventually(lambda: running.get("dead-letters?group=shop")["deadLetters"])
            assert [each["attempts"] for each in letters] == [2]
            assert "attempt 2 of" in output.read_text()
            eventually(lambda: running.lag("shop") == 0)
            # The rollback sent no task and stored no order.
            assert output.read_text().count("done confirm") == 1
            assert output.read_text().count("attempt 1 of") == 1
            orders = web.get("/orders").json()["orders"]
            assert [(one["customer"], one["is_confirmed"]) for one in orders] == [
                ("ada", True),
                ("grace", False),
            ]
        stop(worker, output)
