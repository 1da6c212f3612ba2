"""The readiness of a process, and its report about brokers."""

from __future__ import annotations

import asyncio

import pytest

from tidemill.common import readiness
from tidemill.common.readiness import PeerStatus, ProcessReadiness

UP = PeerStatus("broker-0", "host:1", "up", 0.0, "")
SILENT = PeerStatus("broker-1", "host:2", "silent", 11.0, "it hangs")
RESTARTS = PeerStatus("broker-2", "host:3", "down", 2.0, "refused")


def serving(*peers: PeerStatus) -> ProcessReadiness:
    found = ProcessReadiness(lambda: peers, unready_after_ms=10_000)
    found.phase = "serving"
    return found


@pytest.mark.parametrize(
    ("peers", "is_ready"),
    [
        ((), True),
        ((UP,), True),
        ((SILENT,), False),
        ((SILENT, UP), True),
        ((SILENT, RESTARTS), True),
        ((SILENT, SILENT), False),
    ],
)
def test_one_recently_reachable_peer_is_enough(
    peers: tuple[PeerStatus, ...], is_ready: bool
) -> None:
    assert serving(*peers).report().is_ready == is_ready


def test_each_peer_is_named_with_its_error() -> None:
    assert serving(UP, SILENT).report().lines == [
        "ready",
        "[+] broker-0 at host:1: up",
        "[-] broker-1 at host:2: silent for 11.0 s (it hangs)",
    ]


def test_metrics_show_the_current_state_of_each_peer() -> None:
    ready, reachable = serving(UP, RESTARTS).collect()
    assert [sample.value for sample in ready.samples] == [1]
    assert [(sample.labels["broker"], sample.value) for sample in reachable.samples] == [
        ("broker-0", 1),
        ("broker-2", 0),
    ]


def test_each_change_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "CHECK_PERIOD_S", 0)
    peers = [UP]
    found = ProcessReadiness(lambda: peers)
    changes: list[bool] = []

    async def scenario() -> None:
        async def until(count: int) -> None:
            while len(changes) < count:  # noqa: ASYNC110 - `changes` is a plain list
                await asyncio.sleep(0)

        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(found.report_changes(changes.append))
            found.phase = "serving"
            await until(1)
            peers[:] = [SILENT]
            await until(2)
            peers[:] = [UP]
            await until(3)
            watch.cancel()

    asyncio.run(scenario())
    assert changes == [True, False, True]


def test_a_missing_part_makes_the_process_unready_and_is_named() -> None:
    lacking = ["it has not all that its master has"]
    found = ProcessReadiness(find_missing=lambda: "".join(lacking))
    found.phase = "serving"
    assert found.report() == (False, ["not ready: it has not all that its master has"])
    lacking.clear()
    assert found.report() == (True, ["ready"])
