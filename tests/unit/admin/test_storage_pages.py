"""GET /storage: pages over several broker groups, and the words for what keeps messages."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.admin.cluster.brokers import BrokerAnswer
from tidemill.admin.routes.storage import page_of_topics
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

DAY_MS = 86_400_000
HOUR_MS = 3_600_000


def topic(name: str, live: int | None = 1, **retention: Any) -> pb.TopicStorage:
    found = pb.TopicStorage(name=name, retention=pb.TopicRetention(**{"ms": DAY_MS, **retention}))
    if live is not None:
        found.live_bytes, found.log_bytes, found.freed_by_deletion_bytes = live, 2 * live, 3 * live
    return found


def answer(broker: str, *names: str, last: str = "") -> BrokerAnswer[pb.GetStorageReply]:
    topics = [topic(name) for name in names]
    return BrokerAnswer(broker, pb.GetStorageReply(topics=topics, last_topic=last))


def test_a_page_ends_before_topics_that_another_broker_group_may_have() -> None:
    page, token = page_of_topics([answer("x", "a", "d", last="d"), answer("y", "b", "e")], 2)
    assert [one.name for one in page] == ["a", "b"]
    assert token == "b"
    page, token = page_of_topics([answer("x", "a", "b", last="b"), answer("y", "c", "e")], 2)
    assert [one.name for one in page] == ["a", "b"]
    assert token == "b"
    # Topics of the end were deleted meanwhile.
    page, token = page_of_topics([answer("x", "a", last="c"), answer("y", "d")], 2)
    assert [one.name for one in page] == ["a"]
    assert token == "c"


def test_the_last_page_has_no_token() -> None:
    page, token = page_of_topics([answer("x", "a", "b"), answer("y", "b", "c")], 3)
    assert [one.name for one in page] == ["a", "b", "c"]
    assert token is None
    assert page_of_topics([answer("x")], 3) == ([], None)


def test_a_topic_has_the_sums_of_its_broker_groups() -> None:
    answers = [
        BrokerAnswer("x", pb.GetStorageReply(topics=[topic("a", 5)])),
        BrokerAnswer("y", pb.GetStorageReply(topics=[topic("a", 7)])),
    ]
    ((found,), _) = page_of_topics(answers, 1)
    assert (found.live_bytes, found.bytes, found.freed_by_deletion_bytes) == (12, 24, 36)
    assert [(one.broker, one.live_bytes, one.bytes) for one in found.broker_groups] == [
        ("x", 5, 10),
        ("y", 7, 14),
    ]


def test_a_sum_is_unknown_while_one_broker_group_counts() -> None:
    answers = [
        BrokerAnswer("x", pb.GetStorageReply(topics=[topic("a", 5)])),
        BrokerAnswer("y", pb.GetStorageReply(topics=[topic("a", None)])),
    ]
    ((found,), _) = page_of_topics(answers, 1)
    assert (found.live_bytes, found.bytes, found.freed_by_deletion_bytes) == (None, None, None)
    assert [one.live_bytes for one in found.broker_groups] == [5, None]
    assert [one.kept_by for one in found.broker_groups] == ["retention.ms 1d", None]


@pytest.mark.parametrize(
    ("retention", "words"),
    [
        ({"ms": 3 * DAY_MS}, "retention.ms 3d"),
        ({"ms": 90 * 60_000 + 250}, "retention.ms 1h30m250ms"),
        ({"ms": 0}, "retention.ms 0s"),
        ({"ms": -1}, "for ever"),
        ({"ms": -1, "bytes": 10 << 30}, "for ever, retention.bytes 10GiB"),
        ({"bytes": (1 << 20) + 1}, "retention.ms 1d, retention.bytes 1048577B"),
        ({"frees_acked": True}, "retention.ms 1d, retention.acked free"),
    ],
)
def test_the_words_are_those_of_the_settings(retention: dict[str, int], words: str) -> None:
    reply = pb.GetStorageReply(topics=[topic("a", **retention)])
    ((found,), _) = page_of_topics([BrokerAnswer("x", reply)], 1)
    assert found.broker_groups[0].kept_by == words


def test_an_archive_keeps_messages_longer_than_their_retention() -> None:
    kept = topic("a")
    kept.waits_for_archive = True
    ((found,), _) = page_of_topics([BrokerAnswer("x", pb.GetStorageReply(topics=[kept]))], 1)
    assert found.broker_groups[0].kept_by == "archive gate"


def test_nothing_keeps_a_topic_without_live_messages() -> None:
    ((found,), _) = page_of_topics(
        [BrokerAnswer("x", pb.GetStorageReply(topics=[topic("a", 0)]))], 1
    )
    assert found.broker_groups[0].kept_by is None
    assert found.bytes == 0
