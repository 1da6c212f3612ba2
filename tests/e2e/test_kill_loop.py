"""Repeated kill -9 under load: no message is lost, revived or invented.

Short by default. `make soak` runs it for SOAK_MINUTES. The data pipeline then audits the log, with
the same result as the clients' history. The seed repeats the choices of a run, but not their
timing.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.clients.api import api
from tests.support.clients.history_against_audit import LostAnswerSpan
from tests.support.clients.load import Load
from tests.support.processes.killing import RECOVERY_S, NoProgress, kill_and_note, until
from tests.support.processes.processes import Standalone, standalone
from tests.support.seeds import seed_base

pytestmark = pytest.mark.heavy

BROKER_KILLS, PROXY_KILLS = 6, 4
SOAK_S = float(os.environ.get("SOAK_MINUTES", "0")) * 60
SEED = seed_base()
DRAIN_S = 120.0
SOAK_PAUSE_S = 20.0  # The longest pause between two kills of a soak.
PROGRESS = (5, 400)  # Messages stored between two kills: minimum and maximum.


def test_no_promise_is_broken_by_kills_under_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(SEED)
    with standalone(tmp_path / "data", "--proxies=2") as running:
        running.put("topics/ordered", messageType="FIFO", queues=4)
        running.put("groups/ordered", deliveryOrder="FIFO", maxAttempts=1000)
        running.put("groups/plain", maxAttempts=1000)
        plain = Load(running.grpc, "plain", "plain", rng)
        ordered = Load(running.grpc, "ordered", "ordered", rng, message_groups=6)
        try:
            kills = asyncio.run(kill_under_load(running, [plain, ordered], rng))
        except* NoProgress:
            statuses = f"{plain.status}\n{ordered.status}\n{running.log.read_text()[-5000:]}"
            pytest.fail(f"seed {SEED}: no progress within {RECOVERY_S:.0f} s\n{statuses}")
        if SOAK_S:
            differences = audit(running, [plain, ordered], kills, tmp_path)
            assert not differences, "\n".join([f"seed {SEED}", *map(str, kills), *differences])
        log = running.log.read_text()
        assert running.stop() == 0
    with capsys.disabled():
        for load in (plain, ordered) if SOAK_S else ():
            sys.stderr.write(f"\n{load.status}\n")
    with standalone(tmp_path / "data") as running:
        asyncio.run(poll_once(running, [plain, ordered]))
    for load in (plain, ordered):
        verdict = load.history.judge()
        assert verdict.is_clean, f"seed {SEED}, {load.topic}\n{verdict}"
        assert load.sent_ok > 100
        assert (
            load.received > load.sent_ok
        )  # Some messages came twice, so the verdict covers duplicates.
    assert "Traceback" not in log


def audit(
    running: Standalone, loads: list[Load], kills: list[LostAnswerSpan], folder: Path
) -> Sequence[str]:
    """Return the differences between an audit of the log and the clients' history."""
    # Needs Spark, which only a soak requires.
    from tests.support.clients.audited_loads import second_opinion
    from tidemill_pipeline.jobs.running import session

    with session("audit", "local[2]") as spark:
        opinion, _ = second_opinion(spark, running.grpc, loads, kills, folder)
    return opinion.differences


async def kill_under_load(
    running: Standalone, loads: list[Load], rng: random.Random
) -> list[LostAnswerSpan]:
    """Run the loads and kill processes; return the times at which kills lost answers."""
    kills = []
    loop = asyncio.get_running_loop()
    end_at = loop.time() + SOAK_S
    victims = ["broker-0"] * BROKER_KILLS + ["proxy-0", "proxy-1"] * (PROXY_KILLS // 2)
    rng.shuffle(victims)
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        runs = [tasks.create_task(load.run(producers=6, consumers=3, stop=stop)) for load in loads]
        for name in victims:
            await progress(loads, rng.randint(*PROGRESS))
            kills.append(await kill_and_note(running, name))
        while loop.time() < end_at:
            await asyncio.sleep(rng.uniform(0, SOAK_PAUSE_S))
            await progress(loads, rng.randint(*PROGRESS))
            kills.append(await kill_and_note(running, rng.choice(victims)))
        await progress(loads, PROGRESS[1])
        stop.set()
        _, undrained = await asyncio.wait(runs, timeout=DRAIN_S)
        for run in undrained:
            run.cancel()
    return kills


async def progress(loads: list[Load], messages: int) -> None:
    """Wait until each load has stored `messages` more and its consumers have received some."""
    goals = [(load, load.sent_ok + messages, load.received + 1) for load in loads]
    await until(
        lambda: all(load.sent_ok >= sent and load.received >= got for load, sent, got in goals)
    )


async def poll_once(running: Standalone, loads: list[Load]) -> None:
    """Record deliveries after a clean restart: there should be none."""
    async with api(running.grpc) as client:
        for load in loads:
            received = await client.receive(load.topic, load.group)
            load.history.received([each.body.partition(b" ")[0].decode() for each in received])
