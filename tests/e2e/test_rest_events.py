"""`GET /events`: documents of a running cluster, after each change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.processes.processes import Standalone, standalone


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("events") / "data") as started:
        yield started


@pytest.fixture
def http(running: Standalone) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{running.admin}/api/v1", trust_env=False, timeout=60) as client:
        yield client


def events_of(answer: httpx.Response) -> Iterator[tuple[str, Any]]:
    """Yield name and document of each event."""
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    name = ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield name, json.loads(data) if data else None


def test_a_stream_has_each_document_and_each_change(http: httpx.Client) -> None:
    http.put("/groups/billing", json={"maxAttempts": 3}).raise_for_status()
    watched = "overview,group:billing,group:none"
    with http.stream("GET", "/events", params={"watch": watched}) as answer:
        events = events_of(answer)
        first: dict[str, Any] = {}
        while len(first) < 3:
            name, document = next(events)
            first[name] = document
        assert first["overview"]["status"] in {"OK", "DEGRADED", "DOWN"}
        assert first["group:billing"]["maxAttempts"] == 3
        problem = first["problem"]
        assert (problem["watch"], problem["isOver"]) == ("group:none", True)
        http.put("/groups/billing", json={"maxAttempts": 4}).raise_for_status()
        changed = (document for name, document in events if name == "group:billing")
        assert next(one for one in changed if one["maxAttempts"] == 4)


def test_a_stream_ends_with_its_last_watch(http: httpx.Client) -> None:
    http.put("/topics/gone", json={}).raise_for_status()
    with http.stream("GET", "/events", params={"watch": "topic:gone"}) as answer:
        events = events_of(answer)
        assert next(events)[0] == "topic:gone"
        http.delete("/topics/gone").raise_for_status()
        last = [name for name, _ in events][-2:]
        assert last == ["problem", "end"]


@pytest.mark.parametrize(
    "watch", ["", "overview:x", "topic:", "topic", "cluster", "topic:a/b", "overview,,", "topic:\n"]
)
def test_a_strange_watch_is_refused(http: httpx.Client, watch: str) -> None:
    assert http.get("/events", params={"watch": watch}).status_code == 400


def test_a_stream_has_at_most_20_watches(http: httpx.Client) -> None:
    watches = ",".join(f"topic:t{number}" for number in range(21))
    assert http.get("/events", params={"watch": watches}).status_code == 400
    # Each of these topics is missing, so the stream ends by itself.
    answer = http.get("/events", params={"watch": watches.rpartition(",")[0]})
    assert answer.text.count("event: problem") == 20
