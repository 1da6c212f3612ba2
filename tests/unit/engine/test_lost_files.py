"""Starts after a loss: a zeroed page, and a cut, missing or unreadable file of every kind.

A start rebuilds lost derived files without an error. If the log has lost bytes that the start must
read, the start stops and names the file, the position and the remedy.
"""

from __future__ import annotations

import re
from functools import cache
from random import Random

import pytest

from tests.support.disk.faulty_disk import BLOCK, SECTOR, FaultyDisk
from tests.support.processes.own_process import in_own_process
from tests.support.seeds import each, seeds
from tests.support.worlds.timer_world import HOUR_MS, SECOND_MS, TIMERS, TimerWorld
from tidemill.broker.engine.store.disk import DiskFailed
from tidemill.broker.engine.store.segment import CorruptStore

SEEDS = 8
SEGMENT = 64 << 10
OPTIONS = {"segment_bytes": SEGMENT, "checkpoint_log_bytes": 1 << 40, "checkpoint_records": 1 << 40}
GROUP = "billing"
# Files that a start reads by calls and rebuilds. All others, except the checkpoint file, are mapped
# or not read.
CACHES_READ = ("timer/checkpoint.a", "timer/checkpoint.b", "timer/state/", "timer/wheel")


class UncheckedWorld(TimerWorld):
    """A world with a log that may have lost records. It is not checked against a model."""

    def judge(self) -> None:
        """Do nothing."""


@cache
def history() -> TimerWorld:
    """Make a store with files of every kind, including unfinished files of a crash."""
    world = TimerWorld(timer=TIMERS, **OPTIONS)  # type: ignore[arg-type]  # as the world has them
    world.group()
    for n in range(120):
        world.send(f"m{n}", size=1_500)
        world.schedule(f"t{n}", delay_ms=HOUR_MS + n * SECOND_MS, size=300)
        if n % 30 == 29:
            world.sleep(12 * SECOND_MS)
            world.background()
            world.checkpoint()
    world.ack(*world.pop(20, invisible_ms=60_000))
    world.cancel(7)
    world.sleep(12 * SECOND_MS)
    world.background()
    world.checkpoint()
    world.send("the last")
    world.pop(4, invisible_ms=60_000)
    for folder in ("log/prepared", "queues/unfinished", "index/unfinished", "snapshots/unfinished"):
        if folder not in world.disk.all_names():
            file = world.disk.open(folder, create=True)
            file.write_at(0, [b"half of the file"])
    return world


def names() -> list[str]:
    return history().disk.all_names()


