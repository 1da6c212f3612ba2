"""J2 over a run with kills has the same result as the clients' own history."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.clients.audited_loads import second_opinion
from tests.support.clients.history import Outcome
from tests.support.clients.history_against_audit import LostAnswerSpan
from tests.support.clients.load import Load
from tests.support.processes.killing import kill_and_note, until
from tests.support.processes.processes import Standalone, standalone
from tests.support.seeds import seed_base

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.large

SEED = seed_base()
VICTIMS = ["broker-0"] * 3 + ["proxy-0", "proxy-1"]
PROGRESS = (5, 200)  # Messages stored between two kills: minimum and maximum.
DRAIN_S = 120.0
DELAY_MS = 2_000
PHANTOM = "plain/nobody/0"  # Reported as stored, but never sent: both must name it.


def test_an_audit_after_kills_agrees_with_the_clients(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(SEED)
    with standalone(tmp_path / "data", "--proxies=2") as running:
        running.put("topics/ordered", messageType="FIFO", queues=4)
        running.put("topics/delayed", messageType="DELAY", queues=4)
        running.put("groups/ordered", deliveryOrder="FIFO", maxAttempts=1000)
        for group in ("plain", "delayed"):
            running.put(f"groups/{group}", maxAttempts=1000)
        loads = [
            Load(running.grpc, "plain", "plain", rng),
            Load(running.grpc, "ordered", "ordered", rng, message_groups=3),
            Load(running.grpc, "delayed", "delayed", rng, delay_ms=DELAY_MS),
        ]
        kills = asyncio.run(kill_under_load(running, loads, rng))
        for load in loads:
            verdict = load.history.judge()
            assert verdict.is_clean, f"seed {SEED}, {load.topic}\n{verdict}"
        loads[0].history.send(PHANTOM).ended(Outcome.OK)
        opinion, findings = second_opinion(spark, running.grpc, loads, kills, tmp_path)
    with capsys.disabled():
        sys.stderr.write(f"\nkilled at {', '.join(str(each.ended_ms) for each in kills)}")
        sys.stderr.writelines(f"\n{load.status}" for load in loads)
        sys.stderr.writelines(f"\nanswer lost: {line}" for line in opinion.lost_answers)
    assert not opinion.differences, "\n".join(
        [f"seed {SEED}", *map(str, kills), *opinion.differences]
    )
    missing = [each["message_id"] for each in findings if each["kind"] == "missing"]
    assert missing == [PHANTOM]
    assert all(load.received > load.sent_ok for load in loads)  # Some messages came twice.


async def kill_under_load(
    running: Standalone, loads: list[Load], rng: random.Random
) -> list[LostAnswerSpan]:
    """Kill during the loads, drain them and return the times at which kills lost answers."""
    kills = []
    victims = rng.sample(VICTIMS, len(VICTIMS))
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        runs = [tasks.create_task(load.run(producers=3, consumers=2, stop=stop)) for load in loads]
        for name in [*victims, ""]:
            more = rng.randint(*PROGRESS)
            goals = [(load, load.sent_ok + more, load.received + 1) for load in loads]
            await until(
                lambda goals=goals: all(  # type: ignore[misc]
                    load.sent_ok >= sent and load.received >= got for load, sent, got in goals
                )
            )
            if name:
                kills.append(await kill_and_note(running, name))
        stop.set()
        _, undrained = await asyncio.wait(runs, timeout=DRAIN_S)
        for run in undrained:
            run.cancel()
    return kills
