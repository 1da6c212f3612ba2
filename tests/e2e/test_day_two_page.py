"""The commands of the pages for operators run as printed, and the codes exist."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.api import api, message
from tests.support.clients.commands import tidemill
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone
from tidemill.common.errors import CODES
from tidemill.common.exit_codes import EXIT_PARTIAL, EXIT_PROBLEM
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations"
PAGE = OPERATIONS / "day-two.md"
TROUBLESHOOTING = OPERATIONS / "troubleshooting.md"
# The commands of these verbs need several processes or a stop, and have their own tests.
ELSEWHERE = (
    "standalone",
    "store",
    "broker-group add",
    "broker-group drain",
    "broker-group undrain",
    "broker-group transfer",
    "replica",
)
NAMES = v2.Code.DESCRIPTOR.values_by_number
PLACEHOLDER = re.compile(r"\b(ID|KEY)\b")


def commands(page: Path) -> list[str]:
    """Return the commands of the second column of each table."""
    rows = [line.split("|") for line in page.read_text("utf-8").splitlines() if "|" in line]
    cells = [row[2] for row in rows if len(row) > 3]
    return [one for cell in cells for one in re.findall(r"`tidemill ([^`]+)`", cell)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("day-two") / "data") as started:
        started.put("topics/orders", messageType="NORMAL", queues=8)
        started.put("groups/billing", maxAttempts=1)
        started.put("users/shop")
        eventually(lambda: len(started.get("processes")["items"]) == 3)
        asyncio.run(fail_one_and_hold_one(started))
        eventually(lambda: started.get("dead-letters")["deadLetters"])
        yield started


async def fail_one_and_hold_one(running: Standalone) -> None:
    async with api(running.grpc) as client:
        for invisible_ms in (1_000, 3_600_000):
            await client.send(message("orders", b"m"))
            while not await client.receive("orders", "billing", invisible_ms=invisible_ms):
                pass


@pytest.mark.parametrize("command", sorted({*commands(PAGE), *commands(TROUBLESHOOTING)}))
def test_a_command_of_the_page_works(running: Standalone, command: str) -> None:
    arguments = shlex.split(command)
    if command.startswith(ELSEWHERE) or PLACEHOLDER.search(command):
        arguments = [*shlex.split(command)[:2], "--help"]
    done = tidemill(running, *arguments)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    assert done.stdout


def test_the_doctor_finds_the_dead_letter(running: Standalone) -> None:
    done = tidemill(running, "doctor")
    # The consumer group has no consumer, which the sampler finds after some seconds.
    assert done.returncode in {0, EXIT_PARTIAL, EXIT_PROBLEM}, done.stdout + done.stderr
    assert re.search(r"dead letters +notice +billing has 1", done.stdout), done.stdout


def test_the_page_answers_every_question_of_a_night() -> None:
    assert len(commands(PAGE)) >= 23


def test_the_codes_of_the_page_are_those_of_the_errors() -> None:
    rows = re.findall(
        r"^\| ([0-9, to]+) \| (.+?) \| ([0-9, ]+) \|",
        TROUBLESHOOTING.read_text("utf-8"),
        re.MULTILINE,
    )
    of_page: dict[int, set[int]] = {}
    for numbers, names, statuses in rows:
        codes = [int(number) for number in re.findall(r"\d+", numbers)]
        found = {int(status) for status in statuses.split(", ")}
        if " to " in numbers:
            codes = list(range(codes[0], codes[1] + 1))
        else:
            assert re.findall("`([A-Z_]+)`", names) == [NAMES[code].name for code in codes]
        for code in codes:
            of_page[code] = of_page.get(code, set()) | found
    for error, one in CODES.items():
        assert one.http.value in of_page[one.rocketmq], error
