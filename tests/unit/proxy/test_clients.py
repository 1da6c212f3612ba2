"""The clients of a proxy, and their metrics."""

from __future__ import annotations

from tidemill.common.metrics import OVERFLOW
from tidemill.message.client_key import ClientKey
from tidemill.proxy.clients.clients import (
    ALL_SETTINGS_BYTES_MAX,
    EXPIRED_A_TURN,
    EXPIRY_MS,
    LABEL_SETS_MAX,
    LISTED_A_TURN,
    PARSED_BYTES_A_TURN,
    SETTINGS_BYTES_MAX,
    Client,
    Clients,
)
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

CLIENTS_MAX = 5_000


class World:
    """Clients on a clock of their own."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000
        self.clients = Clients(clients_max=CLIENTS_MAX, monotonic_ms=lambda: self.now_ms)

    def seen(
        self,
        client_id: str,
        *,
        group: str = "",
        version: str = "5.1.2",
        settings: bytes | None = None,
        host: str = "10.0.0.1",
        user: str = "",
    ) -> None:
        kind = v2.SIMPLE_CONSUMER if group else v2.PRODUCER
        client = Client(
            client_type=kind,
            group=group,
            language="GO",
            version=version,
            seen_at_ms=self.now_ms,
            address=f"ipv4:{host}:5000",
            user=user,
        )
        self.clients.record(ClientKey(client_id), client, settings, connection=f"of {client_id}")

    def metric_values(self, name: str) -> dict[tuple[str, ...], float]:
        [family] = [one for one in self.clients.collect() if one.name == name]
        return {tuple(sample.labels.values()): sample.value for sample in family.samples}


def test_clients_are_counted_by_their_reported_labels() -> None:
    world = World()
    world.seen("p")
    world.seen("c1", group="g")
    world.seen("c2", group="g")
    world.seen("c2", group="g", version="5.2")
    assert world.metric_values("rocketmq_producer_connections") == {("grpc", "GO", "5.1.2"): 1}
    assert world.metric_values("rocketmq_consumer_connections") == {
        ("grpc", "pop", "g", "GO", "5.1.2"): 1,
        ("grpc", "pop", "g", "GO", "5.2"): 1,
    }
    world.clients.forget(ClientKey("c1"))
    world.clients.forget(ClientKey("c1"))
    assert world.metric_values("rocketmq_consumer_connections") == {
        ("grpc", "pop", "g", "GO", "5.2"): 1
    }


def test_silent_clients_leave_the_metrics_without_other_calls() -> None:
    world = World()
    world.seen("c", group="g")
    world.now_ms += EXPIRY_MS
    assert world.metric_values("rocketmq_consumer_connections")
    world.now_ms += 1
    assert not world.metric_values("rocketmq_consumer_connections")
    assert len(world.clients) == 0


def test_many_silent_clients_are_removed_in_slices() -> None:
    world = World()
    for n in range(2 * EXPIRED_A_TURN):
        world.seen(f"c{n}")
    world.now_ms += EXPIRY_MS + 1
    world.seen("first to speak")
    assert len(world.clients) == EXPIRED_A_TURN + 1
    world.seen("next")
    assert len(world.clients) == 2


def test_invented_labels_do_not_grow_the_metrics() -> None:
    world = World()
    for n in range(2 * LABEL_SETS_MAX):
        world.seen(f"c{n}", group=f"g{n}")
        world.seen(f"p{n}", version=str(n))
    consumers = world.metric_values("rocketmq_consumer_connections")
    assert len(consumers) == LABEL_SETS_MAX + 1
    assert consumers["grpc", "pop", OVERFLOW, OVERFLOW, OVERFLOW] == LABEL_SETS_MAX
    producers = world.metric_values("rocketmq_producer_connections")
    assert len(producers) == LABEL_SETS_MAX + 1
    assert producers["grpc", OVERFLOW, OVERFLOW] == LABEL_SETS_MAX
    world.now_ms += EXPIRY_MS + 1
    world.seen("late", group="late")
    while len(world.clients) > 1:
        world.metric_values("rocketmq_consumer_connections")  # Each scrape removes some of them.
    assert world.metric_values("rocketmq_consumer_connections") == {
        ("grpc", "pop", "late", "GO", "5.1.2"): 1
    }


def test_an_address_with_many_clients_removes_its_own() -> None:
    world = World()
    for n in range(10):
        world.seen(f"honest{n}", host=f"10.0.1.{n}")
    for n in range(2 * CLIENTS_MAX):
        world.seen(f"p{n}", host="10.0.0.9")
    assert len(world.clients) == CLIENTS_MAX
    assert all(world.clients.find(ClientKey(f"honest{n}")) for n in range(10))
    assert world.clients.find(ClientKey(f"p{2 * CLIENTS_MAX - 1}"))
    assert world.clients.find(ClientKey("p0")) is None


def test_a_user_with_many_clients_removes_its_own_at_each_address() -> None:
    world = World()
    for n in range(10):
        world.seen(f"honest{n}", host="10.0.0.9", user="honest")
    for n in range(2 * CLIENTS_MAX):
        world.seen(f"p{n}", host=f"10.0.{n % 200}.9", user="greedy")
    assert len(world.clients) == CLIENTS_MAX
    assert all(world.clients.find(ClientKey(f"honest{n}")) for n in range(10))
    assert world.clients.find(ClientKey("p0")) is None


def test_an_address_with_much_settings_leaves_room_for_those_of_others() -> None:
    world, settings = World(), b"x" * SETTINGS_BYTES_MAX
    for n in range(ALL_SETTINGS_BYTES_MAX // SETTINGS_BYTES_MAX):
        world.seen(f"p{n}", settings=settings, host="10.0.0.9")
    world.seen("honest", settings=b"small", host="10.0.1.1")
    honest = world.clients.find(ClientKey("honest"))
    assert honest is not None
    assert honest.settings == b"small"
    for n in range(ALL_SETTINGS_BYTES_MAX // SETTINGS_BYTES_MAX):
        world.clients.forget(ClientKey(f"p{n}"))
    world.seen("p", settings=settings, host="10.0.0.9")
    found = world.clients.find(ClientKey("p"))
    assert found is not None
    assert found.settings == settings


def test_the_limit_removes_the_longest_silent_client() -> None:
    world = World()
    for n in range(CLIENTS_MAX + 10):
        world.seen(f"p{n}")
    assert len(world.clients) == CLIENTS_MAX
    assert world.metric_values("rocketmq_producer_connections") == {
        ("grpc", "GO", "5.1.2"): CLIENTS_MAX
    }


# ---------------------------------------------------------------- lists


def settings_of(*topics: str, size: int = 0) -> bytes:
    """Return settings of a consumer that subscribes to these."""
    return v2.Settings(
        client_type=v2.SIMPLE_CONSUMER,
        user_agent=v2.UA(hostname="h" * size),
        subscription=v2.Subscription(
            subscriptions=[v2.SubscriptionEntry(topic=v2.Resource(name=topic)) for topic in topics]
        ),
    ).SerializeToString()


def page_of(
    world: World, *, group: str = "", topic: str = "", after: str = "", most: int = 1_000
) -> tuple[list[str], bool]:
    slices = world.clients.list_slices(group=group, topic=topic, after=after, clients_max=most)
    turns = 0
    while True:
        try:
            next(slices)
            turns += 1
        except StopIteration as ended:
            page = ended.value
            break
    assert turns >= (len(world.clients) - 1) // LISTED_A_TURN
    return [listed.key.client_id for listed in page.clients], page.has_more


def test_a_page_has_the_first_ids_after_the_cursor_in_order() -> None:
    world = World()
    for n in range(3_000):
        world.seen(f"c{n * 7 % 3_000:04}", group="even" if n % 2 == 0 else "odd")
    assert page_of(world, most=3) == (["c0000", "c0001", "c0002"], True)
    assert page_of(world, after="c2996", most=3) == (["c2997", "c2998", "c2999"], False)
    assert page_of(world, after="c2999") == ([], False)
    assert len(page_of(world, group="odd", most=5_000)[0]) == 1_500


def test_a_client_is_found_by_the_topics_that_it_announced() -> None:
    world = World()
    world.seen("knows nothing")
    for client_id, topics in (("a", ("orders", "x")), ("b", ("orders2",)), ("c", ("orders",))):
        world.seen(client_id, settings=settings_of(*topics))
    assert page_of(world, topic="orders") == (["a", "c"], False)


def test_a_list_omits_expired_clients() -> None:
    world = World()
    world.seen("dead")
    world.now_ms += EXPIRY_MS
    world.seen("alive")
    world.now_ms += 1
    assert page_of(world) == (["alive"], False)
    assert world.clients.find(ClientKey("dead")) is None


def test_a_heartbeat_keeps_the_announced_settings() -> None:
    world = World()
    world.seen("c", settings=settings_of("orders"))
    since_ms, world.now_ms = world.now_ms, world.now_ms + 10_000
    world.seen("c")
    found = world.clients.find(ClientKey("c"))
    assert found is not None
    assert (found.settings, found.since_ms) == (settings_of("orders"), since_ms)


def test_stored_settings_stay_within_their_limits() -> None:
    world = World()
    world.seen("large", settings=settings_of(size=SETTINGS_BYTES_MAX))
    found = world.clients.find(ClientKey("large"))
    assert found is not None
    assert found.settings == b""
    settings = settings_of(size=SETTINGS_BYTES_MAX - 100)
    count = ALL_SETTINGS_BYTES_MAX // len(settings)
    for n in range(count + 1):
        world.seen(f"c{n}", settings=settings)
    last = world.clients.find(ClientKey(f"c{count}"))
    assert last is not None
    assert last.settings == b""
    world.clients.forget(ClientKey("c0"))
    world.seen(f"c{count}", settings=settings)
    last = world.clients.find(ClientKey(f"c{count}"))
    assert last is not None
    assert last.settings == settings


def test_an_expired_client_takes_no_place_in_a_page() -> None:
    world = World()
    for n in range(5):
        world.seen(f"a{n}")
    world.now_ms += EXPIRY_MS - 20_000
    for n in range(10):
        world.seen(f"b{n}")
    world.now_ms += 25_000
    assert len(world.clients) == 15  # They are not removed yet.
    assert page_of(world, most=5) == ([f"b{n}" for n in range(5)], True)
    assert page_of(world, after="b4", most=5) == ([f"b{n}" for n in range(5, 10)], False)


def test_a_slice_of_a_list_by_topic_parses_limited_bytes() -> None:
    world = World()
    settings = settings_of(*(f"t{n:03}" for n in range(900)), "orders")
    count = 100
    for n in range(count):
        world.seen(f"c{n:03}", group="g", settings=settings)
    assert len(settings) <= SETTINGS_BYTES_MAX
    assert world.clients.find(ClientKey("c000")).settings  # type: ignore[union-attr]  # It is there.
    turns = len(
        list(world.clients.list_slices(group="", topic="orders", after="", clients_max=count))
    )
    settings_a_turn = -(-PARSED_BYTES_A_TURN // len(settings))
    assert turns == -(-count // settings_a_turn) - 1
    assert len(page_of(world, topic="orders")[0]) == count
