"""Official consumers whose configuration loses messages or their order: an operator learns it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.support.clients.client_process import staying_client
from tests.support.clients.commands import tidemill
from tests.support.eventually import eventually
from tests.support.processes.processes import ADMIN_S, Standalone, standalone

WITHIN_MS = 60_000
BROKER = "broker-0"
WARNING = "consumers of one group filter a topic differently"
ORDER_WARNING = "a CONCURRENT consumer group reads a FIFO topic"


def conflicts(running: Standalone) -> dict[str, dict[str, Any]]:
    """Return the conflicts of the consumer group by kind."""
    found = running.get("groups/billing").get("conflicts", [])
    return {conflict["kind"]: conflict for conflict in found}


def has(kinds: set[str], running: Standalone) -> Callable[[], bool]:
    return lambda: set(conflicts(running)) == kinds


def test_consumers_that_lose_messages_or_their_order_are_reported(tmp_path: Path) -> None:
    names = {"topic": "orders", "group": "billing"}
    red, blue = ({**names, "tags": tag} for tag in ("red", "blue"))
    with standalone(tmp_path / "data") as running:
        running.put("topics/orders", messageType="FIFO", queues=1)
        running.put("groups/billing")
        with staying_client("python", tmp_path / "first", running.grpc, **red):
            eventually(has({"order"}, running), within_ms=WITHIN_MS)
            [only] = running.get("groups/billing")["filters"]
            assert (only["topic"], only["expression"]) == ("orders", "red")
            assert "orders: red (" in tidemill(running, "group", "show", "billing").stdout
            with staying_client("python", tmp_path / "second", running.grpc, **blue):
                eventually(has({"filter", "order"}, running), within_ms=WITHIN_MS)
                found = conflicts(running)["filter"]
                assert [each["expression"] for each in found["filters"]] == ["blue", "red"]
                polling = {each["clientId"] for each in found["filters"]}
                clients = running.get("clients?group=billing")["clients"]
                assert {client["clientId"] for client in clients} == polling
                for client in clients:
                    assert {each["kind"] for each in client["conflicts"]} == {"filter", "order"}
                listed = tidemill(running, "client", "list").stderr
                shown = tidemill(running, "group", "show", "billing").stdout
        metrics = httpx.get(running.processes[BROKER].metrics, trust_env=False, timeout=ADMIN_S)
    assert listed.count("consumers of billing filter orders differently: blue") == 1
    assert listed.count("orders is FIFO and billing is CONCURRENT") == 1
    assert shown.count("conflict") >= len(("filter", "order"))
    samples = [line for line in metrics.text.splitlines() if "_conflicts{" in line]
    values = {line.partition("{")[0]: float(line.split()[-1]) for line in samples}
    assert values == {"rocketmq_filter_conflicts": 2, "rocketmq_order_conflicts": 1}
    log = (tmp_path / "data.log").read_text("utf-8")
    assert (log.count(WARNING), log.count(ORDER_WARNING)) == (1, 1)
