"""An operator looks at what holds the space, by REST and by the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tests.support.clients.commands import tidemill
from tests.support.eventually import eventually
from tests.support.processes.processes import ADMIN_S, Standalone, standalone

MESSAGES = 12
CHECKPOINT_BYTES = 1 << 20  # of the log; a checkpoint writes the first derived files
BODY_BYTES = 3 * CHECKPOINT_BYTES // MESSAGES  # each broker group has half of the messages


def send(running: Standalone, topic: str, body: str) -> None:
    with httpx.Client(trust_env=False, timeout=ADMIN_S) as client:
        path = f"{running.admin}/api/v1/topics/{topic}/messages"
        client.post(path, json={"body": body}).raise_for_status()


def is_counted(running: Standalone, topic: str) -> bool:
    """Whether both broker groups have counted live messages of a topic."""
    topics: list[dict[str, Any]] = running.get("storage")["topics"]
    found = [one for one in topics if one["name"] == topic]
    groups = found[0]["brokerGroups"] if found else []
    return len(groups) == 2 and all(one.get("liveBytes") for one in groups)


def shows_derived_files(running: Standalone, stores: dict[str, Path]) -> bool:
    """Whether each broker group has queue and index files, and shows their sizes."""
    shown = {one["broker"]: one["derivedBytes"] for one in running.get("storage")["brokerGroups"]}
    sizes = {
        broker: {
            folder: sum(file.stat().st_size for file in (store / folder).iterdir())
            for folder in ("queues", "index")
        }
        for broker, store in stores.items()
    }
    return shown == sizes and all(all(one.values()) for one in shown.values())


def test_storage_shows_broker_groups_and_topics(tmp_path: Path) -> None:
    data = tmp_path / "data"
    settings = tmp_path / "settings.yaml"
    settings.write_text(f"checkpoint_log_bytes: {CHECKPOINT_BYTES}\n")
    with standalone(data, "--groups=2", f"--config={settings}") as running:
        eventually(lambda: len(running.get("broker-groups")["items"]) == 2)
        running.put("topics/orders", messageType="MIXED", queues=2)
        running.put("topics/kept", messageType="MIXED", queues=2, retention={"ms": -1})
        # Messages of one topic go to both broker groups in turn.
        for _ in range(MESSAGES):
            send(running, "orders", "m" * BODY_BYTES)
        for n in range(MESSAGES):
            send(running, "kept", f"m{n}")
        # The brokers count at least every 10 s.
        eventually(lambda: is_counted(running, "orders"), within_ms=40_000)
        eventually(lambda: is_counted(running, "kept"), within_ms=40_000)
        stores = {"broker-0": data, "broker-1": data / "broker-1"}
        eventually(lambda: shows_derived_files(running, stores), within_ms=40_000)
        found = running.get("storage")
        assert [one["broker"] for one in found["brokerGroups"]] == ["broker-0", "broker-1"]
        for one in found["brokerGroups"]:
            assert not one["isFull"]
            assert 0 < one["freeBytes"] <= one["totalBytes"]
            assert one["log"]["live"] > 0
            assert one["stateFloor"]["offset"] == 0
            assert one["stateFloor"]["storedAtMs"] > 0
        kept, orders = found["topics"]
        assert (kept["name"], orders["name"]) == ("kept", "orders")
        assert {one["keptBy"] for one in kept["brokerGroups"]} == {"for ever"}
        assert {one["keptBy"] for one in orders["brokerGroups"]} == {"retention.ms 3d"}
        assert 0 < orders["freedByDeletionBytes"] < orders["liveBytes"] <= orders["bytes"]
        check_pages(running)
        shown = tidemill(running, "storage", "show")
        assert shown.returncode == 0, shown.stderr
        lines = [line.split() for line in shown.stdout.splitlines()]
        assert [line[:2] for line in lines[1:3]] == [["broker-0", "ok"], ["broker-1", "ok"]]
        assert [line[0] for line in lines[5:]] == ["orders", "orders", "kept", "kept"]


def check_pages(running: Standalone) -> None:
    first = running.get("storage?pageSize=1")
    assert [one["name"] for one in first["topics"]] == ["kept"]
    second = running.get(f"storage?pageSize=1&pageToken={first['nextPageToken']}")
    assert [one["name"] for one in second["topics"]] == ["orders"]
    assert "nextPageToken" not in second
