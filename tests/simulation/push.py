"""Push consumers that process messages for minutes while proxies, links and the broker fail.

A consumer has a new client id for each life and sends heartbeats to any proxy. It often dies while
it processes messages, with or without a notice. While it lives, no other consumer may receive its
messages. After its death another consumer must receive them.

A broker extends a delivery only after a proxy has reported its receipt. So two cases are excused: a
receive within a moment of a failure, because a proxy reports after a tenth of a second; and a
delivery that the proxy could not report before the broker restarted, because the proxy died.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from random import Random

from tests.simulation.clients import POLL_MS, CallBroken, Client, Subscription, ack, produce
from tests.simulation.loop import simulate
from tests.simulation.network import Network
from tests.simulation.processes import Broker, Proxy
from tests.simulation.run import Run
from tests.support.worlds.proxy_world import receive_request
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

TROUBLE_S = 600.0  # of virtual time: several lives of a consumer
DRAIN_S_MAX = 30_000.0  # far more than a few deaths in a row cost
EXCUSED_S = 3.0  # around a failure; a proxy loses a link seconds before its broker notices
FIRST_S = 60.0  # the invisible duration of a delivery before its first extension
CONSUMERS = 3  # of each kind
WORK_S = (0.1, 5.0, 70.0, 130.0, 400.0)  # from the first minute to the third extension
HEARTBEAT_S = 10.0
DEATHS_PART = 0.2  # the share of messages whose consumer dies
LOOK_S = 1.0


class HeldMessages:
    """The messages that living consumers process."""

    def __init__(self) -> None:
        self.findings: list[str] = []
        self.longest_s = 0.0
        self.deaths = 0
        self._held: dict[str, tuple[str, float]] = {}  # by key: the consumer, and since when
        self._failures_s: list[float] = []
        self._starts_s: list[float] = []
        self._proxy_deaths_s: list[float] = []

    def record_failure(self, now_s: float, kind: str) -> None:
        """Record the failure of a proxy, a link or the broker."""
        self._failures_s.append(now_s)
        if kind == "proxy":
            self._proxy_deaths_s.append(now_s)
        elif kind != "link":
            self._starts_s.append(now_s)

    def _is_excused(self, since_s: float) -> bool:
        if any(abs(at_s - since_s) < EXCUSED_S for at_s in self._failures_s):
            return True
        return any(
            0 <= start_s - since_s < FIRST_S
            and any(since_s <= death_s <= start_s + EXCUSED_S for death_s in self._proxy_deaths_s)
            for start_s in self._starts_s
        )

    def record_receive(self, key: str, name: str, now_s: float) -> None:
        """Record a delivery; it is a finding if a living consumer has the message."""
        if key in self._held:
            holder, since_s = self._held[key]
            if not self._is_excused(since_s):
                self.findings.append(
                    f"{now_s:.3f} s: {name} received {key}, which {holder} has since {since_s:.3f}"
                )
        self._held[key] = name, now_s

    def record_release(self, key: str, name: str) -> None:
        """Record that a consumer acks a message or dies."""
        if self._held.get(key, ("", 0.0))[0] == name:
            del self._held[key]


async def push_consume(client: Client, subscription: Subscription, held: HeldMessages) -> None:
    """Consume in one life after another."""
    name = client.name
    for life in itertools.count():
        client.name = f"{name}-{life}"
        beating = asyncio.ensure_future(_beat(client))
        try:
            await _live(client, subscription, held)
        finally:
            beating.cancel()
            await asyncio.wait([beating])
        held.deaths += 1
        if client.random.random() < 0.5:
            await _end(client, subscription)


async def _end(client: Client, subscription: Subscription) -> None:
    """Report the end of a client."""
    request = service.NotifyClientTerminationRequest(group=v2.Resource(name=subscription.group))
    with contextlib.suppress(CallBroken):
        await client.call(
            "NotifyClientTermination", request, service.NotifyClientTerminationResponse
        )


async def _beat(client: Client) -> None:
    request = service.HeartbeatRequest(client_type=v2.PUSH_CONSUMER)
    while True:
        with contextlib.suppress(CallBroken):
            await client.call("Heartbeat", request, service.HeartbeatResponse)
        await asyncio.sleep(HEARTBEAT_S)


async def _live(client: Client, subscription: Subscription, held: HeldMessages) -> None:
    """Receive and process messages until the consumer dies."""
    random, loop = client.random, asyncio.get_running_loop()
    request = receive_request(subscription.topic, subscription.group, poll_ms=POLL_MS, batch_size=3)
    request.ClearField("invisible_duration")
    request.auto_renew = True
    while True:
        await asyncio.sleep(random.expovariate(20))
        try:
            messages = await client.receive(request)
        except CallBroken:
            continue
        began_s = loop.time()
        keys = subscription.received(messages)
        for key in keys:
            held.record_receive(key, client.name, began_s)
        if not keys:
            continue
        await asyncio.sleep(random.choice(WORK_S))
        is_dead = random.random() < DEATHS_PART
        for key in keys:
            # This comes before the ack: from then on the outcome of the ack decides.
            held.record_release(key, client.name)
        handles = [one.system_properties.receipt_handle for one in messages]
        if is_dead:
            if random.random() < 0.5:
                # Acks under way overtake nothing: they may come long after the end.
                await _end(client, subscription)
                await asyncio.sleep(random.choice((0.0, 1.0, 5.0)))
                await ack(client, subscription, messages, handles)
            return
        held.longest_s = max(held.longest_s, loop.time() - began_s)
        await ack(client, subscription, messages, handles)


def run_push(seed: int, *, trouble_s: float = TROUBLE_S) -> tuple[Run, HeldMessages]:
    """Run a seed; an error becomes a finding of the run."""
    run, held, random = Run(seed), HeldMessages(), Random(seed)
    try:
        _, loop = simulate(_main(run, held, random, trouble_s), random)
        run.trace = loop.trace
    except Exception as error:  # noqa: BLE001 - a finding of any kind
        run.findings.append(f"{type(error).__name__}: {error}")
    return run, held


async def _main(run: Run, held: HeldMessages, random: Random, trouble_s: float) -> None:
    network = Network(random)
    broker = Broker(network, random)
    broker.start()
    plain, ordered = Subscription("plain", "plain-group"), Subscription("fifo", "fifo-group")

    def declare() -> None:
        admin, now_ms = broker.rounds.engine.administration, broker.clock.wall_ms()
        admin.put_topic("plain", type_=TopicType.NORMAL, queues=2, now_ms=now_ms)
        admin.put_topic("fifo", type_=TopicType.FIFO, queues=2, now_ms=now_ms)
        for one in (plain, ordered):
            admin.put_group(one.group, is_ordered=one is ordered, max_attempts=1_000, now_ms=now_ms)

    await broker.rounds.call(lambda _engine, _turn: declare())
    proxies = [Proxy(network, [broker.address], name=f"proxy-{n}") for n in range(2)]
    for proxy in proxies:
        proxy.start()
    for proxy in proxies:
        await proxy.cluster.configured()
    consuming = [
        asyncio.ensure_future(push_consume(Client(f"{one.topic}-{n}", proxies, random), one, held))
        for one in (plain, ordered)
        for n in range(CONSUMERS)
    ]
    producing = [
        asyncio.ensure_future(
            produce(
                Client(f"producer-{one.topic}", proxies, random),
                one,
                message_group="a" if one is ordered else "",
                pause_s=8.0,
            )
        )
        for one in (plain, ordered)
    ]
    try:
        await _trouble(run, held, random, (network, broker, proxies), trouble_s)
        for task in producing:
            task.cancel()
        await _drain((plain, ordered))
    finally:
        for task in (*producing, *consuming):
            task.cancel()
        await asyncio.gather(*producing, *consuming, return_exceptions=True)
    run.findings += held.findings
    for one in (plain, ordered):
        run.sent += len(one.history.sends)
        run.received += len(one.history.receives)
        if verdict := one.judge():
            run.findings.append(verdict)
    run.lives = broker.lives
    broker.check()
    await broker.stop("kill")
    for proxy in proxies:
        await proxy.kill()


async def _trouble(
    run: Run,
    held: HeldMessages,
    random: Random,
    processes: tuple[Network, Broker, list[Proxy]],
    trouble_s: float,
) -> None:
    network, broker, proxies = processes
    loop = asyncio.get_running_loop()
    end_s = loop.time() + trouble_s
    while loop.time() < end_s:
        await asyncio.sleep(random.expovariate(1 / 20))
        began_s = loop.time()
        (kind,) = random.choices(("proxy", "link", "kill", "power cut"), (6, 2, 1, 1))
        if kind == "proxy":
            proxy = random.choice(proxies)
            await proxy.kill()
            proxy.start()
        elif kind == "link":
            if network.links:
                random.choice(network.links).close()
        else:
            await broker.stop(kind)
            broker.start()
        for at_s in (began_s, loop.time()):
            held.record_failure(at_s, kind)
        run.story.append(f"{loop.time():.3f} s: {kind}")


async def _drain(subscriptions: tuple[Subscription, ...]) -> None:
    loop = asyncio.get_running_loop()
    end_s = loop.time() + DRAIN_S_MAX
    while any(one.backlog() for one in subscriptions) and loop.time() < end_s:  # noqa: ASYNC110 - time is virtual
        await asyncio.sleep(LOOK_S)
