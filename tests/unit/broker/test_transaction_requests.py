"""Transactions through the admin calls of a broker: pages, decisions, checks and recoveries."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.support.audit_changes import records_of
from tests.support.worlds.engine_world import TOPIC
from tests.support.worlds.round_world import RoundWorld
from tests.support.worlds.transaction_world import TransactionWorld
from tidemill.broker.engine.metadata.transaction_policy import PolicyChange
from tidemill.broker.server.admin.transactions import SHOWN_MAX, TransactionAdmin
from tidemill.broker.server.round.rpc import ERROR_KEY
from tidemill.broker.server.transactions.producers import Producers
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.grpc.status import RpcError

FAST = PolicyChange(first_check_ms=1_000, period_ms=1_000, attempts=1)
SHORT_MS = 1_100  # more than each time of FAST
COMMIT, ROLL_BACK = pb.TRANSACTION_ACTION_COMMIT, pb.TRANSACTION_ACTION_ROLL_BACK
CHECK, RECOVER = pb.TRANSACTION_ACTION_CHECK, pb.TRANSACTION_ACTION_RECOVER
AUTHOR = pb.ChangeAuthor(user="ops", call="POST /transactions/{transaction_id}:x", action="Update")


class Proxy:
    """A proxy that no check reaches."""

    async def ask(self, question: pb.ProxyQuestion, timeout_ms: int) -> pb.ProxyAnswer:
        raise AssertionError((question, timeout_ms))


class TransactionRounds(RoundWorld):
    """A broker in memory, with half messages."""

    world_type = TransactionWorld


class AdminWorld:
    """A broker with half messages, and its admin calls."""

    def __init__(self) -> None:
        self.shell = TransactionRounds()
        world = self.shell.world
        assert isinstance(world, TransactionWorld)
        self.world = world
        self.producers = Producers()
        self.admin = TransactionAdmin(self.shell.rounds, self.producers)

    def expire(self, *texts: str, topic: str = TOPIC) -> None:
        """Send half messages that expire."""
        world = self.world
        world.topic(topic)
        world.set_policy(FAST, topic=topic)
        for text in texts:
            world.half(text, topic=topic)
        world.advance(SHORT_MS)
        world.write_checks()
        world.advance(SHORT_MS)
        world.run_due()

    async def find(self, **fields: Any) -> pb.ListTransactionsReply:
        request = pb.ListTransactionsRequest(page_size=100)
        request.MergeFrom(pb.ListTransactionsRequest(**fields))
        return await self.admin.ListTransactions(request)

    async def change(
        self, id_: str, action: pb.TransactionAction.ValueType, *, is_dry: bool = False
    ) -> pb.ChangeTransactionReply:
        request = pb.ChangeTransactionRequest(
            transaction_id=id_, action=action, dry_run=is_dry, audit=AUTHOR
        )
        return await self.admin.ChangeTransaction(request)

    def audited(self) -> list[dict[str, Any]]:
        return records_of(self.world.engine)


def in_world(scenario: Callable[[AdminWorld], Awaitable[None]], *, prepare: object = None) -> None:
    async def main() -> None:
        world = AdminWorld()
        if callable(prepare):
            prepare(world)
        world.shell.clock.advance(max(world.world.now_ms - world.shell.clock.wall_ms(), 0))
        async with asyncio.timeout(20), world.shell.running():
            await scenario(world)

    asyncio.run(main())


async def error_of(call: Awaitable[object]) -> str:
    """Return the name of the error that a call raises."""
    with pytest.raises(RpcError) as raised:
        await call
    return dict(raised.value.trailers)[ERROR_KEY]


def ids(found: pb.ListTransactionsReply) -> list[str]:
    return [one.message_id for one in found.transactions]


def test_pages_contain_each_transaction_once_and_the_oldest_first() -> None:
    def prepare(world: AdminWorld) -> None:
        world.expire("a", "b", topic="other")
        for text in "cdefg":
            world.world.half(text)

    async def scenario(world: AdminWorld) -> None:
        seen: list[str] = []
        request: dict[str, int] = {}
        while True:
            page = await world.find(page_size=3, **request)
            assert len(page.transactions) <= 3
            seen += ids(page)
            if not page.has_more:
                break
            request["after_half_id"] = page.transactions[-1].half_id
        assert seen == [f"id-{text}" for text in "abcdefg"]
        assert ids(await world.find(topic="other")) == ["id-a", "id-b"]
        assert ids(await world.find(state=pb.TRANSACTION_STATE_OPEN)) == [
            f"id-{text}" for text in "cdefg"
        ]
        assert ids(await world.find(state=pb.TRANSACTION_STATE_EXPIRED)) == ["id-a", "id-b"]
        assert ids(await world.find(older_than_ms=SHORT_MS)) == ["id-a", "id-b"]
        listed = (await world.find()).transactions[-1]
        assert listed.client_id == "producer-1"
        assert listed.sent_at_ms == world.world.now_ms
        assert (listed.checks, listed.checks_max) == (0, 15)
        assert (
            await world.admin.GetTransaction(
                pb.GetTransactionRequest(transaction_id=listed.transaction_id)
            )
            == listed
        )
        for wrong in ({"page_size": 1_001}, {"state": pb.TRANSACTION_STATE_COMMITTED}):
            assert await error_of(world.find(**wrong)) == "BadRequest"
        assert await error_of(world.find(topic="none")) == "TopicNotFound"

    in_world(scenario, prepare=prepare)


def test_a_decision_of_an_operator_is_final_and_a_repeated_one_changes_nothing() -> None:
    def prepare(world: AdminWorld) -> None:
        for text in "ab":
            world.world.half(text)

    async def scenario(world: AdminWorld) -> None:
        first, second = (one.transaction_id for one in (await world.find()).transactions)
        planned = await world.change(first, COMMIT, is_dry=True)
        assert planned.after.state == pb.TRANSACTION_STATE_OPEN
        assert world.audited() == []
        for _ in range(2):
            done = await world.change(first, COMMIT)
            assert done.after.state == pb.TRANSACTION_STATE_COMMITTED
            done = await world.change(second, ROLL_BACK)
            assert done.after.state == pb.TRANSACTION_STATE_ROLLED_BACK
        assert done.after.message_id == "id-b"
        assert done.after.sent_at_ms
        for is_dry in (True, False):
            wrong = world.change(first, ROLL_BACK, is_dry=is_dry)
            assert await error_of(wrong) == "InvalidTransactionId"
            assert await error_of(world.change(second, CHECK, is_dry=is_dry)) == "Conflict"
            assert await error_of(world.change(second, RECOVER, is_dry=is_dry)) == "Conflict"
        commit, roll_back = world.audited()
        assert (commit["before"], commit["after"]) == ({"state": "OPEN"}, {"state": "COMMITTED"})
        assert roll_back["after"] == {"state": "ROLLED_BACK"}
        assert (await world.find()).transactions == []

    in_world(scenario, prepare=prepare)


def test_a_wrong_transaction_id_is_unknown() -> None:
    def prepare(world: AdminWorld) -> None:
        world.world.half("a")

    async def scenario(world: AdminWorld) -> None:
        (known,) = (one.transaction_id for one in (await world.find()).transactions)
        last = "A" if known[-1] != "A" else "Q"
        for wrong in ("", "x", known[:-2] + "AA", known[:-1] + last, "A" * 26):
            if wrong != known:
                assert await error_of(world.change(wrong, COMMIT)) == "TransactionNotFound"
        assert len((await world.find()).transactions) == 1

    in_world(scenario, prepare=prepare)


def test_a_check_of_an_operator_is_due_at_once_and_is_audited() -> None:
    def prepare(world: AdminWorld) -> None:
        world.world.half("a")

    async def scenario(world: AdminWorld) -> None:
        (known,) = (one.transaction_id for one in (await world.find()).transactions)
        assert not (await world.change(known, CHECK, is_dry=True)).has_producer
        assert world.world.engine.half_checks.due == {}
        report = pb.ProducerReport(producers=[pb.PublishingClient(client_id="p", topics=[TOPIC])])
        world.producers.note(Proxy(), report)
        done = await world.change(known, CHECK)
        assert done.has_producer
        due = world.world.engine.half_checks.due
        assert [list(line) for line in due.values()] == [[done.before.half_id]]
        (record,) = world.audited()
        assert record["after"] == {"checkRequested": True}

    in_world(scenario, prepare=prepare)


def test_a_recovered_transaction_has_a_new_id_and_the_old_one_is_marked() -> None:
    async def scenario(world: AdminWorld) -> None:
        (old,) = (await world.find(state=pb.TRANSACTION_STATE_EXPIRED)).transactions
        assert (await world.change(old.transaction_id, RECOVER, is_dry=True)).before == old
        done = await world.change(old.transaction_id, RECOVER)
        assert done.after.state == pb.TRANSACTION_STATE_RECOVERED
        assert done.recovered.state == pb.TRANSACTION_STATE_OPEN
        assert done.recovered.message_id == "id-a"
        assert done.recovered.checks == 0
        (marked,) = (await world.find(state=pb.TRANSACTION_STATE_EXPIRED)).transactions
        assert marked.state == pb.TRANSACTION_STATE_RECOVERED
        assert await error_of(world.change(old.transaction_id, RECOVER)) == "Conflict"
        again = await world.change(done.recovered.transaction_id, COMMIT)
        assert again.after.state == pb.TRANSACTION_STATE_COMMITTED
        assert len(world.audited()) == 2

    in_world(scenario, prepare=lambda world: world.expire("a"))


def test_two_recoveries_at_once_open_one_half_message() -> None:
    async def scenario(world: AdminWorld) -> None:
        (old,) = (await world.find()).transactions
        calls = [world.change(old.transaction_id, RECOVER) for _ in range(2)]
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(one, RpcError) for one in done] == [False, True]
        assert world.world.engine.transaction_table.open_count == 1

    in_world(scenario, prepare=lambda world: world.expire("a"))


def test_expired_transactions_of_a_topic_are_recovered_up_to_a_limit() -> None:
    names = [f"m{n}" for n in range(SHOWN_MAX + 10)]

    def prepare(world: AdminWorld) -> None:
        world.expire(*names)
        world.expire("other", topic="other")

    async def scenario(world: AdminWorld) -> None:
        request = pb.RecoverTransactionsRequest(topic=TOPIC, limit=25, dry_run=True, audit=AUTHOR)
        planned = await world.admin.RecoverTransactions(request)
        assert (planned.count, planned.has_more) == (25, True)
        shown = [one.message_id for one in planned.transactions]
        assert shown == [f"id-{name}" for name in names[:SHOWN_MAX]]
        assert world.world.engine.transaction_table.open_count == 0
        request.dry_run = False
        counts = [(await world.admin.RecoverTransactions(request)).count for _ in range(3)]
        assert counts == [25, 5, 0]
        assert world.world.engine.transaction_table.open_count == len(names)
        records = world.audited()
        assert len(records) == 2
        assert records[0]["after"]["state"] == "RECOVERED"
        none = pb.RecoverTransactionsRequest(topic="none", limit=1)
        assert await error_of(world.admin.RecoverTransactions(none)) == "TopicNotFound"

    in_world(scenario, prepare=prepare)


def test_an_expired_transaction_of_a_deleted_topic_keeps_the_name_of_its_topic() -> None:
    def prepare(world: AdminWorld) -> None:
        world.expire("a", topic="gone")
        world.world.engine.administration.delete_topic("gone", world.world.now_ms)
        world.world.commit()

    async def scenario(world: AdminWorld) -> None:
        (found,) = (await world.find()).transactions
        assert (found.topic, found.is_topic_deleted) == ("gone", True)
        assert await error_of(world.change(found.transaction_id, RECOVER)) == "Conflict"

    in_world(scenario, prepare=prepare)
