"""Official push consumers with SQL filters, right ones and wrong ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.clients.api import api, message
from tests.support.clients.client_process import (
    GO_PROGRAM,
    JAVA_CLASSES,
    NODE_PACKAGES,
    Facts,
    needs,
    run_go_client,
    run_java_client,
    run_node_client,
    run_python_client,
    staying_client,
)
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone

SQL = "price > 4.5 AND (region IN ('eu', 'us') OR TAGS = 'all') AND \"x-test\" IS NULL"
MARKS = {"go": needs("go", GO_PROGRAM), "java": needs("java", JAVA_CLASSES)} | {
    "node": needs("node", NODE_PACKAGES)
}
CLIENTS = [
    pytest.param(name, marks=MARKS.get(name, ())) for name in ("python", "go", "java", "node")
]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("filters") / "data") as started:
        yield started


async def send_all(endpoint: str, topic: str) -> None:
    """Send messages, some of which match `SQL`; their bodies begin with `yes`."""
    async with api(endpoint) as client:
        for body, tag, properties in (
            (b"no price", "", {"region": "eu"}),
            (b"yes 1", "", {"price": "5", "region": "eu"}),
            (b"no region", "", {"price": "5", "region": "cn"}),
            (b"yes 2", "all", {"price": "4.6"}),
            (b"no number", "all", {"price": "high"}),
            (b"a test", "all", {"price": "7", "x-test": ""}),
            (b"yes 3", "", {"price": "1e3", "region": "us"}),
        ):
            await client.send(message(topic, body, tag=tag, properties=properties))


@pytest.mark.parametrize("language", CLIENTS)
def test_a_push_consumer_gets_the_messages_that_match(
    language: str, tmp_path: Path, running: Standalone
) -> None:
    names = {"topic": f"sql-{language}", "group": f"sql-{language}"}
    with staying_client(language, tmp_path, running.grpc, sql=SQL, **names) as client:
        asyncio.run(send_all(running.grpc, names["topic"]))
        found = client.wait_for("received", 3)
        # The others are passed over.
        eventually(lambda: running.lag(names["group"]) == 0)
        assert sorted(each["body"] for each in client.facts_of("received")) == [
            "yes 1",
            "yes 2",
            "yes 3",
        ], found


@pytest.mark.parametrize(
    ("run", "scenario"),
    [
        pytest.param(run_python_client, "sql_push", id="python"),
        pytest.param(run_go_client, "sqlPush", id="go", marks=needs("go", GO_PROGRAM)),
        pytest.param(run_java_client, "sqlPush", id="java", marks=needs("java", JAVA_CLASSES)),
        pytest.param(run_node_client, "sqlPush", id="node", marks=needs("node", NODE_PACKAGES)),
    ],
)
def test_the_start_or_the_log_of_a_push_consumer_names_the_error_of_its_filter(
    run: Callable[..., Facts], scenario: str, tmp_path: Path, running: Standalone
) -> None:
    facts = run(tmp_path, scenario, running.grpc, topic="topic", group="group", sql="a LIKE 'x%'")
    logs = [path.read_text("utf-8") for path in tmp_path.rglob("*.log")]
    reason = "SQL filter, column 3: unexpected LIKE; use STARTSWITH, ENDSWITH or CONTAINS"
    assert any(reason in text for text in [facts.the("error")["text"], *logs]), facts
