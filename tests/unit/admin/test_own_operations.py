"""Operations of the admin process: their owners, bounds, keys and ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.clocks import ManualClock
from tidemill.admin.cluster.own_operations import (
    ENDED_MAX,
    LOST_KEPT_MS,
    RUNNING_MAX,
    OwnOperation,
    OwnOperations,
)
from tidemill.admin.json.operations import ERRORS_MAX, OperationKindView
from tidemill.common.clock import SystemClock
from tidemill.common.errors import IdempotencyMismatch, Overloaded

KIND = OperationKindView.APPLY_DEFINITIONS
BUNDLE = OperationKindView.SUPPORT_BUNDLE
NOW_MS = 1_796_000_000_000
WAIT_S = 30


def start(operations: OwnOperations, work: Any, **options: Any) -> OwnOperation:
    return operations.start(KIND, work, **{"total": 1, "by": "me", "user": "", **options})


async def end_of(operation: OwnOperation) -> str:
    name = f"operation {operation.view.id}"
    tasks = [task for task in asyncio.all_tasks() if task.get_name() == name]
    if tasks:
        await asyncio.wait(tasks, timeout=WAIT_S)
    return operation.view.state.value


async def succeed(operation: OwnOperation) -> None:
    operation.count()


async def fail(operation: OwnOperation) -> None:
    for number in range(ERRORS_MAX + 5):
        operation.fail(f"topic t{number}", "it is wrong")


async def break_down(_operation: OwnOperation) -> None:
    raise KeyError("a defect")


async def wait(_operation: OwnOperation) -> None:
    await asyncio.Event().wait()


def test_an_operation_ends_by_its_work() -> None:
    async def main() -> None:
        operations = OwnOperations(SystemClock())
        async with operations.running():
            assert await end_of(start(operations, succeed)) == "DONE"
            failed = start(operations, fail)
            assert await end_of(failed) == "FAILED"
            assert failed.view.failed == ERRORS_MAX + 5
            assert len(failed.view.errors or ()) == ERRORS_MAX
            broken = start(operations, break_down)
            assert await end_of(broken) == "FAILED"
            waiting = start(operations, wait)
            await asyncio.sleep(0)  # It begins.
        assert waiting.view.state.value == "FAILED", "it ends with the process"

    asyncio.run(main())


def test_a_cancelled_operation_ends_after_its_item() -> None:
    async def main() -> None:
        operations = OwnOperations(SystemClock())
        began, cancelled = asyncio.Event(), asyncio.Event()

        async def work(operation: OwnOperation) -> None:
            began.set()
            await cancelled.wait()
            assert operation.is_cancelled

        async with operations.running():
            operation = start(operations, work)
            await began.wait()
            operation.cancel()
            cancelled.set()
            assert await end_of(operation) == "CANCELLED"
            operation.cancel()
            assert operation.view.state.value == "CANCELLED"

    asyncio.run(main())


def test_one_owner_leaves_room_for_others() -> None:
    async def main() -> None:
        operations = OwnOperations(SystemClock())
        async with operations.running():
            start(operations, wait, user="eve 7")
            with pytest.raises(Overloaded, match="you have a running operation"):
                start(operations, wait, user="eve 7")
            for number in range(1, RUNNING_MAX):
                start(operations, wait, user=f"user-{number} {number}")
            with pytest.raises(Overloaded, match=f"{RUNNING_MAX} operations"):
                start(operations, wait, user="last 9")

    asyncio.run(main())


def test_one_file_is_planned_at_a_time() -> None:
    operations = OwnOperations(SystemClock())
    with operations.planning(), pytest.raises(Overloaded, match="try again"), operations.planning():
        pass
    with operations.planning():
        pass


def test_a_key_finds_its_operation_until_it_is_forgotten() -> None:
    async def main() -> None:
        operations = OwnOperations(SystemClock())
        async with operations.running():
            first = start(operations, succeed, key="k", request={"a": 1})
            assert operations.find_by_key("k", {"a": 1}) is first
            with pytest.raises(IdempotencyMismatch):
                operations.find_by_key("k", {"a": 2})
            assert operations.find_by_key(None, {"a": 1}) is None
            for _ in range(ENDED_MAX + 2):
                await end_of(start(operations, succeed))
            assert operations.find_by_key("k", {"a": 2}) is None
            assert len(operations.list()) <= ENDED_MAX + 1

    asyncio.run(main())


def test_an_operation_of_an_earlier_admin_process_has_failed() -> None:
    async def main() -> None:
        clock = ManualClock(NOW_MS)
        earlier = OwnOperations(clock)
        async with earlier.running():
            ids = [start(earlier, wait).view.id]
            clock.advance(1)
            ids.append(earlier.start(BUNDLE, wait, total=1, by="me", user="").view.id)
        clock.advance(1)
        later = OwnOperations(clock)
        lost = [later.find_lost(id_) for id_ in ids]
        assert [one and (one.kind, one.state, one.created_at_ms) for one in lost] == [
            (KIND, "FAILED", NOW_MS),
            (BUNDLE, "FAILED", NOW_MS + 1),
        ]
        for one in lost:
            assert one is not None
            assert one.error == "its admin process has ended, or another admin process runs it"
            assert (one.total, one.done, one.failed, one.by) == (None, None, None, None)
        assert earlier.find_lost(ids[0]) is None, "it has run here"
        assert later.find_lost("broker-0:5") is None
        assert later.find_lost("admin:5") is None
        clock.advance(LOST_KEPT_MS)
        assert later.find_lost(ids[0]) is None

    asyncio.run(main())
