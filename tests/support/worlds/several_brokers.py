"""A proxy's methods on several brokers in memory with one topic and one consumer group."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.worlds.memory_broker import MemoryBroker
from tests.support.worlds.memory_engine import NOW_MS
from tests.support.worlds.proxy_world import ProxyWorld, eventually, message
from tidemill.common.metrics import Registry
from tidemill.proxy.cluster.linked_group import LinkedGroup
from tidemill.proxy.polling_metrics import PollingMetrics
from tidemill.proxy.quotas.deliveries import DeliveryQuotas
from tidemill.proxy.server.producer import _encode
from tidemill.proxy.settings import ProxySettings


class SeveralBrokers(ProxyWorld):
    """The methods of a proxy and its brokers."""

    brokers: list[MemoryBroker]
    all_brokers: list[LinkedGroup]  # members and others

    @classmethod
    @contextlib.asynccontextmanager
    async def several(
        cls,
        count: int,
        *,
        is_ordered: bool = False,
        quotas: DeliveryQuotas | None = None,
        **options: int,
    ) -> AsyncIterator[SeveralBrokers]:
        """Connect a proxy with these settings to `count` brokers."""
        async with contextlib.AsyncExitStack() as stack:
            brokers = [
                await stack.enter_async_context(MemoryBroker().serving()) for _ in range(count)
            ]
            for n, broker in enumerate(brokers):
                broker.engine.catalog.broker_name = f"broker-{n}"
                # Both get the first ids at each broker, so all brokers agree on their incarnation.
                broker.put_topic("topic")
                broker.put_group("group", is_ordered=is_ordered)
            # The request timeout is longer than a test.
            values = {"brokers": [brokers[0].address], "request_timeout_ms": 60_000, **options}
            settings = ProxySettings.model_validate(values)
            world = cls(brokers[0], settings, quotas=quotas)
            world.brokers = brokers
            await stack.enter_async_context(world.cluster.running())
            await world.cluster.configured()
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            members = world.cluster._members
            runs = []
            for broker in brokers[1:]:
                link = members._open_link(broker.address)
                runs.append(tasks.create_task(link.run()))
                await link.configured.wait()
                group = LinkedGroup(link)
                group.is_member = True
                members.brokers.append(group)
                members.by_name[group.name] = group
            world.all_brokers = list(members.brokers)
            # The home broker lists no members. Its next list must not remove the brokers above.
            members.home.link.on_change = world.cluster._changed
            yield world
            for run in runs:
                run.cancel()

    def send(self, n: int, *texts: str) -> None:  # type: ignore[override]  # not through the proxy
        """Store messages at broker `n`."""
        engine = self.brokers[n].engine
        topic = engine.catalog.topics["topic"]
        for text in texts:
            data = _encode(message(text.encode()), self.cluster.find_topic("topic"), NOW_MS)
            engine.store_message(topic.id, 0, data)
        self.brokers[n]._rounds.do()

    def leave(self, n: int) -> None:
        """Remove a broker group from the members."""
        members, broker = self.cluster._members, self.all_brokers[n]
        broker.is_member = False
        members.brokers = [each for each in members.brokers if each is not broker]
        del members.by_name[broker.name]
        self.cluster._changed()

    def join(self, n: int) -> None:
        """Add a broker group to the members."""
        members, broker = self.cluster._members, self.all_brokers[n]
        broker.is_member = True
        members.brokers = [each for each in self.all_brokers if each.is_member]
        members.by_name[broker.name] = broker
        self.cluster._changed()

    async def until_asked(self, *, count: int = 1) -> None:
        """Wait until each broker has `count` open requests for hints."""

        def is_asked(broker: MemoryBroker) -> bool:
            return broker.count_of("notifications") >= count

        await eventually(lambda: all(map(is_asked, self.brokers)))

    def scrape(self) -> dict[str, dict[frozenset[str], float]]:
        """Return the non-zero samples of the polls by name and label values."""
        registry = Registry(cluster="c", node_type="proxy", node_id="p")
        PollingMetrics(registry, self.polling, self.cluster.knows)
        text = generate_latest(_RegistryAdapter(registry)).decode()
        common = {"cluster", "node_type", "node_id"}
        found: dict[str, dict[frozenset[str], float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = frozenset(v for k, v in sample.labels.items() if k not in common)
                if sample.value and "_bucket" not in sample.name:
                    found.setdefault(sample.name, {})[labels] = sample.value
        return found


class _RegistryAdapter:
    """An adapter from a registry to the text encoder."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Any:
        return self._registry.collect()


def run(
    scenario: Callable[[SeveralBrokers], Awaitable[None]],
    *,
    count: int = 3,
    is_ordered: bool = False,
) -> None:
    """Run `scenario` with a new proxy and `count` brokers."""

    async def main() -> None:
        async with (
            asyncio.timeout(20),
            SeveralBrokers.several(count, is_ordered=is_ordered) as world,
        ):
            await scenario(world)

    asyncio.run(main())
