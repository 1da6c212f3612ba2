"""Changes of the mode and of rights while clients send and receive through several proxies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.e2e.test_signed_clients import tidemill
from tests.support.clients.api import POLL_MS_MIN, Api, api, message
from tests.support.processes.processes import Standalone, standalone
from tests.support.worlds.access_world import signed
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

NAME = "shop-load"
CONNECTIONS = 6  # of one client: the kernel spreads them over the proxies
PROGRESS = 60  # messages that arrive between two changes


class Load:
    """Sends and deliveries, while the block runs."""

    def __init__(self) -> None:
        self.sent: set[bytes] = set()
        self.received: Counter[bytes] = Counter()
        self._progress = asyncio.Event()
        self._is_over = False

    async def send(self, client: Api, bodies: Callable[[], bytes]) -> None:
        """Send one message after the other. Raises AssertionError for a refused one."""
        while not self._is_over:
            body = bodies()
            answer = await client.send(message(NAME, body))
            assert answer.status.code == v2.OK, answer.status
            self.sent.add(body)

    async def consume(self, client: Api) -> None:
        """Receive and ack, until all messages have arrived."""
        while not self._is_over or self.received.keys() < self.sent:
            found = await client.receive(NAME, NAME, poll_ms=POLL_MS_MIN)
            handles = [one.system_properties.receipt_handle for one in found]
            if handles:
                acked = await client.ack(NAME, NAME, handles)
                assert acked.status.code == v2.OK, acked.status
            self.note(*[one.body for one in found])

    def note(self, *bodies: bytes) -> None:
        """Note received messages."""
        self.received.update(bodies)
        self._progress.set()

    async def wait_for_progress(self) -> None:
        """Wait until some more messages have arrived."""
        wanted = self.received.total() + PROGRESS
        while self.received.total() < wanted:
            self._progress.clear()
            await self._progress.wait()

    def end(self) -> None:
        """Let the senders end, and the consumers when all has arrived."""
        self._is_over = True


@contextlib.asynccontextmanager
async def connections(running: Standalone, user: str, secret: str) -> AsyncIterator[list[Api]]:
    async with contextlib.AsyncExitStack() as opened:
        headers = signed(user, secret)
        yield [
            await opened.enter_async_context(api(running.grpc, headers=headers))
            for _ in range(CONNECTIONS)
        ]


def create_user(running: Standalone, home: Path, name: str) -> str:
    """Create a user that sends and consumes; return its secret."""
    producer, consumer = f"--producer={NAME}", f"--consumer={NAME}:{NAME}"
    made = tidemill(running, home, "user", "create", name, producer, consumer)
    assert isinstance(made, dict)
    return str(made["secret"])


def test_changes_of_the_mode_fail_no_call_and_repeat_no_message(tmp_path: Path) -> None:
    with standalone(tmp_path / "data", "--proxies=2") as running:
        secret = create_user(running, tmp_path, "shop")
        tidemill(running, tmp_path, "topic", "create", NAME)
        tidemill(running, tmp_path, "group", "create", NAME)

        async def command(*arguments: str) -> None:
            await asyncio.to_thread(tidemill, running, tmp_path, "security", *arguments)

        async def scenario() -> Load:
            load, numbers = Load(), itertools.count()
            async with (
                connections(running, "shop", secret) as clients,
                asyncio.TaskGroup() as tasks,
            ):
                for client in clients[:3]:
                    tasks.create_task(load.send(client, lambda: b"m%d" % next(numbers)))
                for client in clients[3:]:
                    tasks.create_task(load.consume(client))
                disable = ["disable", "--yes"]
                for change in (["enable", "--permissive"], ["enable"], disable, ["enable"]):
                    await load.wait_for_progress()
                    await command(*change)
                await load.wait_for_progress()
                load.end()
            return load

        load = asyncio.run(asyncio.wait_for(scenario(), 120))
        assert load.received == Counter(load.sent)


@pytest.mark.parametrize("renews", [True, False])
def test_a_revoked_consumer_holds_nothing_and_others_get_its_messages(
    tmp_path: Path, renews: bool
) -> None:
    """The command returns when all proxies have applied the change."""
    with standalone(tmp_path / "data", "--proxies=3") as running:
        tidemill(running, tmp_path, "security", "enable")
        leaver, stayer = (create_user(running, tmp_path, name) for name in ("leaver", "stayer"))
        tidemill(running, tmp_path, "topic", "create", NAME)
        tidemill(running, tmp_path, "group", "create", NAME)
        revoke = ("acl", "revoke", "leaver", f"Topic:{NAME}", "Sub")

        async def scenario() -> None:
            load, numbers, held = Load(), itertools.count(), dict[bytes, str]()
            is_revoked = False

            async def hold(client: Api) -> None:
                """Receive as a consumer that acks nothing, until a poll is refused."""
                await client.heartbeat(NAME)
                while True:
                    was_revoked = is_revoked
                    try:
                        found = await client.receive(
                            NAME,
                            NAME,
                            poll_ms=POLL_MS_MIN,
                            invisible_ms=600_000,
                            batch_size=4,
                            renews=renews,
                        )
                    except AssertionError as error:
                        if "UNAUTHORIZED" in str(error):
                            return
                        raise
                    assert not was_revoked, "a poll after the change passed"
                    for one in found:
                        held[one.body] = one.system_properties.receipt_handle
                    load.note(*held)

            async with (
                connections(running, "leaver", leaver) as leaving,
                connections(running, "stayer", stayer) as staying,
                asyncio.TaskGroup() as tasks,
            ):
                for client in staying[:2]:
                    tasks.create_task(load.send(client, lambda: b"m%d" % next(numbers)))
                holding = [tasks.create_task(hold(client)) for client in leaving]
                await load.wait_for_progress()
                load.received.clear()
                for client in staying[2:]:
                    tasks.create_task(load.consume(client))
                await asyncio.to_thread(tidemill, running, tmp_path, *revoke)
                is_revoked = True
                await asyncio.gather(*holding)
                acked = await leaving[0].ack(NAME, NAME, list(held.values())[:1])
                assert acked.status.code == v2.INVALID_RECEIPT_HANDLE
                await load.wait_for_progress()
                load.end()
            assert held.keys() <= load.received.keys(), "the others got its messages"
            assert load.received.keys() == load.sent

        asyncio.run(asyncio.wait_for(scenario(), 120))
