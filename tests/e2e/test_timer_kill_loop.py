"""kill -9 of the broker while messages are scheduled, recalled and delivered.

Clients record their promises. At the end the test reads the whole log: every timer has ended in one
way, not early and not twice. Short by default; `make soak` runs it for SOAK_MINUTES, and the data
pipeline also audits the log. It names the one invented send, and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

import pytest

from tests.support.clients.history import Outcome
from tests.support.clients.timed_load import TimedLoad
from tests.support.disk.log_checker import LogChecker, records_of
from tests.support.disk.timer_log_fold import CANCELLED, DELIVERED
from tests.support.processes.killing import RECOVERY_S, NoProgress, kill, until
from tests.support.processes.processes import Standalone, standalone
from tests.support.seeds import seed_base
from tidemill.broker.posix_disk import PosixDisk

KILLS = 6
pytestmark = pytest.mark.heavy

SOAK_S = float(os.environ.get("SOAK_MINUTES", "0")) * 60
SEED = seed_base()
DELAY_MS_MAX = 60_000 if SOAK_S else 5_000
PAUSE_S = (0.5, 5.0)  # Between two kills of a soak.
PROGRESS = (20, 400)  # Messages scheduled between two kills: minimum and maximum.
DRAIN_S = 180.0
PHANTOM = "timed/nobody/0"  # Reported as scheduled, but never sent.
# Findings that kills must not cause. Kills make timers late. Deliveries without an answer come
# again, also after an ack with a lost answer.
OPINIONS = ("missing", "unexpected", "early", "unknown", "unreadable")


def test_every_timer_ends_in_one_way_whatever_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(SEED)
    with standalone(tmp_path / "data") as running:
        running.put("topics/timed", messageType="DELAY", queues=4)
        running.put("groups/timed", maxAttempts=1000)
        load = TimedLoad(running.grpc, "timed", "timed", rng, DELAY_MS_MAX)
        try:
            asyncio.run(kill_under_load(running, load, rng))
        except* NoProgress:
            log = running.log.read_text()[-5000:]
            pytest.fail(f"seed {SEED}: no progress within {RECOVERY_S:.0f} s\n{load.status}\n{log}")
        if SOAK_S:
            found = second_opinion(running, load, tmp_path)
            assert found == {("missing", PHANTOM)}, f"seed {SEED}"
        log = running.log.read_text()
        assert running.stop() == 0
    with capsys.disabled():
        if SOAK_S:
            sys.stderr.write(f"\n{load.status}\n")
    broken = load.judge()
    assert not broken, f"seed {SEED}, {len(broken)} promises\n" + "\n".join(broken[:20])
    assert load.sent_ok > 100
    assert load.recalled_ok > 5
    audit(tmp_path / "data", load)
    assert "Traceback" not in log


async def kill_under_load(running: Standalone, load: TimedLoad, rng: random.Random) -> None:
    """Run the load and kill the broker; return when all messages have come."""
    loop = asyncio.get_running_loop()
    end_at = loop.time() + SOAK_S
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(load.run(producers=8, consumers=3, stop=stop))
        for _ in range(KILLS):
            await progress(load, rng.randint(*PROGRESS))
            await kill(running, "broker-0")
        while loop.time() < end_at:
            await asyncio.sleep(rng.uniform(*PAUSE_S))
            await progress(load, 1)
            await kill(running, "broker-0")
        await progress(load, PROGRESS[1])
        stop.set()
        _, undrained = await asyncio.wait([run], timeout=DRAIN_S)
        for task in undrained:
            task.cancel()


async def progress(load: TimedLoad, messages: int) -> None:
    """Wait until `messages` more are scheduled and one more has come."""
    scheduled, received = load.sent_ok + messages, load.received + 1
    await until(lambda: load.sent_ok >= scheduled and load.received >= received)


def second_opinion(running: Standalone, load: TimedLoad, folder: Path) -> set[tuple[str, str]]:
    """Return the findings of an audit of the log: kinds and messages."""
    # Needs Spark, which only a soak requires.
    from tests.support.clients.audited_loads import audit as audit_by_events
    from tidemill_pipeline.jobs.running import session

    sends = [key for key, timed in load.messages.items() if timed.sent is Outcome.OK]
    with session("audit", "local[2]") as spark:
        findings, _ = audit_by_events(
            spark, running.grpc, ((load.topic, key) for key in (*sends, PHANTOM)), folder
        )
    # A timer that fired twice belongs to no consumer group.
    fired_twice = [
        each for each in findings if each["kind"] == "duplicate" and not each["consumer_group"]
    ]
    opinions = [each for each in findings if each["kind"] in OPINIONS]
    return {(each["kind"], each["message_id"]) for each in (*opinions, *fired_twice)}


def audit(data_dir: Path, load: TimedLoad) -> None:
    """Read the whole log: LogChecker raises if a timer ended twice, early or not at all."""
    checker = LogChecker()
    for header, body, tail in records_of(PosixDisk(data_dir)):
        checker.fold(header, body, tail)
    states: dict[str, list[str]] = {}
    for timer in checker.timers.timers.values():
        states.setdefault(timer.message_id, []).append(timer.state)
    for key, timed in load.messages.items():
        ended = states.get(key, [])
        # Clients do not repeat a send without an answer: at most one timer per key.
        assert len(ended) <= 1, (key, ended)
        if timed.received_at_ms and ended:
            assert ended == [DELIVERED], (key, ended)
        if timed.recalled is not None and ended:
            assert ended[0] in {CANCELLED, DELIVERED}, (key, ended)
