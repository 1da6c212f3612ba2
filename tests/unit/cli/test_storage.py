"""`tidemill storage show`: broker groups, and the largest topics."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from tidemill.cli.app import app

MIB = 1 << 20


def group(broker: str, **changes: Any) -> dict[str, Any]:
    log = {"live": 40 * MIB, "dead": 30 * MIB, "stub": 3 * MIB, "control": 2 * MIB, "pinned": MIB}
    found = {
        "broker": broker,
        "isFull": False,
        "freeBytes": 900 * MIB,
        "totalBytes": 1_000 * MIB,
        "reserveBytes": 512 * MIB,
        "log": log,
        "derivedBytes": {"queues": 5 * MIB, "index": 4 * MIB},
        "stateFloor": {"offset": 7, "storedAtMs": 0},
    }
    return {**found, **changes}


def topic(name: str, size_mib: int, *brokers: str) -> dict[str, Any]:
    size, count = size_mib * MIB, len(brokers or ("broker-0",))
    return {
        "name": name,
        "bytes": size * count,
        "liveBytes": size * count // 2,
        "freedByDeletionBytes": size * count // 4,
        "brokerGroups": [
            {"broker": one, "bytes": size, "liveBytes": size // 2, "keptBy": "retention.ms 3d"}
            for one in brokers or ("broker-0",)
        ],
    }


class RestApi:
    """The REST API: pages of GET /storage, and the tokens that it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *pages: dict[str, Any]) -> None:
        self.tokens: list[str | None] = []

        def request(_: httpx.Client, method: str, url: str, **given: Any) -> httpx.Response:
            token = (given.get("params") or {}).get("pageToken")
            self.tokens.append(token)
            page = dict(pages[int(token or 0)])
            if int(token or 0) + 1 < len(pages):
                page["nextPageToken"] = str(int(token or 0) + 1)
            return httpx.Response(200, json=page, request=httpx.Request(method, url))

        monkeypatch.setattr(httpx.Client, "request", request)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_the_largest_topics_of_all_pages_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = RestApi(
        monkeypatch,
        {"brokerGroups": [group("broker-0")], "topics": [topic("a", 4), topic("b", 20)]},
        {"brokerGroups": [group("broker-0")], "topics": [topic("c", 8)]},
    )
    shown = run("storage", "show", "--topics", "2")
    assert shown.exit_code == 0, shown.output
    lines = [cells(line) for line in shown.output.splitlines()]
    assert lines[0][-3:] == ["QUEUES", "INDEX", "STATE FLOOR"]
    assert lines[1][:-1] == [
        "broker-0",
        "ok",
        "900.0 MiB",
        "512.0 MiB",
        "40.0 MiB",
        "30.0 MiB",
        "3.0 MiB",
        "2.0 MiB",
        "1.0 MiB",
        "5.0 MiB",
        "4.0 MiB",
    ]
    assert lines[4:6] == [
        ["b", "20.0 MiB", "10.0 MiB", "5.0 MiB", "retention.ms 3d"],
        ["c", "8.0 MiB", "4.0 MiB", "2.0 MiB", "retention.ms 3d"],
    ]
    assert "1 smaller topics are not shown; see --topics." in shown.output
    assert rest.tokens == [None, "1"]


def test_json_has_all_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    RestApi(
        monkeypatch,
        {"brokerGroups": [group("broker-0")], "topics": [topic("a", 4)]},
        {"brokerGroups": [group("broker-0")], "topics": [topic("b", 8)]},
    )
    found = json.loads(run("--output", "json", "storage", "show", "--topics", "0").output)
    assert [one["name"] for one in found["topics"]] == ["a", "b"]
    assert found["brokerGroups"] == [group("broker-0")]
    assert "nextPageToken" not in found


def test_each_broker_group_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [group("broker-0"), group("broker-1", isFull=True, log=None)]
    del groups[1]["log"]
    RestApi(
        monkeypatch,
        {
            "brokerGroups": groups,
            "topics": [topic("a", 4, "broker-0", "broker-1")],
            "unreachable": ["broker-2"],
        },
    )
    shown = run("storage", "show")
    lines = [cells(line) for line in shown.output.splitlines()]
    assert lines[2][:5] == ["broker-1", "FULL", "900.0 MiB", "512.0 MiB", "counting"]
    assert ["a", "broker-0", "4.0 MiB", "2.0 MiB", "2.0 MiB", "retention.ms 3d"] in lines
    assert ["a", "broker-1", "4.0 MiB", "2.0 MiB", "retention.ms 3d"] in lines
    assert "broker-2 is unreachable" in shown.output


def test_a_broker_that_counts_shows_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = {"name": "a", "brokerGroups": [{"broker": "broker-0"}]}
    RestApi(monkeypatch, {"brokerGroups": [group("broker-0")], "topics": [counting]})
    assert ["a", "counting", "counting", "counting"] in [
        cells(line) for line in run("storage", "show").output.splitlines()
    ]
