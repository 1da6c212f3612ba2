"""Official push consumers with a filter that is not supported: the application learns it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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
)
from tests.support.processes.processes import Standalone, standalone

REASON = "SQL filters are not served yet"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("filters") / "data") as started:
        yield started


@pytest.mark.parametrize(
    ("run", "scenario"),
    [
        pytest.param(run_python_client, "sql_push", id="python"),
        pytest.param(run_go_client, "sqlPush", id="go", marks=needs("go", GO_PROGRAM)),
        pytest.param(run_java_client, "sqlPush", id="java", marks=needs("java", JAVA_CLASSES)),
        pytest.param(run_node_client, "sqlPush", id="node", marks=needs("node", NODE_PACKAGES)),
    ],
)
def test_the_start_or_the_log_of_a_push_consumer_names_an_unsupported_filter(
    run: Callable[..., Facts], scenario: str, tmp_path: Path, running: Standalone
) -> None:
    facts = run(tmp_path, scenario, running.grpc, topic="topic", group="group")
    logs = [path.read_text("utf-8") for path in tmp_path.rglob("*.log")]
    assert any(REASON in text for text in [facts.the("error")["text"], *logs]), facts
