"""The causes of a backlog, each from the facts that show it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tidemill.admin.activity.diagnosis import (
    NO_POLL_MS,
    BacklogCause,
    Code,
    GroupFacts,
    Holder,
    find_findings,
)
from tidemill.admin.activity.numbers import GroupState
from tidemill.admin.json.activity import GroupNumbersView
from tidemill.admin.json.conflicts import ConflictView, PolledFilterView, TopicFilterView
from tidemill.admin.json.consumer_groups import GroupPauseView
from tidemill.admin.json.deliveries import QueueLockView
from tidemill.admin.routes.diagnosis import last_poll_ms

NOW_MS = 1_800_000_000_000
GOOD = GroupNumbersView(
    state=GroupState.ACTIVE,
    lag=10,
    ready=6,
    blocked=0,
    in_flight=4,
    consumers=2,
    in_per_second=10.0,
    out_per_second=12.0,
    ack_per_second=12.0,
    retry_per_second=0.0,
)
FACTS = GroupFacts(
    name="billing",
    now_ms=NOW_MS,
    pause=None,
    numbers=GOOD,
    locks=(),
    silent=(),
    conflicts=(),
    has_polled=True,
    no_poll_ms=1_000,
    pollers=("worker-1", "worker-2"),
    has_filter=False,
    oldest_at_ms={},
    retention_ms={},
)


def numbers(**changed: Any) -> GroupFacts:
    return replace(FACTS, numbers=GOOD.model_copy(update=changed))


def lock(queue: int, waiting: int, since_ms: int = NOW_MS - 30_000) -> QueueLockView:
    return QueueLockView(
        topic="orders",
        broker="broker-1",
        queue=queue,
        messages=2,
        offset=5,
        client_id="worker-7",
        since_ms=since_ms,
        until_ms=NOW_MS + 1_000,
        waiting=waiting,
    )


def only(facts: GroupFacts) -> BacklogCause:
    [found] = find_findings(facts)
    return found


def test_a_group_that_keeps_up_has_no_finding() -> None:
    assert find_findings(FACTS) == []


def test_unknown_numbers_give_no_finding() -> None:
    assert find_findings(replace(FACTS, numbers=GroupNumbersView(unknown="no sample yet"))) == []


def test_a_pause_is_named_with_its_author_and_reason() -> None:
    pause = GroupPauseView(until_ms=NOW_MS + 1_000, by="ops", reason="repairs")
    found = only(replace(FACTS, pause=pause))
    assert found.code is Code.PAUSED
    assert "by ops: repairs" in found.text
    assert found.command == "tidemill group resume billing"


def test_a_group_without_consumers_or_polls() -> None:
    assert (
        only(numbers(consumers=0)).text
        == "no consumer is connected, and 6 messages can be received"
    )
    never = numbers(state=GroupState.NEVER_POLLED, lag=None, consumers=0)
    assert only(replace(never, has_polled=False)).code is Code.NEVER_POLLED


def test_a_poll_after_the_sample_of_the_numbers_counts() -> None:
    never = numbers(state=GroupState.NEVER_POLLED, lag=None, consumers=0)
    assert find_findings(replace(never, has_polled=True)) == []


STALLED = replace(
    numbers(ready=20, in_flight=0, out_per_second=0.0, ack_per_second=0.0, in_per_second=0.0),
    no_poll_ms=NO_POLL_MS,
    oldest_at_ms={"orders": NOW_MS - NO_POLL_MS - 1},
)


def test_connected_consumers_that_do_not_poll_are_a_cause() -> None:
    found = only(STALLED)
    assert found.code is Code.NOT_POLLING
    assert found.text.startswith(
        "20 messages can be received, but the group has not polled for at least 1 m"
    )
    assert "with 2 consumers connected" in found.text
    assert found.command == "tidemill client stack worker-1"


def test_the_last_poll_is_unknown_if_no_broker_reports_a_filter() -> None:
    polled = [
        TopicFilterView(topic="orders", expression="*", client_id="worker-1", polled_ms=each)
        for each in (90_000, 70_000)
    ]
    assert last_poll_ms(polled, 900_000) == 70_000
    assert last_poll_ms([], 600_000) is None, "the broker may have started"
    assert last_poll_ms([], 600_001) == 600_000, "it has forgotten the filters"


@pytest.mark.parametrize(
    "changed",
    [
        {"no_poll_ms": NO_POLL_MS - 1},
        {"no_poll_ms": None},
        {"pollers": ()},
        {"oldest_at_ms": {"orders": NOW_MS - NO_POLL_MS}},
        {"numbers": STALLED.numbers.model_copy(update={"ready": 0})},
        {"numbers": STALLED.numbers.model_copy(update={"out_per_second": None})},
        {"numbers": STALLED.numbers.model_copy(update={"out_per_second": 0.2})},
    ],
)
def test_consumers_that_may_poll_are_no_cause(changed: dict[str, Any]) -> None:
    assert find_findings(replace(STALLED, **changed)) == []


def test_the_lock_with_most_messages_behind_it_is_named() -> None:
    found = only(replace(FACTS, locks=[lock(3, 20), lock(1, 5), lock(2, 0)]))
    assert found.code is Code.LOCKED_QUEUE
    assert "queue 3 of orders at broker-1 is locked for 30 s by worker-7" in found.text
    assert found.text.endswith("20 messages behind 2 in flight, and 1 more queues are locked")
    assert found.numbers == {"locked": 2, "waiting": 25, "longestMs": 30_000}


def test_a_lock_without_messages_behind_it_is_no_cause() -> None:
    assert find_findings(replace(FACTS, locks=[lock(3, 0)])) == []


def test_silent_consumers_count_if_they_hold_messages() -> None:
    silent = [
        Holder(client_id="few", silent_ms=20_000, in_flight=1),
        Holder(client_id="many", silent_ms=20_000, in_flight=9),
        Holder(client_id="none", silent_ms=90_000, in_flight=0),
        Holder(client_id="quick", silent_ms=10_000, in_flight=9),
    ]
    found = find_findings(replace(FACTS, silent=silent))
    assert [each.numbers["inFlight"] for each in found] == [9, 1]
    assert found[0].command == "tidemill delivery release billing --client many"


def test_a_command_quotes_names_of_clients() -> None:
    silent = [Holder(client_id="a; rm -rf /", silent_ms=20_000, in_flight=1)]
    found = only(replace(FACTS, silent=silent))
    assert found.command == "tidemill delivery release billing --client 'a; rm -rf /'"


@pytest.mark.parametrize(("repeated", "is_failing"), [(1.2, False), (1.3, True)])
def test_more_than_a_tenth_of_repeated_deliveries_is_a_failure(
    repeated: float, *, is_failing: bool
) -> None:
    codes = [each.code for each in find_findings(numbers(retry_per_second=repeated))]
    assert codes == ([Code.FAILING] if is_failing else [])


def test_slow_consumers_have_the_number_that_is_needed() -> None:
    found = only(numbers(in_per_second=310.0, ack_per_second=2.0, in_flight=4))
    assert found.code is Code.CONSUMERS_SLOW
    assert found.numbers["neededConsumers"] == 310
    assert found.numbers["meanWorkMs"] == 2_000


def test_consumers_that_ack_nothing_have_no_needed_number() -> None:
    found = only(numbers(ack_per_second=0.0))
    assert found.text.endswith("the acks of 2 consumers per second: 0")
    assert "neededConsumers" not in found.numbers


@pytest.mark.parametrize("changed", [{"lag": 0}, {"in_per_second": None}, {"ack_per_second": None}])
def test_consumers_are_not_slow_without_a_backlog_or_rates(changed: dict[str, Any]) -> None:
    facts = numbers(**{"in_per_second": 310.0, "ack_per_second": 2.0, **changed})
    assert find_findings(facts) == []


@pytest.mark.parametrize(("in_rate", "is_slow"), [(110.0, False), (110.1, True)])
def test_a_small_difference_of_rates_is_noise(in_rate: float, *, is_slow: bool) -> None:
    found = find_findings(numbers(in_per_second=in_rate, ack_per_second=100.0))
    assert [each.code for each in found] == [Code.CONSUMERS_SLOW] * is_slow


def test_consumers_are_not_slow_with_a_filter_or_during_a_pause() -> None:
    slow = numbers(in_per_second=310.0, ack_per_second=2.0)
    assert find_findings(replace(slow, has_filter=True)) == []
    pause = GroupPauseView(until_ms=NOW_MS + 1, by="ops")
    assert only(replace(slow, pause=pause)).code is Code.PAUSED


def test_a_longer_retention_is_one_that_the_command_takes() -> None:
    day_ms = 86_400_000
    facts = replace(FACTS, oldest_at_ms={"t": 0}, retention_ms={"t": 300 * day_ms})
    assert only(facts).command == "tidemill topic set t --retention forever"
    facts = replace(FACTS, oldest_at_ms={"t": 0}, retention_ms={"t": day_ms})
    assert only(facts).command == "tidemill topic set t --retention 2d"


def test_conflicts_are_causes() -> None:
    used = PolledFilterView(expression="a", client_id="c", polled_ms=1)
    differ = ConflictView(kind="filter", topic="orders", group="billing", filters=[used, used])
    lost = ConflictView(kind="order", topic="orders", group="billing")
    found = find_findings(replace(FACTS, conflicts=[lost, differ]))
    assert [each.code for each in found] == [Code.SUBSCRIPTIONS_DIFFER, Code.ORDER_LOST]


@pytest.mark.parametrize(
    ("age_ms", "kept_ms", "is_near"), [(800, 1_000, False), (801, 1_000, True), (10**12, -1, False)]
)
def test_messages_near_their_retention_are_a_cause(
    age_ms: int, kept_ms: int, *, is_near: bool
) -> None:
    facts = replace(FACTS, oldest_at_ms={"t": NOW_MS - age_ms}, retention_ms={"t": kept_ms})
    assert [each.code for each in find_findings(facts)] == [Code.RETENTION_NEAR] * is_near


def test_the_retention_of_an_unknown_topic_is_no_cause() -> None:
    assert find_findings(replace(FACTS, oldest_at_ms={"t": 0})) == []


def test_causes_come_in_the_order_of_their_codes() -> None:
    facts = replace(
        numbers(consumers=0, retry_per_second=9.0),
        pause=GroupPauseView(until_ms=NOW_MS + 1, by="ops"),
        locks=[lock(1, 1)],
        oldest_at_ms={"t": 0},
        retention_ms={"t": 1_000},
    )
    codes = [each.code for each in find_findings(facts)]
    assert codes == sorted(codes, key=list(Code).index)
    assert len(codes) == 5
