"""Money transfers with transactions, while processes are killed.

A row in a database and a half message belong together: the producer writes the row in its local
transaction, commits after it, and its checker looks at the row. Each row must be delivered once,
and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
from collections import Counter
from functools import partial
from pathlib import Path

import grpc
import pytest

from tests.support.clients.api import Api, api
from tests.support.clients.pulling import PullClient
from tests.support.clients.transactions import (
    checking_producer,
    end_transaction,
    half_message,
    send_half,
)
from tests.support.eventually import eventually
from tests.support.processes.killing import kill_and_note, until
from tests.support.processes.processes import Standalone, standalone
from tests.support.seeds import seed_base
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

pytestmark = pytest.mark.heavy

TOPIC, QUEUES = "ledger", 4
ACCOUNTS, START_BALANCE = 100, 1_000
PRODUCERS, TRANSFERS = 4, 150  # transfers of each producer
KILLS = ("broker-0", "proxy-0", "broker-0", "proxy-1", "broker-0")
CALL_S = 5.0
SETTLE_S = 240.0
SEED = seed_base()
# The outcome of a call is unknown, so the caller tries again or leaves it to the checker.
_LOST = (grpc.aio.AioRpcError, AssertionError, TimeoutError)


class Ledger:
    """The accounts and the transfers of the producers."""

    def __init__(self, file: Path) -> None:
        self._database = sqlite3.connect(file, isolation_level=None)
        self._database.execute("create table account (id integer primary key, balance integer)")
        self._database.execute("create table transfer (id text primary key)")
        rows = [(one, START_BALANCE) for one in range(ACCOUNTS)]
        self._database.executemany("insert into account values (?, ?)", rows)

    def transfer(self, name: str, source: int, target: int) -> None:
        """Move money and write the row of the transfer, in one local transaction."""
        self._database.execute("begin")
        for account, change in ((source, -1), (target, 1)):
            self._database.execute(
                "update account set balance = balance + ? where id = ?", (change, account)
            )
        self._database.execute("insert into transfer values (?)", (name,))
        self._database.execute("commit")

    def has(self, name: str) -> bool:
        found = self._database.execute("select 1 from transfer where id = ?", (name,))
        return found.fetchone() is not None

    def names(self) -> set[str]:
        return {name for (name,) in self._database.execute("select id from transfer")}

    def total(self) -> int:
        (total,) = self._database.execute("select sum(balance) from account").fetchone()
        return int(total)


class Transfers:
    """The work of the producers, and what became of it."""

    def __init__(self, running: Standalone, ledger: Ledger, rng: random.Random) -> None:
        self._running = running
        self._ledger = ledger
        self._rng = rng
        self.started = 0
        self.outcomes: Counter[str] = Counter()

    def has_started(self, count: int) -> bool:
        """Whether so many transfers have begun."""
        return self.started >= count

    async def produce(self, number: int) -> None:
        """Make transfers; some are rolled back, and some are left without a decision."""
        async with api(self._running.grpc, call_s=CALL_S) as client:
            for n in range(TRANSFERS):
                name = f"{number}-{n}"
                half = half_message(TOPIC, name.encode(), first_check_ms=1_000)
                half.system_properties.message_id = name
                self.started += 1
                try:
                    transaction_id = await send_half(client, half)
                except _LOST:
                    self.outcomes["send lost"] += 1
                    continue
                way = self._rng.choices(("commit", "roll back", "forget"), weights=(70, 15, 15))[0]
                if way == "roll back":
                    await self._decide(client, half, transaction_id, v2.ROLLBACK)
                    continue
                self._ledger.transfer(name, *self._rng.sample(range(ACCOUNTS), 2))
                if way == "commit":
                    await self._decide(client, half, transaction_id, v2.COMMIT)
                else:
                    self.outcomes["forgotten"] += 1

    async def _decide(
        self,
        client: Api,
        half: v2.Message,
        transaction_id: str,
        resolution: v2.TransactionResolution.ValueType,
    ) -> None:
        """Decide until there is an answer."""
        for _ in range(20):
            with contextlib.suppress(*_LOST):
                status = await end_transaction(client, half, transaction_id, resolution)
                if status.code == v2.OK:
                    self.outcomes["decided"] += 1
                    return
                assert status.code != v2.INVALID_TRANSACTION_ID, status
            await asyncio.sleep(0.2)
        self.outcomes["decision lost"] += 1

    async def check(self) -> None:
        """Answer checks from the rows, with a new stream after each loss, until cancelled."""
        while True:
            with contextlib.suppress(*_LOST):
                async with (
                    api(self._running.grpc, call_s=CALL_S) as client,
                    checking_producer(client, [TOPIC], client_id="checker") as producer,
                ):
                    while True:
                        check = await producer.next_check()
                        name = check.message.body.decode()
                        way = v2.COMMIT if self._ledger.has(name) else v2.ROLLBACK
                        await end_transaction(client, check.message, check.transaction_id, way)
                        self.outcomes["checked"] += 1
            await asyncio.sleep(0.2)


def test_each_transfer_is_delivered_once_and_nothing_else(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    ledger = Ledger(tmp_path / "ledger.db")
    with standalone(tmp_path / "data", "--proxies=2") as running:
        running.put(f"topics/{TOPIC}", messageType="TRANSACTION", queues=QUEUES)
        transfers = Transfers(running, ledger, rng)

        async def run() -> list[str]:
            checker = asyncio.create_task(transfers.check())
            producers = [
                asyncio.create_task(transfers.produce(number)) for number in range(PRODUCERS)
            ]
            part = PRODUCERS * TRANSFERS // (len(KILLS) + 1)
            for number, name in enumerate(KILLS, 1):
                await until(partial(transfers.has_started, number * part))
                await kill_and_note(running, name)
            await asyncio.gather(*producers)
            expected = ledger.names()
            received: list[str] = []
            async with asyncio.timeout(SETTLE_S):
                while not set(received) >= expected:
                    with contextlib.suppress(grpc.RpcError):
                        received = await asyncio.to_thread(pull_all, running.grpc)
                    await asyncio.sleep(0.5)
            checker.cancel()
            return received

        received = asyncio.run(run())
        counts = f"seed {SEED}: {dict(transfers.outcomes)}"
        assert Counter(received) == Counter(ledger.names()), counts
        assert ledger.total() == ACCOUNTS * START_BALANCE
        assert transfers.outcomes["checked"] >= transfers.outcomes["forgotten"] > 0, counts
        eventually(lambda: running.log.read_text().count("Traceback") == 0)


def pull_all(endpoint: str) -> list[str]:
    """Return the bodies of all messages of the topic, each as often as it is in the log."""
    bodies: list[str] = []
    with grpc.insecure_channel(endpoint) as channel:
        client = PullClient(channel)
        for queue_id in range(QUEUES):
            offset = 0
            while (answer := client.pull(TOPIC, offset, queue_id=queue_id)).messages:
                assert answer.code == v2.OK, answer
                bodies += [body.decode() for body in answer.bodies]
                offset = answer.next_offset
    return bodies
