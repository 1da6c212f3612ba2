"""The way of a check from the engine to a producer, through proxies that read, stall or end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any
from zlib import crc32

import pytest

from tests.support.bodies import text_of
from tests.support.worlds.engine_world import TOPIC, blob
from tests.support.worlds.round_world import RoundWorld, idle
from tidemill.broker.engine.layout.numbers import HalfId, QueueId
from tidemill.broker.engine.layout.transaction import TransactionState
from tidemill.broker.engine.transaction.transactions import HalfSender
from tidemill.broker.server.transactions import capacity
from tidemill.broker.server.transactions.check_back import CheckBack
from tidemill.broker.server.transactions.producers import Producers
from tidemill.common.errors import ProxyUnreachable
from tidemill.message import stored_message
from tidemill.message.client_key import ClientKey
from tidemill.message.transaction_id import TransactionSigner
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

A, B, C = ClientKey("a", 1), ClientKey("b", 2), ClientKey("c")
WRITTEN, BUSY, GONE = pb.CHECK_RESULT_WRITTEN, pb.CHECK_RESULT_BUSY, pb.CHECK_RESULT_GONE


class ScriptedProxy:
    """A proxy whose clients read their checks, or do not."""

    def __init__(self, producers: Producers, *clients: ClientKey, topic: str = TOPIC) -> None:
        self.checks: list[tuple[str, str]] = []  # client id and body
        self.results: dict[str, pb.CheckResult.ValueType] = {}
        self.is_reachable = True
        self.gate = asyncio.Event()
        self.gate.set()
        self.last = pb.CheckTransaction()
        self._producers = producers
        self.report(*clients, topics=[topic])

    def report(self, *clients: ClientKey, topics: list[str]) -> None:
        rows = [
            pb.PublishingClient(client_id=one.client_id, owner=one.owner, topics=topics)
            for one in clients
        ]
        self._producers.note(self, pb.ProducerReport(producers=rows))

    async def ask(self, question: pb.ProxyQuestion, timeout_ms: int) -> pb.ProxyAnswer:
        if not self.is_reachable:
            raise ProxyUnreachable(f"no answer within {timeout_ms} ms")
        check = question.check
        self.last = check
        result = self.results.get(check.client_id, WRITTEN)
        self.checks.append((check.client_id, text_of(check.blob)))
        await self.gate.wait()
        return pb.ProxyAnswer(checked=pb.CheckedTransaction(result=result))


class CheckWorld(RoundWorld):
    """A broker with half messages and their checks."""

    def __init__(self, *, per_s: int = 1_000) -> None:
        super().__init__()
        self.world.topic("others")
        self.producers = Producers()
        self.check_back = CheckBack(
            self.rounds, self.producers, per_s=per_s, monotonic_ms=self.clock.monotonic_ms
        )

    @contextlib.asynccontextmanager
    async def checking(self) -> AsyncIterator[None]:
        async with self.running(), self.check_back.running():
            yield

    async def half(self, text: str, sender: ClientKey = A, *, topic: str = TOPIC) -> HalfId:
        data = blob(text, kind=stored_message.TYPE_TRANSACTION)
        half_id, _ = await self.rounds.call(
            lambda engine, turn: engine.commands.send(
                engine.catalog.topic_ids[topic],
                QueueId(0),
                data,
                crc32(data),
                now_ms=turn.now_ms,
                firing_ms=turn.firing_ms,
                sender=HalfSender(sender, 1_000),
            )
        )
        return HalfId(half_id)

    async def pass_time(self, by_ms: int) -> None:
        """Let time pass in steps, with everything that becomes due."""
        for _ in range(0, by_ms, 100):
            self.advance(100)
            await idle()

    def checks_of(self, half_id: HalfId) -> int:
        return self.rounds.engine.transactions.status(half_id).checks


def run(scenario: Callable[[CheckWorld], Coroutine[Any, Any, None]], **options: int) -> None:
    async def main() -> None:
        world = CheckWorld(**options)
        async with asyncio.timeout(60), world.checking():
            await scenario(world)

    asyncio.run(main())


def test_the_sender_gets_the_check_first_and_it_counts() -> None:
    async def scenario(world: CheckWorld) -> None:
        proxy = ScriptedProxy(world.producers, B, A)
        half_id = await world.half("m")
        await world.pass_time(1_200)
        assert proxy.checks == [("a", "m")]
        assert world.checks_of(half_id) == 1
        catalog = world.rounds.engine.catalog
        signer = TransactionSigner(catalog.handle_secret, catalog.broker_name)
        assert signer.open(proxy.last.transaction_id, TOPIC, "id-m") == half_id
        assert proxy.last.owner == 1
        await world.pass_time(30_000)
        assert world.checks_of(half_id) == 2

    run(scenario)


def test_other_producers_get_the_checks_of_a_lost_sender_in_turn() -> None:
    async def scenario(world: CheckWorld) -> None:
        first, second = ScriptedProxy(world.producers, B), ScriptedProxy(world.producers, C)
        for n in range(4):
            await world.half(f"m{n}")
        await world.pass_time(1_200)
        assert (len(first.checks), len(second.checks)) == (2, 2)

    run(scenario)


def test_a_check_on_a_stalled_stream_is_not_counted() -> None:
    async def scenario(world: CheckWorld) -> None:
        proxy = ScriptedProxy(world.producers, A, B)
        proxy.results = {"a": BUSY, "b": GONE}
        half_id = await world.half("m")
        await world.pass_time(1_200)
        assert [client for client, _ in proxy.checks] == ["a", "b"], "each producer is tried"
        assert world.checks_of(half_id) == 0
        proxy.results = {}
        await world.pass_time(1_200)
        assert world.checks_of(half_id) == 1
        results = {name: count for (_, name), count in world.check_back.results.items()}
        assert results == {"busy": 1, "gone": 1, "written": 1}

    run(scenario)


def test_a_check_through_an_unreachable_proxy_is_not_counted() -> None:
    async def scenario(world: CheckWorld) -> None:
        proxy = ScriptedProxy(world.producers, A)
        proxy.is_reachable = False
        half_id = await world.half("m")
        await world.pass_time(2_000)
        assert world.checks_of(half_id) == 0
        world.producers.forget(proxy)
        ScriptedProxy(world.producers, B)
        await world.pass_time(1_500)
        assert world.checks_of(half_id) == 1

    run(scenario)


def test_a_half_message_waits_for_a_producer_of_its_topic() -> None:
    async def scenario(world: CheckWorld) -> None:
        other = ScriptedProxy(world.producers, A, topic="another")
        half_id = await world.half("m")
        await world.pass_time(120_000)
        assert (other.checks, world.checks_of(half_id)) == ([], 0)
        engine = world.rounds.engine
        assert not engine.half_checks.due
        assert engine.half_checks.unlisted == {world.topic_id}
        assert engine.half_checks.next_due_ms() is None, "a half message that waits has no timer"
        other.report(A, topics=["another", TOPIC])
        await world.pass_time(300)
        assert other.checks == [("a", "m")]
        assert not engine.half_checks.unlisted

    run(scenario)


def test_a_client_has_few_checks_without_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "UNANSWERED_MAX", 3)

    async def scenario(world: CheckWorld) -> None:
        proxy = ScriptedProxy(world.producers, A)
        half_ids = [await world.half(f"m{n}") for n in range(6)]
        await world.pass_time(2_000)
        assert len(proxy.checks) == 3
        asked = {body for _, body in proxy.checks}
        decided = next(one for n, one in enumerate(half_ids) if f"m{n}" in asked)
        await world.rounds.call(
            lambda engine, turn: engine.transactions.commit(
                decided, now_ms=turn.now_ms, firing_ms=turn.firing_ms
            )
        )
        unsure = next(one for n, one in enumerate(half_ids) if f"m{n}" in asked and one != decided)
        await world.rounds.call(lambda engine, _: engine.transactions.note_unsure(unsure))
        await world.pass_time(500)
        assert len(proxy.checks) == 5, "each answer makes room for one"
        assert sum(map(world.checks_of, set(half_ids) - {decided})) == 4

    run(scenario)


def test_a_half_message_without_an_answer_expires() -> None:
    async def scenario(world: CheckWorld) -> None:
        ScriptedProxy(world.producers, A)
        half_id = await world.half("m")
        await world.pass_time(1_000 + 16 * 31_000)
        engine = world.rounds.engine
        assert engine.transactions.status(half_id).state is TransactionState.EXPIRED
        assert engine.half_checks.next_due_ms() is None

    run(scenario)


def test_a_silent_producer_delays_no_other_topic() -> None:
    async def scenario(world: CheckWorld) -> None:
        silent = ScriptedProxy(world.producers, A)
        other = ScriptedProxy(world.producers, B, topic="others")
        for n in range(300):
            await world.half(f"m{n}")
        await world.pass_time(2_000)
        assert len(silent.checks) == capacity.UNANSWERED_MAX
        await world.half("urgent", B, topic="others")
        await world.pass_time(1_300)
        assert other.checks == [("b", "urgent")]

    run(scenario)


def test_a_stalled_producer_delays_no_other_topic() -> None:
    async def scenario(world: CheckWorld) -> None:
        stalled = ScriptedProxy(world.producers, A)
        other = ScriptedProxy(world.producers, B, topic="others")
        stalled.gate.clear()
        for n in range(100):
            await world.half(f"m{n}")
        await world.pass_time(1_500)
        assert len(stalled.checks) == capacity.UNDERWAY_OF_A_PRODUCER_MAX
        await world.half("urgent", B, topic="others")
        await world.pass_time(1_300)
        assert other.checks == [("b", "urgent")]
        stalled.gate.set()

    run(scenario)


def test_a_check_that_was_written_during_a_slow_sync_is_counted() -> None:
    async def scenario(world: CheckWorld) -> None:
        proxies = [ScriptedProxy(world.producers, ClientKey(f"c{n}")) for n in range(8)]
        half_ids = [await world.half(f"m{n}") for n in range(30)]
        for proxy in proxies:
            proxy.gate.clear()
        await world.pass_time(1_200)
        world.syncs.gate.clear()
        for proxy in proxies:
            proxy.gate.set()
        await idle()
        world.syncs.gate.set()
        await world.pass_time(1_000)
        assert {world.checks_of(one) for one in half_ids} == {1}

    run(scenario)


def test_clients_that_never_answer_are_forgotten() -> None:
    async def scenario(world: CheckWorld) -> None:
        proxy = ScriptedProxy(world.producers, A)
        for n in range(20):
            client = ClientKey(f"client-{n}")
            proxy.report(client, topics=[TOPIC])
            await world.half(f"m{n}", client)
            await world.pass_time(1_200)
            proxy.report(client, topics=[])
        known = world.check_back._capacity
        assert len(known._unanswered) > 1
        await world.pass_time(40_000)
        assert set(known._unanswered) <= {A}
        assert len(known._written) <= 20

    run(scenario)
