"""Which clients a proxy knows, and what its metrics tell of them."""

from __future__ import annotations

from tidemill.common.metrics import OVERFLOW
from tidemill.proxy.clients import EXPIRED_A_TURN, EXPIRY_MS, LABEL_SETS_MAX, Client, Clients
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

CLIENTS_MAX = 5_000


class World:
    """Clients on a clock of their own."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000
        self.clients = Clients(clients_max=CLIENTS_MAX, monotonic_ms=lambda: self.now_ms)

    def seen(self, client_id: str, *, group: str = "", version: str = "5.1.2") -> None:
        kind = v2.SIMPLE_CONSUMER if group else v2.PRODUCER
        client = Client(
            client_type=kind, group=group, language="GO", version=version, seen_at_ms=self.now_ms
        )
        self.clients.seen(client_id, client)

    def told(self, name: str) -> dict[tuple[str, ...], float]:
        [family] = [one for one in self.clients.collect() if one.name == name]
        return {tuple(sample.labels.values()): sample.value for sample in family.samples}


def test_clients_are_counted_by_what_they_say_of_themselves() -> None:
    world = World()
    world.seen("p")
    world.seen("c1", group="g")
    world.seen("c2", group="g")
    world.seen("c2", group="g", version="5.2")
    assert world.told("rocketmq_producer_connections") == {("grpc", "GO", "5.1.2"): 1}
    assert world.told("rocketmq_consumer_connections") == {
        ("grpc", "pop", "g", "GO", "5.1.2"): 1,
        ("grpc", "pop", "g", "GO", "5.2"): 1,
    }
    world.clients.forget("c1")
    world.clients.forget("c1")
    assert world.told("rocketmq_consumer_connections") == {("grpc", "pop", "g", "GO", "5.2"): 1}


def test_the_dead_leave_the_metrics_by_time_alone() -> None:
    world = World()
    world.seen("c", group="g")
    world.now_ms += EXPIRY_MS
    assert world.told("rocketmq_consumer_connections")
    world.now_ms += 1
    assert not world.told("rocketmq_consumer_connections")
    assert len(world.clients) == 0


def test_a_crowd_that_falls_silent_is_forgotten_in_turns() -> None:
    world = World()
    for n in range(2 * EXPIRED_A_TURN):
        world.seen(f"c{n}")
    world.now_ms += EXPIRY_MS + 1
    world.seen("first to speak")
    assert len(world.clients) == EXPIRED_A_TURN + 1
    world.seen("next")
    assert len(world.clients) == 2


def test_what_clients_invent_does_not_make_metrics_grow() -> None:
    world = World()
    for n in range(2 * LABEL_SETS_MAX):
        world.seen(f"c{n}", group=f"g{n}")
        world.seen(f"p{n}", version=str(n))
    consumers = world.told("rocketmq_consumer_connections")
    assert len(consumers) == LABEL_SETS_MAX + 1
    assert consumers["grpc", "pop", OVERFLOW, OVERFLOW, OVERFLOW] == LABEL_SETS_MAX
    producers = world.told("rocketmq_producer_connections")
    assert len(producers) == LABEL_SETS_MAX + 1
    assert producers["grpc", OVERFLOW, OVERFLOW] == LABEL_SETS_MAX
    world.now_ms += EXPIRY_MS + 1
    world.seen("late", group="late")
    while len(world.clients) > 1:
        world.told("rocketmq_consumer_connections")  # Each time some of them are forgotten.
    assert world.told("rocketmq_consumer_connections") == {
        ("grpc", "pop", "late", "GO", "5.1.2"): 1
    }


def test_beyond_the_limit_who_was_silent_longest_is_forgotten() -> None:
    world = World()
    for n in range(CLIENTS_MAX + 10):
        world.seen(f"p{n}")
    assert len(world.clients) == CLIENTS_MAX
    assert world.told("rocketmq_producer_connections") == {("grpc", "GO", "5.1.2"): CLIENTS_MAX}
