"""Sums and rates of topics and consumer groups over broker groups."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tidemill.admin.activity.numbers import (
    NO_LAST_HOUR,
    NO_PROGRESS,
    NO_RATES,
    BrokerSample,
    ClusterNumbers,
    Consumers,
    GroupState,
    SamplePair,
)
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


def topic(name: str, **fields: Any) -> pb.TopicActivity:
    return pb.TopicActivity(**{"name": name, "id": 1, "log_bytes": 0, **fields})


def group(name: str, *topics: pb.GroupTopicActivity, **fields: Any) -> pb.GroupActivity:
    given: dict[str, Any] = {"name": name, "id": 1, "has_progress": True, "topics": topics}
    given |= {"dead_letters_last_hour": 0, **fields}
    return pb.GroupActivity(**given)


def reads(name: str, *, has_progress: bool = True, **fields: int) -> pb.GroupTopicActivity:
    return pb.GroupTopicActivity(topic=name, has_progress=has_progress, **fields)


def sample(*rows: pb.TopicActivity | pb.GroupActivity, at_s: int = 10) -> BrokerSample:
    topics = {row.name: row for row in rows if isinstance(row, pb.TopicActivity)}
    groups = {row.name: row for row in rows if isinstance(row, pb.GroupActivity)}
    return BrokerSample("run", at_s * 1_000, topics, groups)


def summed(
    *pairs: SamplePair, consumers: Consumers | None = None, unreachable: tuple[str, ...] = ()
) -> ClusterNumbers:
    counted = consumers or Consumers(Counter())
    numbers = ClusterNumbers(1, dict.fromkeys(unreachable, "down"), counted)
    for _ in numbers.add_all({f"broker-{n}": pair for n, pair in enumerate(pairs)}):
        pass
    return numbers


def test_a_rate_is_the_difference_of_two_samples_by_their_time() -> None:
    old = sample(topic("orders", stored=100), group("g", reads("orders", delivered=5)), at_s=10)
    new = sample(
        topic("orders", stored=150, messages=7, pending_timers=2, log_bytes=9),
        group("g", reads("orders", delivered=25, redelivered=10, acked=5, ready=3, in_flight=1)),
        at_s=15,
    )
    numbers = summed(SamplePair(new, old))
    orders = numbers.topics["orders"]
    assert (orders.messages, orders.pending_timers, orders.bytes) == (7, 2, 9)
    assert (orders.in_per_second, orders.out_per_second, orders.ack_per_second) == (10, 4, 1)
    assert (orders.lags, orders.lag, orders.unknown) == ({"g": 4}, 4, "")
    found = numbers.groups["g"]
    assert (found.in_per_second, found.out_per_second) == (10, 4)
    assert (found.ack_per_second, found.retry_per_second) == (1, 2)
    assert (found.lag, found.ready, found.in_flight, found.blocked) == (4, 3, 1, 0)


def test_the_numbers_of_broker_groups_are_summed() -> None:
    lagging = group("g", reads("orders", ready=2, blocked=3, locked_queues=1), dead_letters=4)
    first = sample(topic("orders", messages=1, log_bytes=5), lagging)
    late = reads("orders", in_flight=5, oldest_unacked_at_ms=70)
    second = sample(topic("orders", messages=2, log_bytes=6), group("g", late, dead_letters=1))
    third = sample(group("g", reads("orders", oldest_unacked_at_ms=60)))
    numbers = summed(SamplePair(first, first), SamplePair(second, None), SamplePair(third, None))
    assert numbers.topics["orders"].messages == 3
    assert numbers.topics["orders"].bytes == 11
    found = numbers.groups["g"]
    assert (found.lag, found.blocked, found.locked_queues, found.dead_letters) == (10, 3, 1, 5)
    assert found.oldest_unacked_at_ms == 60


def test_the_dead_letters_of_the_last_hour_are_summed_or_unknown() -> None:
    first = sample(group("g", dead_letters=9, dead_letters_last_hour=4))
    second = sample(group("g", dead_letters=1, dead_letters_last_hour=0))
    found = summed(SamplePair(first, None), SamplePair(second, None)).groups["g"]
    assert (found.dead_letters, found.dead_letters_last_hour) == (10, 4)
    rebuilding = sample(group("g", dead_letters=1, dead_letters_last_hour=None))
    found = summed(SamplePair(first, None), SamplePair(rebuilding, None)).groups["g"]
    assert (found.dead_letters, found.dead_letters_last_hour) == (10, None)
    assert NO_LAST_HOUR in found.unknown


def test_a_rate_is_unknown_if_one_broker_group_has_no_second_sample() -> None:
    old = sample(topic("orders"), group("g", reads("orders")), at_s=5)
    new = sample(topic("orders", stored=5), group("g", reads("orders", delivered=5)), at_s=10)
    numbers = summed(SamplePair(new, old), SamplePair(new, None))
    orders, found = numbers.topics["orders"], numbers.groups["g"]
    assert (orders.in_per_second, orders.out_per_second, orders.unknown) == (None, None, NO_RATES)
    assert (found.in_per_second, found.out_per_second, found.unknown) == (None, None, NO_RATES)
    assert found.state is None


def test_a_topic_and_a_group_that_are_created_again_count_from_zero() -> None:
    old = sample(topic("orders", stored=100), group("g", reads("orders", acked=50)), at_s=5)
    again = group("g", reads("orders", acked=5), id=2)
    numbers = summed(SamplePair(sample(topic("orders", stored=10, id=2), again), old))
    assert numbers.topics["orders"].in_per_second == 2
    assert numbers.groups["g"].ack_per_second == 1


def test_a_new_topic_of_a_known_run_counts_from_zero() -> None:
    numbers = summed(SamplePair(sample(topic("new", stored=10)), sample(at_s=5)))
    assert numbers.topics["new"].in_per_second == 2


def test_bytes_are_unknown_until_all_broker_groups_have_counted() -> None:
    counted = sample(topic("orders", log_bytes=5))
    uncounted = topic("orders")
    uncounted.ClearField("log_bytes")
    numbers = summed(SamplePair(counted, None), SamplePair(sample(uncounted), None))
    assert numbers.topics["orders"].bytes is None
    assert "bytes" in numbers.topics["orders"].unknown


def test_a_group_without_a_topic_has_never_polled() -> None:
    found = summed(SamplePair(sample(group("g")), sample(at_s=5))).groups["g"]
    assert (found.state, found.lag, found.unknown) == (GroupState.NEVER_POLLED, None, "")


def test_a_group_without_a_topic_is_unknown_while_a_broker_group_is_unreachable() -> None:
    numbers = summed(SamplePair(sample(group("g")), sample(at_s=5)), unreachable=("broker-9",))
    found = numbers.groups["g"]
    assert (found.lag, "broker-9" in found.unknown) == (None, True)
    assert found.state is None


def test_the_lag_is_unknown_until_every_broker_has_read_the_progress() -> None:
    known = sample(group("g", reads("orders", ready=3)))
    unread = sample(group("g", has_progress=False))
    found = summed(SamplePair(known, known), SamplePair(unread, None)).groups["g"]
    assert (found.lag, found.ready, found.state) == (None, None, None)
    assert NO_PROGRESS in found.unknown


def test_rates_and_the_state_are_known_before_the_progress_is_read() -> None:
    def unread(count: int, at_s: int) -> BrokerSample:
        one = reads("orders", has_progress=False, delivered=count, acked=count)
        reader = group("g", one, has_progress=False, has_polled=True)
        return sample(topic("orders", stored=count), reader, at_s=at_s)

    read = group("g", reads("orders", delivered=25_000, acked=25_000, ready=3), has_polled=True)
    second, third = unread(20_000, 20), sample(topic("orders", stored=25_000), read, at_s=25)
    for new, old in ((second, unread(15_000, 15)), (third, second)):
        numbers = summed(SamplePair(new, old))
        found, orders = numbers.groups["g"], numbers.topics["orders"]
        assert (found.out_per_second, found.ack_per_second) == (1_000, 1_000)
        assert (orders.out_per_second, orders.ack_per_second) == (1_000, 1_000)
        assert found.state is GroupState.ACTIVE
        is_read = new is third
        assert (found.lag, found.in_per_second) == ((3, 1_000) if is_read else (None, None))
        assert (orders.lag, orders.lags) == ((3, {"g": 3}) if is_read else (None, {"g": None}))
        assert found.unknown == ("" if is_read else NO_PROGRESS)


def test_the_first_deliveries_of_a_topic_count_from_zero() -> None:
    old = sample(topic("orders"), group("g"), at_s=5)
    late = reads("orders", has_progress=False, delivered=50)
    numbers = summed(SamplePair(sample(topic("orders"), group("g", late), at_s=10), old))
    found = numbers.groups["g"]
    assert (found.out_per_second, found.state) == (10, GroupState.ACTIVE)
    assert (found.lag, found.unknown) == (None, NO_PROGRESS)
    assert numbers.topics["orders"].lag is None


def test_a_group_that_has_polled_is_not_one_that_never_polled() -> None:
    polled = sample(group("g", has_polled=True), at_s=10)
    found = summed(SamplePair(polled, sample(group("g"), at_s=5))).groups["g"]
    assert (found.state, found.lag, found.unknown) == (None, None, NO_PROGRESS)


def test_the_lag_of_a_topic_is_unknown_until_a_broker_has_read_any_progress() -> None:
    known = sample(topic("orders"), group("g", reads("orders", ready=3)))
    unread = sample(topic("orders"), group("g", has_progress=False))
    assert summed(SamplePair(known, known), SamplePair(unread, None)).topics["orders"].lag is None
    new = sample(topic("orders"), group("g", reads("orders")), group("new", has_progress=False))
    assert summed(SamplePair(new, new)).topics["orders"].lag == 0


def state(consumers: Consumers, **counts: int) -> GroupState | None:
    old = sample(topic("orders"), group("g", reads("orders")), at_s=5)
    read = reads("orders", has_progress=True, **counts)
    new = sample(topic("orders"), group("g", read), at_s=10)
    return summed(SamplePair(new, old), consumers=consumers).groups["g"].state


def test_a_group_is_active_with_a_consumer_or_with_deliveries_or_acks() -> None:
    none, unknown = Consumers({}), Consumers(None, "why")
    assert state(Consumers({"g": 1})) is GroupState.ACTIVE
    assert state(none, delivered=1) is GroupState.ACTIVE
    assert state(unknown, acked=1) is GroupState.ACTIVE
    assert state(none, ready=7) is GroupState.IDLE
    assert state(unknown) is None, "a consumer may be connected"


def test_unknown_consumers_have_a_reason() -> None:
    new = sample(group("g", reads("orders")))
    found = summed(SamplePair(new, new), consumers=Consumers(None, "too many clients")).groups["g"]
    assert found.consumers is None
    assert "too many clients" in found.unknown
    assert summed(SamplePair(new, new)).groups["g"].consumers == 0
