"""A disk that fails one write, or one sync, of a replica under load: row 23 of the fault matrix.

The kernel returns EIO or EROFS to the broker or to its sync process once. A second call would
succeed, but the broker does not repeat the call. It ends, another broker takes over, and no
acknowledged message is lost.
"""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from tests.e2e.test_clients_through_failovers import SENDS_BETWEEN, play, sends
from tests.support.clients.load import Load
from tests.support.disk.failing_calls import SYNC, WRITE, fail_once, is_possible
from tests.support.processes.controlled_group import ControlledGroup, reasons_since
from tests.support.processes.processes import descendants, is_running
from tidemill.controller.election.failure import Failure

pytestmark = pytest.mark.heavy
FAILED = "[Errno 5]", "Input/output error", "[Errno 30]", "Read-only file system"


@pytest.fixture(scope="module", autouse=True)
def traceable() -> None:
    if not is_possible():
        pytest.skip("here nobody can make a call of another process fail")


def process_of(broker: int, calls: frozenset[int]) -> int:
    """Return the id of the process that makes these calls for the log of a broker."""
    return (
        broker if calls == WRITE else descendants(broker)[1]
    )  # Forked first: the sync process of the log.


@pytest.mark.parametrize("whose", ["the master", "a replica"])
@pytest.mark.parametrize(
    ("calls", "error"),
    [(WRITE, errno.EIO), (SYNC, errno.EIO), (WRITE, errno.EROFS)],
    ids=["a write", "a sync", "read-only"],
)
def test_a_replica_with_a_failed_disk_is_replaced(
    tmp_path: Path, whose: str, calls: frozenset[int], error: int
) -> None:
    async def fail(group: ControlledGroup, load: Load) -> None:
        before = await asyncio.to_thread(group.await_in_sync)
        master: int = before.view.master.replica_id
        victim = master if whose == "the master" else (master + 1) % 3
        run = next(one for one in before.view.sss if one.replica_id == victim)
        broker = group.replicas[victim].broker_pid
        await asyncio.to_thread(fail_once, process_of(broker, calls), calls, error)
        if victim == master:
            after = await asyncio.to_thread(group.led_by_another, before)
            assert reasons_since(before, after)[0] == Failure.DIED.value
        await sends(load, SENDS_BETWEEN)
        # The replica has registered with a new run: its supervisor has started it again.
        whole = await asyncio.to_thread(
            group.await_group, lambda one: len(one.view.sss) == 3 and run not in one.view.sss
        )
        assert not is_running(broker)
        if victim != master:
            assert whole.view.epoch == before.view.epoch, "the master was not its business"
        log = (group.folder / f"replica-{victim}.log").read_text()
        assert any(word in log for word in FAILED), log[-3000:]

    load = play(tmp_path, fail)
    verdict = load.history.judge()
    assert verdict.is_clean, str(verdict)
