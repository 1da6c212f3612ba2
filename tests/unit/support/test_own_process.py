"""Bad pages: a read fails, and access to a mapped page ends the process."""

from __future__ import annotations

import subprocess
import sys
from random import Random

import pytest

from tests.support.disk.faulty_disk import BLOCK, FaultyDisk
from tests.support.processes.own_process import in_own_process
from tidemill.broker.engine.store.disk import ReadFailed

NAME = "log/file"


def spoilt() -> FaultyDisk:
    """Make a file of three pages. The second page is unreadable."""
    disk = FaultyDisk(Random(0))
    disk.open(NAME, create=True).write_at(0, [bytes(range(1, 4)) * BLOCK])
    disk.spoil(NAME, 1)
    return disk


@pytest.mark.parametrize("seed", ["now", "after a kill", "after a power cut"])
def test_a_read_of_a_bad_page_fails_and_of_others_does_not(seed: str) -> None:
    disk = spoilt()
    disk.open(NAME).sync()
    disk.sync_folder("log")
    if seed != "now":
        disk = disk.after_kill() if seed == "after a kill" else disk.after_power_cut()
    file = disk.open(NAME)
    assert len(file.read_at(0, BLOCK)) == len(file.read_at(2 * BLOCK, 2 * BLOCK)) == BLOCK
    for begin, size in ((0, BLOCK + 1), (BLOCK, 1), (2 * BLOCK - 1, 1), (0, 3 * BLOCK)):
        with pytest.raises(ReadFailed, match=NAME):
            file.read_at(begin, size)


def test_a_touch_of_a_bad_page_ends_the_process_and_of_others_does_not() -> None:
    view = spoilt().open(NAME).view()

    def touch(*places: int) -> None:
        assert all(view[at] for at in places)

    in_own_process(lambda: touch(0, BLOCK - 1, 2 * BLOCK))
    with pytest.raises(pytest.fail.Exception, match="ended the process"):
        in_own_process(lambda: touch(BLOCK))


def test_an_expected_end_by_a_signal_prints_nothing(pytestconfig: pytest.Config) -> None:
    """pytest dumps the threads of a process that a signal ends. The dump looks like a fault."""
    name = test_a_touch_of_a_bad_page_ends_the_process_and_of_others_does_not.__name__
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", f"{__file__}::{name}"],
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Fatal Python error" not in done.stdout


def test_a_view_shows_writes_and_a_rewritten_page_is_readable() -> None:
    disk = spoilt()
    file = disk.open(NAME)
    view = file.view()
    file.write_at(BLOCK - 1, [b"x" * (BLOCK + 2)])
    assert (view[BLOCK - 1], view[2 * BLOCK]) == (ord("x"), ord("x"))
    assert file.read_at(BLOCK, 1) == bytes(file.view()[BLOCK : BLOCK + 1]) == b"x"


def test_a_scenario_that_raises_fails_with_its_traceback() -> None:
    def scenario() -> None:
        raise LookupError("that is why")

    with pytest.raises(pytest.fail.Exception, match="that is why"):
        in_own_process(scenario)
