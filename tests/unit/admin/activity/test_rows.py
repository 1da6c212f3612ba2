"""Numbers in the lists of the REST API: rows, order, prefixes and history."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import Any, NamedTuple, cast

import pytest

from tests.support.clocks import ManualClock
from tidemill.admin.activity.history import HistoryKey, HistoryObject
from tidemill.admin.activity.numbers import (
    NO_LAST_HOUR,
    ClusterNumbers,
    Consumers,
    GroupNumbers,
    TopicNumbers,
)
from tidemill.admin.activity.rows import (
    GROUP_FIELDS,
    TOO_NEW,
    TOPIC_FIELDS,
    all_unreachable,
    dead_letters_of,
    group_numbers,
    number_of_group,
    number_of_topic,
    sampled_at_ms,
    topic_numbers,
)
from tidemill.admin.activity.sampler import NO_SAMPLE, ActivitySampler, Reading
from tidemill.admin.http.request_access import OPEN, RequestAccess
from tidemill.admin.http.sorting import first_by, of_prefix
from tidemill.admin.routes.history import get_history
from tidemill.common.clock import SystemClock
from tidemill.common.errors import BadRequest, Forbidden
from tidemill.security.table import Mode


class Named(NamedTuple):
    """An item of a list."""

    name: str


def reading(**topics: TopicNumbers | GroupNumbers) -> Reading:
    numbers = ClusterNumbers(7, {"broker-1": "down"}, Consumers({}))
    for name, found in topics.items():
        if isinstance(found, TopicNumbers):
            numbers.topics[name] = found
        else:
            numbers.groups[name] = found
    return Reading(numbers, "")


def test_the_dead_letters_of_hidden_groups_do_not_count() -> None:
    found = reading(
        shown=GroupNumbers(dead_letters=3, dead_letters_last_hour=1),
        settled=GroupNumbers(dead_letters=0, dead_letters_last_hour=2),
        hidden=GroupNumbers(dead_letters=5, dead_letters_last_hour=None),
    )
    total = dead_letters_of(found, lambda name: name != "hidden")
    assert total is not None
    assert (total.open, total.last_hour, total.unknown) == (3, 3, None)
    total = dead_letters_of(found, lambda _name: True)
    assert total is not None
    assert (total.open, total.last_hour, total.unknown) == (8, None, NO_LAST_HOUR)
    assert dead_letters_of(Reading(None, "down"), lambda _name: True) is None


def test_the_largest_or_the_smallest_come_first_and_unknown_ones_last() -> None:
    found = reading(
        few=TopicNumbers(in_per_second=1.0),
        many=TopicNumbers(in_per_second=5.0),
        also_many=TopicNumbers(in_per_second=5.0),
        unknown=TopicNumbers(in_per_second=None),
    )
    items = [Named(name) for name in ("absent", "few", "unknown", "many", "also_many")]

    def order(sort: str, size: int = 10) -> list[str]:
        by = partial(number_of_topic, found)
        return [one.name for one in first_by(items, sort, by, size=size, token=None)]

    assert order("-inPerSecond") == ["also_many", "many", "few", "absent", "unknown"]
    assert order("inPerSecond") == ["few", "also_many", "many", "absent", "unknown"]
    assert order("-inPerSecond", 2) == ["also_many", "many"]
    with pytest.raises(BadRequest, match="pageToken"):
        first_by(items, "-messages", partial(number_of_topic, found), size=1, token="few")


def test_each_field_of_a_sort_is_a_number_of_the_rows() -> None:
    def attribute(field: str) -> str:
        return re.sub("[A-Z]", lambda upper: f"_{upper[0].lower()}", field)

    for fields, numbers in ((TOPIC_FIELDS, TopicNumbers()), (GROUP_FIELDS, GroupNumbers())):
        for field in fields:
            assert hasattr(numbers, attribute(field)), field
    assert number_of_group(reading(g=GroupNumbers(ready=3)), "g", "lag") == 3
    assert number_of_group(Reading(None, "why"), "g", "lag") is None


def test_a_prefix_selects_names() -> None:
    items = [Named("orders"), Named("order"), Named("my-orders")]
    assert of_prefix(items, "order", namespace="") == [Named("orders"), Named("order")]
    assert of_prefix(items, "", namespace="") == items


def test_a_prefix_in_a_namespace_is_that_of_the_names_without_it() -> None:
    items = [Named(name) for name in ("orders", "shop%orders", "shop%bills", "%DLQ%shop%orders")]
    assert of_prefix(items, "ord", namespace="shop") == [Named("shop%orders")]
    assert of_prefix(items, "shop", namespace="shop") == []
    assert of_prefix(items, "shop%ord", namespace="") == [Named("shop%orders")]
    assert of_prefix(items, "%DLQ%ord", namespace="shop") == [Named("%DLQ%shop%orders")]
    assert of_prefix(items, "", namespace="shop") == items[1:]


def test_a_row_has_the_rounded_numbers() -> None:
    found = reading(
        orders=TopicNumbers(messages=4, in_per_second=1 / 3, out_per_second=None),
        billing=GroupNumbers(ready=1, ack_per_second=2 / 3, oldest_unacked_at_ms=9),
    )
    topic, group = topic_numbers(found, "orders"), group_numbers(found, "billing")
    assert (topic.messages, topic.in_per_second, topic.out_per_second) == (4, 0.333, None)
    assert topic.has_consumer is None, "an unreachable broker group may have one"
    assert (group.lag, group.ack_per_second, group.oldest_unacked_at_ms) == (1, 0.667, 9)
    assert sampled_at_ms(found) == 7
    assert all_unreachable(found, ["broker-2"], None) == ["broker-1", "broker-2"]
    assert all_unreachable(Reading(None, "why"), []) is None


def test_a_topic_has_a_consumer_if_a_group_is_given_its_messages() -> None:
    numbers = ClusterNumbers(1, {}, Consumers({}))
    for _ in numbers.add_all({}):
        pass
    numbers.topics.update(read=TopicNumbers(lags={"g": 0}), unread=TopicNumbers())
    found = Reading(numbers, "")
    assert topic_numbers(found, "read").has_consumer is True
    assert topic_numbers(found, "unread").has_consumer is False


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (Reading(None, "no answer"), "no answer"),
        (reading(), "the sample lacks it; broker-1 cannot be reached, and may have it"),
        (Reading(ClusterNumbers(7), ""), TOO_NEW),
    ],
)
def test_a_row_without_numbers_has_the_reason(found: Reading, reason: str) -> None:
    topic, group = topic_numbers(found, "orders"), group_numbers(found, "billing")
    assert topic.model_dump(exclude_none=True) == {"unknown": reason}
    assert group.model_dump(exclude_none=True) == {"unknown": reason}


def sampler() -> ActivitySampler:
    made = ActivitySampler(cast("Any", None), ManualClock(0))
    now_ms = SystemClock().wall_ms()
    point = partial(tuple, (1.0, 2.0, None, 3.0, 0.0))
    for _ in made.history.add(now_ms, [HistoryObject(HistoryKey("topic", "orders"), 3.0, point)]):
        pass
    return made


def test_the_history_has_one_number_per_series_and_step() -> None:
    found = asyncio.run(get_history("topic:orders", OPEN, sampler()))
    document = found.model_dump(by_alias=True, exclude_none=True)
    assert document["series"] == {"in": [1], "out": [2], "ack": [None], "lag": [3], "oldestMs": [0]}
    assert (document["object"], document["stepMs"]) == ("topic:orders", 5_000)


def test_an_object_without_a_history_has_the_reason() -> None:
    found = asyncio.run(get_history("group:orders", OPEN, sampler()))
    assert found.model_dump(exclude_none=True) == {"object": "group:orders", "unknown": NO_SAMPLE}


@pytest.mark.parametrize("named", ["topic:orders", "group:orders"])
def test_the_history_needs_the_right_get(named: str) -> None:
    nobody = RequestAccess(Mode.ON, is_super=False)
    with pytest.raises(Forbidden, match=r"Get on (Topic|Group):orders"):
        asyncio.run(get_history(named, nobody, sampler()))
