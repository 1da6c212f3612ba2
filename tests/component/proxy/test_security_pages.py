"""Security items on the link: the proxy is ready when it has the whole table."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.security_items import MODE_ON, delete, put
from tests.support.worlds.memory_broker import MemoryBroker
from tests.support.worlds.proxy_world import ProxyWorld, eventually, message
from tidemill.broker.server.wire import security_frames
from tidemill.proxy.settings import ProxySettings
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

USERS = [put(f"user {n}", "x" * 100) for n in range(50)]


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security_frames, "PAGE_BYTES", 1_000)


def has_table(world: ProxyWorld, broker: MemoryBroker) -> bool:
    security = world.link.configuration.security
    table = broker.engine.catalog.security
    return security.items == table.items and security.version == table.version


def test_a_proxy_is_ready_when_it_has_all_items() -> None:
    async def main() -> None:
        async with asyncio.timeout(20), MemoryBroker().serving() as broker:
            broker.put_security_items(*USERS, MODE_ON)
            broker.may_page.clear()
            world = ProxyWorld(broker, ProxySettings(brokers=[broker.address]))
            async with world.cluster.running():
                await eventually(lambda: bool(world.link.configuration.broker_name))
                assert not world.link.configured.is_set()
                assert world.link.state().word == "down"
                broker.put_security_items(put("user 1", "new"), delete("user 2"), put("more"))
                broker.may_page.set()
                await world.cluster.configured()
                assert has_table(world, broker)
                assert world.link.is_connected
                broker.put_security_items(put("user 3", "new"), delete("user 4"))
                await eventually(lambda: has_table(world, broker))

    asyncio.run(main())


def test_a_reconnected_proxy_goes_on_with_the_items_that_it_had() -> None:
    async def main() -> None:
        async with asyncio.timeout(20), MemoryBroker().serving() as broker:
            broker.put_security_items(*USERS)
            async with ProxyWorld.open(broker) as world:
                assert has_table(world, broker)
                before = dict(world.link.configuration.security.items)
                broker.go()
                await eventually(lambda: not world.link.is_connected)
                broker.may_page.clear()
                broker.put_security_items(delete("user 1"))
                broker.is_up.set()
                assert (await world.send(message(b"a"))).status.code == v2.OK
                assert world.link.configuration.security.items == before
                broker.may_page.set()
                await eventually(lambda: has_table(world, broker))

    asyncio.run(main())


def test_a_replaced_store_is_used_when_its_items_are_known() -> None:
    async def main() -> None:
        async with asyncio.timeout(20), MemoryBroker().serving() as broker:
            broker.put_security_items(*USERS)
            async with ProxyWorld.open(broker) as world:
                broker.go()
                await eventually(lambda: not world.link.is_connected)
                broker.engine.catalog.handle_secret = bytes(32)
                broker.may_page.clear()
                broker.is_up.set()
                security = world.link.configuration.security
                await eventually(lambda: not security.is_complete)
                assert world.link.state().word == "down"
                assert security.items, "calls are checked against the former users"
                broker.may_page.set()
                await eventually(lambda: world.link.is_connected)
                assert has_table(world, broker)

    asyncio.run(main())
