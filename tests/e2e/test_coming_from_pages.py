"""The commands of the pages for newcomers from other brokers run as printed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.clients.commands import tidemill
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone

PAGES = sorted((Path(__file__).parents[2] / "docs" / "coming-from").glob("*.md"))
# These need replicas, another broker group or a stop, and have their own tests.
ELSEWHERE = (
    "store ",
    "replica ",
    "broker-group set",
    "broker-group transfer",
    "broker-group drain",
)
# Named without an object.
MENTIONED = ("dead-letter replay", "group create", "group show", "message find", "timer cancel")
PLACEHOLDER = re.compile(r"\b(ID|KEY|DIR|FILE|NAME|GROUP)\b")
# The page shows what a user types at a terminal, which asks.
ASKING = ("group reset", "group set", "topic set")
OBJECTS: dict[str, dict[str, object]] = {
    "topics/orders": {"messageType": "NORMAL", "queues": 8},
    "groups/billing": {"maxAttempts": 9},
    "users/shop": {},
}
DELETED = (httpx.codes.OK, httpx.codes.NO_CONTENT, httpx.codes.NOT_FOUND)
COMMANDS_MIN = 10


def commands() -> list[str]:
    """Return each command of the second column of each table."""
    found: list[str] = []
    for page in PAGES:
        rows = [line.split(" | ") for line in page.read_text("utf-8").splitlines()]
        cells = [row[1] for row in rows if len(row) > 1 and row[0].startswith("|")]
        found += [one for cell in cells for one in re.findall(r"`tidemill ([^`]+)`", cell)]
    return sorted(set(found))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("coming-from") / "data") as started:
        eventually(lambda: len(started.get("processes")["items"]) == 3)
        yield started


def make_afresh(running: Standalone, objects: dict[str, dict[str, object]]) -> None:
    """Delete the objects that the pages name, and create `objects`."""
    with httpx.Client(base_url=f"{running.admin}/api/v1", trust_env=False, timeout=60) as http:
        for path in (*OBJECTS, "topics/steps", "groups/steps"):
            assert http.delete(f"/{path}").status_code in DELETED
        for path, settings in objects.items():
            http.put(f"/{path}", json=settings).raise_for_status()


@pytest.mark.parametrize("command", commands())
def test_a_command_of_a_page_works(running: Standalone, command: str) -> None:
    arguments = shlex.split(command)
    if command in MENTIONED or command.startswith(ELSEWHERE) or PLACEHOLDER.search(command):
        arguments = [*arguments[:2], "--help"]
    elif command.startswith(ASKING) and "--dry-run" not in arguments:
        arguments.append("--yes")
    objects = {} if arguments[1] == "create" else dict(OBJECTS)
    if "--delay" in arguments:
        objects["topics/orders"] = {"messageType": "MIXED"}
    make_afresh(running, objects)
    done = tidemill(running, *arguments, stdin=b'{"body": "one"}\n{"body": "two"}\n')
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    assert done.stdout


def test_each_page_has_a_table_of_commands() -> None:
    names = [page.stem for page in PAGES]
    assert names == ["celery", "kafka", "nats", "rabbitmq", "rocketmq", "sqs"]
    for page in PAGES:
        assert (
            len(re.findall(r"^\| .*`tidemill ", page.read_text("utf-8"), re.MULTILINE))
            > COMMANDS_MIN
        )
