"""The tests that each store of group records passes (F-29). A subclass opens the stores.

Two stores stand for two controllers: they share only the stored records and leases.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from tests.support.worlds.replica_records import record_of_three
from tidemill.controller.election.leadership import LeaseSeen
from tidemill.controller.election.swap import (
    StoredRecord,
    WriteOutcome,
    attempt_no_change,
    attempt_write,
    outcome_of,
)
from tidemill.controller.meta_store import MetaStore, RecordChange, WriteFailure

GROUP = "broker-0"
WAIT_S = 20.0  # the limit of a scenario
Scenario = Callable[[MetaStore, MetaStore], Awaitable[None]]


class MetaStoreSuite:
    """The suite: each test gets two stores over the same contents."""

    def stores(self) -> contextlib.AbstractAsyncContextManager[tuple[MetaStore, MetaStore]]:
        """Open two stores over the same, empty contents."""
        raise NotImplementedError

    def play(self, scenario: Scenario) -> None:
        async def run() -> None:
            async with asyncio.timeout(WAIT_S), self.stores() as (one, other):
                await scenario(one, other)

        asyncio.run(run())

    def test_another_store_reads_a_created_group(self) -> None:
        async def scenario(one: MetaStore, other: MetaStore) -> None:
            assert await other.get(GROUP) is None
            stored = done(await one.create(GROUP, record_of_three()))
            assert await other.get(GROUP) == stored
            assert stored.record == record_of_three()
            assert await other.groups() == [GROUP]

        self.play(scenario)

    def test_a_group_is_created_once(self) -> None:
        async def scenario(one: MetaStore, other: MetaStore) -> None:
            stored = done(await one.create(GROUP, record_of_three()))
            later = record_of_three()._replace(version=9)
            assert await other.create(GROUP, later) is WriteFailure.CONFLICT
            assert await one.get(GROUP) == stored

        self.play(scenario)

    def test_only_one_of_two_swaps_of_a_version_succeeds(self) -> None:
        async def scenario(one: MetaStore, other: MetaStore) -> None:
            base = done(await one.create(GROUP, record_of_three()))
            results = await asyncio.gather(
                one.swap(GROUP, attempt_no_change(base, "one")),
                other.swap(GROUP, attempt_no_change(base, "other")),
            )
            assert sorted(isinstance(each, StoredRecord) for each in results) == [False, True]
            assert WriteFailure.CONFLICT in results
            winner = "one" if isinstance(results[0], StoredRecord) else "other"
            found = await read(one)
            assert found.record == base.record._replace(write_id=winner)

        self.play(scenario)

    def test_a_swap_of_an_old_version_fails_even_with_equal_content(self) -> None:
        async def scenario(one: MetaStore, other: MetaStore) -> None:
            base = done(await one.create(GROUP, record_of_three()))
            done(await one.swap(GROUP, attempt_no_change(base, "first")))
            assert (
                await other.swap(GROUP, attempt_no_change(base, "first")) is WriteFailure.CONFLICT
            )

        self.play(scenario)

    def test_a_write_with_a_lost_answer_is_found_or_prevented(self) -> None:
        async def scenario(one: MetaStore, other: MetaStore) -> None:
            base = done(await one.create(GROUP, record_of_three()))
            made = attempt_write(
                base, base.record._replace(version=base.record.version + 1), "a lost answer"
            )
            call = asyncio.ensure_future(one.swap(GROUP, made))
            await asyncio.sleep(0)
            call.cancel()  # Like a time-out: the write may be in flight.
            with contextlib.suppress(asyncio.CancelledError):
                await call
            found = await read(one)
            while outcome_of(made, found) is WriteOutcome.PENDING:
                # The write may still arrive. A write without a change prevents it.
                await one.swap(GROUP, attempt_no_change(found, "an end"))
                found = await read(one)
            seen = outcome_of(made, found)
            assert seen in (WriteOutcome.APPLIED, WriteOutcome.OVERTAKEN)
            # From now on it cannot arrive.
            assert await other.swap(GROUP, made) is WriteFailure.CONFLICT

        self.play(scenario)

    def test_a_read_after_a_write_returns_it(self) -> None:
        async def scenario(one: MetaStore, other: MetaStore) -> None:
            stored = done(await one.create(GROUP, record_of_three()))
            for n in range(20):
                writer, reader = (one, other) if n % 2 else (other, one)
                stored = done(await writer.swap(GROUP, attempt_no_change(stored, f"write {n}")))
                assert await reader.get(GROUP) == stored

        self.play(scenario)

    def test_changes_yield_existing_groups_and_the_last_change(self) -> None:
        async def scenario(one: MetaStore, other: MetaStore) -> None:
            stored = done(await one.create(GROUP, record_of_three()))
            async with contextlib.aclosing(other.changes()) as changes:
                assert await anext(changes) == RecordChange(GROUP, stored)
                for n in range(5):
                    stored = done(await one.swap(GROUP, attempt_no_change(stored, f"write {n}")))
                # Changes in between may be missing, but not the last one.
                async for change in changes:
                    if change == RecordChange(GROUP, stored):
                        break
                await one.create("broker-1", record_of_three())
                async for change in changes:
                    if change.group == "broker-1":
                        break

        self.play(scenario)

    def test_a_lease_changes_its_holder_only_from_its_current_state(self) -> None:
        async def scenario(one: MetaStore, other: MetaStore) -> None:
            assert await one.read_lease("leader") is None
            held = leased(await one.write_lease("leader", None, "one"))
            assert await other.write_lease("leader", None, "other") is WriteFailure.CONFLICT
            seen = await other.read_lease("leader")
            assert seen == held
            assert held.holder == "one"
            renewed = leased(await one.write_lease("leader", held, "one"))
            assert renewed.renewals > held.renewals
            # It was renewed since, so this state is outdated.
            assert await other.write_lease("leader", seen, "other") is WriteFailure.CONFLICT
            released = leased(await one.write_lease("leader", renewed, ""))
            taken = leased(await other.write_lease("leader", released, "other"))
            assert (await one.read_lease("leader")) == taken
            assert taken.holder == "other"

        self.play(scenario)


def done(result: StoredRecord | WriteFailure) -> StoredRecord:
    """Return a stored record; fail if the write failed."""
    assert isinstance(result, StoredRecord)
    return result


def leased(result: LeaseSeen | WriteFailure) -> LeaseSeen:
    assert isinstance(result, LeaseSeen)
    return result


async def read(store: MetaStore) -> StoredRecord:
    found = await store.get(GROUP)
    assert found is not None
    return found
