"""The simulation of brokers, proxies and clients from one seed, with its verdict."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import structlog

from tests.simulation.clients import (
    INVISIBLE_MS,
    Client,
    Subscription,
    consume,
    hoard,
    produce,
    schedule,
)
from tests.simulation.gaps import Gaps
from tests.simulation.hosts import Controller
from tests.simulation.loop import simulate
from tests.simulation.network import Network
from tests.simulation.processes import EPOCH_MS, RESTART_S, Broker, Proxy
from tests.support.disk.faulty_disk import UNBOUNDED
from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.server.admin.broker_groups import BrokerGroupAdmin
from tidemill.common.errors import ServiceError
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.grpc.status import RpcError

HOUR_MS = 3600 * 1000
TROUBLE_S = 60.0  # of virtual time
QUIET_S = 3 * INVISIBLE_MS / 1000  # after the drain; no consumer may receive anything in it
DRAIN_S_MAX = 600.0  # far more than any delay, invisible duration or long poll
LOOK_S = 1.0
EMPTY_LOOKS = 4  # an operator's attempts until a broker group is empty
JOIN_S = 5.0  # the timeout of a patient operator; members answer sooner
# The home follows a master within two seconds, beside the slowest messages and syncs of a run.
FOLLOW_S = 5.0
TAGS = ("red", "blue")
STEPS_NEAR_MS = (700, -700)
STEPS_MS = (HOUR_MS, -HOUR_MS, 4 * 24 * HOUR_MS, *STEPS_NEAR_MS)


@dataclass
class Run:
    """The record and the verdict of one seed."""

    seed: int
    story: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    sent: int = 0
    received: int = 0
    lives: int = 0
    trace: int = 0

    def __str__(self) -> str:
        head = f"seed {self.seed}: {self.sent} sent, {self.received} received, {self.lives} lives"
        if not self.findings:
            return head
        return "\n".join([head, *self.story, *self.findings])


def run_seed(
    seed: int, *, trouble_s: float = TROUBLE_S, groups: int = 1, has_replicas: bool = False
) -> Run:
    """Run a seed with a number of broker groups; an error becomes a finding of the run.

    With replicas, the masters of the broker groups move.
    """
    run = Run(seed)
    random = Random(seed)
    try:
        simulation = _Simulation(run, random, groups, has_replicas=has_replicas)
        _, loop = simulate(simulation.main(trouble_s), random)
    except Exception as error:  # noqa: BLE001 - a finding of any kind
        run.findings.append(f"{type(error).__name__}: {error}")
        if error.__cause__ is not None:
            run.findings.append(f"caused by {error.__cause__!r}")
        return run
    run.trace = loop.trace
    return run


class _Simulation:
    """The processes and clients of one run."""

    def __init__(self, run: Run, random: Random, groups: int, *, has_replicas: bool) -> None:
        self._run = run
        self._random = random
        self._groups = groups
        self._has_replicas = has_replicas
        self._plain = Subscription("plain", "plain-group")
        self._ordered = Subscription("fifo", "fifo-group")
        self._delayed = Subscription("delayed", "delayed-group")
        self._tagged = Subscription("tagged", "tagged-group")
        self._subscriptions: tuple[Subscription, ...] = (
            self._plain,
            self._ordered,
            self._delayed,
            self._tagged,
        )
        # Half of the runs with several broker groups have a consumer group that polls only at the
        # end: if a broker group was removed with its messages, they are missing then. The other
        # half has none, because its backlog prevents every removal.
        self._late = Subscription("quiet", "late-group")
        self._has_late = groups > 1 and random.random() < 0.5
        if self._has_late:
            self._subscriptions += (self._late,)
        # In half of these runs it starts at the latest message. It polls the home broker once
        # before the first send, so it must receive all messages of all broker groups.
        self._is_at_latest = self._has_late and random.random() < 0.5
        # This subscription is not judged: an operator deletes its topic and its group.
        self._fickle = Subscription("fickle", "fickle-group")
        self._gaps = Gaps(run.seed, self._subscriptions, random)
        self._consuming: list[asyncio.Task[None]] = []
        self.resized: Counter[str] = Counter()  # changes of the list of broker groups

    async def main(self, trouble_s: float) -> None:
        network = Network(self._random)
        self._controller = Controller(network) if self._has_replicas else None
        self._brokers = [
            Broker(network, self._random, name=f"broker-{n}", controller=self._controller)
            for n in range(self._groups)
        ]
        self._gaps.prepare(self._brokers)
        self._network = network
        for broker in self._brokers:
            broker.start()
        await self._declare()
        addresses = [broker.address for broker in self._brokers]
        self._proxies = [
            Proxy(network, addresses, name=f"proxy-{n}", has_controllers=self._has_replicas)
            for n in range(2)
        ]
        for proxy in self._proxies:
            proxy.start()
        for proxy in self._proxies:
            await proxy.cluster.configured()
        consuming = self._consuming = self._begin_consumers()
        consuming += self._gaps.begin_clients(self._client)
        producing = self._begin_producers() + self._gaps.begin_operator(self._run.story)
        supervising = [asyncio.ensure_future(self._supervise(one)) for one in self._brokers]
        try:
            await self._trouble(trouble_s)
            for task in producing:
                task.cancel()
            await self._drain()
        finally:
            for task in (*producing, *consuming, *supervising):
                task.cancel()
            ends = await asyncio.gather(
                *producing, *consuming, *supervising, return_exceptions=True
            )
            self._run.findings += [
                f"a client failed: {end!r}"
                for end in ends
                if not isinstance(end, asyncio.CancelledError)
            ]
        self._judge()
        for broker in self._brokers:
            await broker.stop("kill")
        for proxy in self._proxies:
            await proxy.kill()
        await network.end()

    async def _declare(self) -> None:
        """Create topics and groups before the first client starts."""
        home = self._brokers[0]
        engine = home.rounds.engine

        def declare() -> None:
            admin, now_ms = engine.administration, home.clock.wall_ms()
            if len(self._brokers) > 1:
                addresses = {one.name: f"{one.hosts[0]}:1" for one in self._brokers}
                engine.broker_groups.found(addresses, now_ms)
            admin.put_topic("plain", type_=TopicType.NORMAL, queues=2, now_ms=now_ms)
            admin.put_topic("fifo", type_=TopicType.FIFO, queues=2, now_ms=now_ms)
            admin.put_topic("delayed", type_=TopicType.DELAY, queues=2, now_ms=now_ms)
            admin.put_topic("tagged", type_=TopicType.NORMAL, queues=1, now_ms=now_ms)
            if self._has_late:
                admin.put_topic("quiet", type_=TopicType.NORMAL, queues=1, now_ms=now_ms)
            for one in self._subscriptions:
                admin.put_group(
                    one.group,
                    is_ordered=one is self._ordered,
                    max_attempts=100,
                    start_from_latest=one is self._late and self._is_at_latest,
                    now_ms=now_ms,
                )
            if self._is_at_latest:
                engine.commands.pop(
                    engine.catalog.group_ids[self._late.group],
                    engine.catalog.topic_ids[self._late.topic],
                    max_messages=1,
                    invisible_duration_ms=INVISIBLE_MS,
                    attempt_id="",
                    now_ms=now_ms,
                )

        await home.rounds.call(lambda _engine, _turn: declare())

    def _begin_consumers(self) -> list[asyncio.Task[None]]:
        return [
            asyncio.ensure_future(
                consume(
                    self._client(f"consumer-{one.topic}-{n}"),
                    one,
                    tag=TAGS[0] if one is self._tagged else "*",
                )
            )
            for one in (*self._subscriptions, self._fickle)
            if one is not self._late
            for n in range(2)
        ] + [
            # It fills the table of deliveries. The other groups must be served all the same.
            asyncio.ensure_future(hoard(self._client(f"hoarder-{n}"), topic, "hoarders"))
            for n, topic in enumerate(("plain", "fifo", "delayed", "tagged"))
            if self._gaps.has_hoarders
        ]

    def _begin_producers(self) -> list[asyncio.Task[None]]:
        plain = [produce(self._client(f"producer-{n}"), self._plain) for n in range(2)]
        plain.append(produce(self._client("tagger"), self._tagged, tags=TAGS))
        plain.append(produce(self._client("fickle"), self._fickle))
        if self._has_late:
            plain.append(produce(self._client("late"), self._late))
        ordered = [
            produce(self._client(f"sender-{group}"), self._ordered, message_group=group)
            for group in ("a", "b", "c")
        ]
        delayed = [
            schedule(
                self._client(f"scheduler-{n}"),
                self._delayed,
                lambda: EPOCH_MS + self._brokers[0].clock.monotonic_ms(),
            )
            for n in range(2)
        ]
        return [asyncio.ensure_future(one) for one in (*plain, *ordered, *delayed)]

    def _client(self, name: str) -> Client:
        return Client(name, self._proxies, self._random)

    # ------------------------------------------------------------ trouble

    async def _trouble(self, trouble_s: float) -> None:
        """Cause failures until the time is over, then repair all of them."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + trouble_s
        kinds = {
            self._close_link: 3,
            self._half_open_link: 4,
            self._stop_broker: 3,
            self._fail_sync: 1,
            self._step_clock: 2,
            self._fill_disk: 1,
            self._kill_proxy: 2,
            self._cut_operation: 3,
            self._administer: 4,
        }
        if self._groups > 1:
            kinds[self._resize] = 6
        if self._has_replicas:
            kinds[self._move_master] = 6
            kinds[self._lose_controller] = 1
        while loop.time() < end_s:
            await asyncio.sleep(self._random.expovariate(0.5))
            (kind,) = self._random.choices(list(kinds), list(kinds.values()))
            what = await kind()
            self._run.story.append(f"{loop.time():.3f} s: {what}")
        for broker in self._brokers:
            broker.disk.capacity_bytes = UNBOUNDED
            broker.clock.wrong_by_ms = 0
        for broker in self._brokers[1:]:
            while await self._ask_home("add", broker.name, JOIN_S):  # noqa: ASYNC110 - virtual
                await asyncio.sleep(LOOK_S)
        if self._has_replicas:
            await self._check_members("at the end of the trouble")

    async def _resize(self) -> str:
        """Drain, remove or add a broker group. The operator may give up at any moment."""
        random = self._random
        what = random.choice(("drain", "remove", "remove", "remove", "force", "add"))
        name = random.choice(self._brokers[1:]).name
        patience_s = random.choice((0.001, 0.01, 0.1, JOIN_S))
        if what == "force":
            # After a timeout, the change may happen at any later time.
            patience_s = JOIN_S
        if what in {"remove", "force"}:
            await self._ask_home("drain", name, JOIN_S)
        refusal = await self._ask_home(what, name, patience_s)
        if what == "force":
            # Messages of the broker group come after it returns, behind newer messages.
            self._ordered.history.give_up_order()
        for _ in range(EMPTY_LOOKS if what == "remove" and refusal else 0):
            await asyncio.sleep(LOOK_S)
            refusal = await self._ask_home(what, name, patience_s)
        return f"{what} {name}: {refusal or 'done'}"

    async def _ask_home(self, what: str, name: str, patience_s: float) -> str:
        """Change the list of broker groups; return the reason if that fails."""
        home = self._brokers[0]
        admin = BrokerGroupAdmin(home.rounds, home.members, replica_name="")
        try:
            async with asyncio.timeout(patience_s):
                if what == "drain":
                    await admin.DrainBrokerGroup(pb.DrainBrokerGroupRequest(name=name))
                elif what == "add":
                    [host] = [one.hosts[0] for one in self._brokers if one.name == name]
                    added = pb.AddBrokerGroupRequest(name=name, address=f"{host}:1")
                    await admin.AddBrokerGroup(added)
                else:
                    removed = pb.RemoveBrokerGroupRequest(name=name, force=what == "force")
                    await admin.RemoveBrokerGroup(removed)
                self.resized[what] += 1
        except TimeoutError:
            return "given up"
        except (RpcError, ServiceError) as error:
            return str(error)
        return ""

    def _any_broker(self) -> Broker:
        # With one broker no random number is drawn, so older seeds still give the same runs.
        return self._brokers[0] if self._groups == 1 else self._random.choice(self._brokers)

    async def _close_link(self) -> str:
        if self._network.links:
            self._random.choice(self._network.links).close()
        return "a link is closed"

    async def _half_open_link(self) -> str:
        """Close a link at its proxy, and at its broker up to six seconds later."""
        random = self._random
        if self._network.links:
            link = random.choice(self._network.links)
            link.lose_at_proxy(random.choice((0.0, random.uniform(0, 3))), random.uniform(0, 3))
        return "a link is half-open"

    async def _stop_broker(self) -> str:
        """Stop a broker, often again soon after its next start."""
        random, broker = self._random, self._any_broker()
        ends: list[str] = []
        while not ends or random.random() < 0.5:
            how = random.choice(("kill", "power cut"))
            if broker.is_alive:
                await broker.stop(how)
            ends.append(how)
            broker.try_to_start()
            await asyncio.sleep(random.choice((0.001, 0.02, 0.5)))
        return ", ".join(ends)

    async def _cut_operation(self) -> str:
        """End a broker in a disk operation; the supervisor chooses a kill or a power cut."""
        disk = self._any_broker().disk
        disk.cut_at = len(disk.operations) + self._random.randrange(30)
        return "a broker ends in a disk operation"

    async def _fail_sync(self) -> str:
        disk = self._any_broker().disk
        disk.sync_fails_at = len(disk.operations) + self._random.randrange(10)
        return "a sync fails"

    async def _step_clock(self) -> str:
        # The start of a group at the latest message is a time, so its clocks must nearly agree.
        step_ms = self._random.choice(STEPS_NEAR_MS if self._is_at_latest else STEPS_MS)
        clock = self._any_broker().clock
        clock.wrong_by_ms = step_ms
        await asyncio.sleep(self._random.choice((0.5, 1.0, 20.0)))
        clock.wrong_by_ms = 0
        return f"the clock was off by {step_ms} ms"

    async def _fill_disk(self) -> str:
        broker = self._any_broker()
        disk = broker.disk
        free_bytes = self._random.choice((0, 60_000, 300_000))
        disk.capacity_bytes += free_bytes + (512 << 10) - 200_000 - disk.free_bytes()
        await asyncio.sleep(self._random.uniform(0, 5))
        broker.disk.capacity_bytes = UNBOUNDED
        return "the disk was nearly full"

    async def _administer(self) -> str:
        """Change or delete a topic or a group. The operator gives up after a second."""
        admin_of = {
            "grow": lambda admin, now_ms: admin.put_topic(
                "plain", type_=None, queues=self._random.randint(2, 6), now_ms=now_ms
            ),
            "reset": lambda admin, now_ms: admin.reset_offset(
                "fickle-group", "fickle", ResetTarget(earliest=True), now_ms
            ),
            "delete topic": lambda admin, now_ms: admin.delete_topic("fickle", now_ms),
            "delete group": lambda admin, now_ms: admin.delete_group("fickle-group", now_ms),
        }
        what = self._random.choice(list(admin_of))
        with contextlib.suppress(ServiceError, TimeoutError):
            async with asyncio.timeout(1):
                await self._brokers[0].rounds.call(
                    lambda engine, turn: admin_of[what](engine.administration, turn.now_ms)
                )
        return what

    async def _kill_proxy(self) -> str:
        proxy = self._random.choice(self._proxies)
        await proxy.kill()
        proxy.start()
        return f"{proxy.name} is killed"

    async def _move_master(self) -> str:
        """Let another replica lead a broker group; the home must reach its members soon."""
        broker, hangs = self._any_broker(), self._random.random() < 0.5
        if not broker.is_alive:
            return f"{broker.name} does not move: it is down"
        await broker.move(hangs=hangs)
        what = f"{broker.name} moves to {broker.address}{' from a host that hangs' * hangs}"
        if self._random.random() < 0.5:
            await self._check_members(what)
        return what

    async def _lose_controller(self) -> str:
        assert self._controller is not None, "controllers are those of replicas"
        self._controller.stop()
        await asyncio.sleep(self._random.uniform(0, 5))
        self._controller.start()
        return "the controller was down"

    async def _check_members(self, what: str) -> None:
        """Add a finding unless the home reaches each member soon, while nothing else fails."""
        lives = [broker.lives for broker in self._brokers]
        await asyncio.sleep(FOLLOW_S)
        if lives != [broker.lives for broker in self._brokers]:
            return
        for name, member in self._brokers[0].members.connections.items():
            if not member.is_connected:
                self._run.findings.append(f"{what}: {name} is not connected: {member.reason}")

    async def _supervise(self, broker: Broker) -> None:
        """Restart a broker after each end."""
        while True:
            await asyncio.sleep(RESTART_S)
            broker.check()
            if broker.failure is not None:
                broker.failure = None
                await broker.stop(self._random.choice(("kill", "power cut")))
            if not broker.is_alive:
                broker.try_to_start()

    # ------------------------------------------------------------ the end

    async def _drain(self) -> None:
        """Wait until consumers have received everything, and then for late deliveries."""
        loop = asyncio.get_running_loop()
        if self._has_late:
            late = consume(self._client("consumer-late"), self._late)
            self._consuming.append(asyncio.ensure_future(late))
        end_s = loop.time() + DRAIN_S_MAX
        while any(one.backlog() for one in self._subscriptions) and loop.time() < end_s:  # noqa: ASYNC110 - time is virtual
            await asyncio.sleep(LOOK_S)
        await self._gaps.drain(end_s)
        for broker in self._brokers:
            if broker.is_alive:
                await broker.stop("power cut")
        await asyncio.sleep(QUIET_S)

    def _judge(self) -> None:
        run = self._run
        run.findings += self._gaps.findings
        for one in self._subscriptions:
            run.sent += len(one.history.sends)
            run.received += len(one.history.receives)
            if verdict := one.judge():
                run.findings.append(verdict)
        run.lives = sum(broker.lives for broker in self._brokers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--groups", type=int, default=1, help="how many broker groups")
    parser.add_argument("--replicas", action="store_true", help="masters move between replicas")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    failed = 0
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        run = run_seed(seed, groups=arguments.groups, has_replicas=arguments.replicas)
        sys.stdout.write(f"{run}\n")
        sys.stdout.flush()
        failed += bool(run.findings)
    sys.exit(f"{failed} of {arguments.seeds} seeds failed" if failed else 0)


if __name__ == "__main__":
    main()
