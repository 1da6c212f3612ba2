"""The overview of a running cluster, also while a broker hangs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone
from tests.support.processes.replicated_standalone import FLAGS, REPLICAS, send_signal


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("overview") / "data", "--groups=2") as started:
        started.put("topics/orders", queues=2)
        yield started


def overview(running: Standalone) -> dict[str, Any]:
    # The parts have two seconds, and the requests of a busy machine some more.
    answer = httpx.get(f"{running.admin}/api/v1/overview", trust_env=False, timeout=30)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def test_a_good_cluster_is_ok_and_has_all_parts(running: Standalone) -> None:
    found = eventually(lambda: (one := overview(running))["status"] == "OK" and one)
    assert isinstance(found, dict)
    assert found["problems"] == []
    assert [each["name"] for each in found["brokerGroups"]] == ["broker-0", "broker-1"]
    assert {each["broker"] for each in found["disks"]} == {"broker-0", "broker-1"}
    assert [each["name"] for each in found["topics"]] == ["orders"]
    assert found["deadLetters"] == {"open": 0, "lastHour": 0}
    assert found["changes"][0]["resource"] == "Topic:orders"
    assert "nextDueAtMs" not in found


def test_a_consumer_group_without_consumers_is_a_problem(running: Standalone) -> None:
    with httpx.Client(base_url=f"{running.admin}/api/v1", trust_env=False, timeout=30) as http:
        http.post("/topics/orders/messages", json={"body": "x"}).raise_for_status()
    running.put("groups/left")
    reset = {"topic": "orders", "to": "earliest"}
    url = f"{running.admin}/api/v1/groups/left:resetOffset"
    httpx.post(url, json=reset, trust_env=False, timeout=30).raise_for_status()
    found = eventually(lambda: (one := overview(running))["problems"] and one)
    assert isinstance(found, dict)
    [problem] = found["problems"]
    assert (found["status"], problem["code"]) == ("DEGRADED", "LagGrowing")
    assert problem["command"] == "tidemill group show left"
    running.delete("groups/left")


def test_an_overview_comes_while_a_broker_hangs(running: Standalone) -> None:
    broker = running.processes["broker-1"].pid
    send_signal([broker], signal.SIGSTOP)
    try:
        eventually(
            lambda: (
                ("BrokerDown", "broker-1")
                in {(each["code"], each["object"]) for each in overview(running)["problems"]}
            )
        )
    finally:
        send_signal([broker], signal.SIGCONT)
    eventually(lambda: overview(running)["status"] == "OK")


def test_broker_groups_stay_in_the_overview_while_the_controllers_hang(tmp_path: Path) -> None:
    def replicas(found: dict[str, Any]) -> list[Any]:
        return [each for group in found.get("brokerGroups", ()) for each in group["replicas"]]

    with standalone(tmp_path / "data", *FLAGS) as running:
        eventually(lambda: len(replicas(overview(running))) == REPLICAS)
        [controller] = [
            each["pid"]
            for each in running.get("processes")["items"]
            if each["kind"].lower() == "controller"
        ]
        send_signal([controller], signal.SIGSTOP)
        try:
            found = eventually(
                lambda: "controllers" in (one := overview(running)).get("unreachable", ()) and one
            )
            assert isinstance(found, dict)
            assert [each["name"] for each in found["brokerGroups"]] == ["broker-0"]
            assert len(replicas(found)) < REPLICAS, "only the controllers know all of them"
            assert "ControllerNoLeader" in [each["code"] for each in found["problems"]]
        finally:
            send_signal([controller], signal.SIGCONT)