def lose(disk: FaultyDisk, name: str, how: str, seed: int) -> None:
    random = Random(f"{name} {how} {seed}")
    data = disk.read(name) or b""
    size = len(data)
    if how == "page":
        # A page, or a sector of a page, with content.
        stretch = (BLOCK, SECTOR)[seed % 2]
        used = [at for at in range(0, size, stretch) if any(data[at : at + stretch])]
        if used:
            disk.zero(name, random.choice(used), stretch)
    elif how == "cut":
        disk.cut(name, random.choice([0, random.randrange(size), size // BLOCK // 2 * BLOCK]))
    else:
        disk.remove(name)


def start(disk: FaultyDisk) -> UncheckedWorld:
    return UncheckedWorld(disk, now_ms=history().now_ms, timer=TIMERS, **OPTIONS)  # type: ignore[arg-type]  # as above


def outcome(disk: FaultyDisk) -> tuple[list[str], list[str], list[str]]:
    """Start, and return the messages of two groups and of the timers."""
    world = start(disk)
    for _ in range(8):
        world.advance(HOUR_MS // 4)
        world.background()
    found = []
    for group in (GROUP, "late"):
        bodies: list[str] = []
        while popped := world.pop(group=group, invisible_ms=10 * HOUR_MS):
            bodies += [one.body for one in popped]
            world.background()
        found.append(sorted(bodies))
    return found[0], found[1], world.drain(topic="%DLQ%TIMER")


@cache
def expected() -> tuple[list[str], list[str], list[str]]:
    return outcome(history().disk.after_kill())


def test_a_file_of_every_kind_exists() -> None:
    kinds = {re.sub(r"\d{20}", "N", name) for name in names()}
    assert kinds >= {
        "checkpoint",
        "index/N-N",
        "index/unfinished",
        "log/N.log",
        "log/prepared",
        "queues/N-N",
        "queues/unfinished",
        "snapshots/N-N",
        "snapshots/unfinished",
        "timer/checkpoint.a",
        "timer/checkpoint.b",
        "timer/state/N",
        "timer/timerlog/N",
        "timer/wheel",
    }
    assert "t7" not in expected()[1]
    assert len(expected()[1]) == 121 + 119


@pytest.mark.parametrize("how", ["page", "cut", "missing"])
@pytest.mark.parametrize("name", [one for one in names() if not one.endswith(".log")])
def test_a_lost_derived_file_is_rebuilt(name: str, how: str) -> None:
    for seed in each(seeds("lost files", SEEDS if how != "missing" else 1)):
        disk = history().disk.after_kill()
        lose(disk, name, how, seed)
        assert outcome(disk) == expected(), f"seed {seed}"


@pytest.mark.parametrize("how", ["page", "cut", "missing"])
@pytest.mark.parametrize("name", [one for one in names() if one.endswith(".log")])
def test_a_loss_in_the_log_stops_the_start_or_affects_only_its_records(name: str, how: str) -> None:
    for seed in each(seeds("lost files", SEEDS if how != "missing" else 1)):
        disk = history().disk.after_kill()
        lose(disk, name, how, seed)
        is_empty = not any(history().disk.read(name) or b"")
        try:
            found = outcome(disk)
        except CorruptStore as error:
            refusal = str(error)
        else:
            refusal = ""
        if refusal:
            assert re.search(r"log/\d{20}\.log", refusal)
            assert "store mend DIR --from BACKUP`; do not copy single files" in refusal
            continue
        assert how == "page" or is_empty, "a missing or cut segment stops the start"
        assert found == expected() or not is_empty
        for got, whole in zip(found[:2], expected()[:2], strict=True):
            assert set(got) <= set(whole), (
                "no acked message is delivered again, and no message is invented"
            )


@pytest.mark.parametrize("name", names())
def test_an_unreadable_file_is_rebuilt_or_named(name: str) -> None:
    disk = history().disk.after_kill()
    disk.unreadable.add(name)
    if name.endswith(".log") and needed_by_a_start(name):
        with pytest.raises(
            CorruptStore, match=rf"{name} cannot be read at byte \d+ .* store mend DIR"
        ):
            outcome(disk)
        return
    if name.endswith(".log"):
        got, whole = outcome(disk), expected()
        assert all(set(some) <= set(every) for some, every in zip(got[:2], whole[:2], strict=True))
        return
    assert outcome(disk) == expected()
    if name.startswith(CACHES_READ):
        assert name in disk.all_names()
        assert not disk.unreadable, "it has another position now, and the next start reads it"


@cache
def replayed_from() -> int:
    return start(history().disk.after_kill()).report.replayed_from


def needed_by_a_start(name: str, end: int = SEGMENT) -> bool:
    """Return whether a start reads byte `end` of a segment, in the replay or after the log end."""
    return int(name.removeprefix("log/").removesuffix(".log")) + end > replayed_from()


def pages(name: str) -> list[int]:
    """Return the first page of a file, the last page, and some between."""
    count = -(-len(history().disk.read(name) or b"x") // BLOCK)
    return sorted({0, count // 3, count // 2, count - 1})


@pytest.mark.parametrize("name", [one for one in names() if one != "checkpoint"])
def test_a_page_that_cannot_be_read_is_never_touched(name: str) -> None:
    """The system kills a process that touches such a mapped page, at every start again."""
    for page in pages(name):
        disk = history().disk.after_kill()
        disk.spoil(name, page)
        in_own_process(lambda disk=disk, page=page: judge_page(name, page, disk))  # type: ignore[misc]  # mypy cannot infer a lambda's default.


def judge_page(name: str, page: int, disk: FaultyDisk) -> None:
    if not name.endswith(".log"):
        assert outcome(disk) == expected()
    elif needed_by_a_start(name, (page + 1) * BLOCK):
        with pytest.raises(
            CorruptStore, match=rf"{name} cannot be read at byte \d+ .* store mend DIR"
        ):
            outcome(disk)
    else:
        got, whole = outcome(disk), expected()
        lost = set(whole[1]) - set(got[1])
        assert len(lost) < 20, "messages on other pages are delivered"
        assert all(set(some) <= set(every) for some, every in zip(got[:2], whole[:2], strict=True))


@pytest.mark.parametrize("name", [one for one in names() if one.startswith(CACHES_READ)])
def test_a_failed_sync_stops_a_start_even_if_a_read_would_not(name: str) -> None:
    known = history().disk.after_kill()
    start(known)
    disk = history().disk.after_kill()
    disk.unreadable.add(name)
    disk.sync_fails_at = known.operations.index(f"sync {name}")
    with pytest.raises(DiskFailed, match=f"sync {name}"):
        start(disk)
