"""The producers that may get the checks of half messages."""

from __future__ import annotations

import pytest

from tidemill.common.errors import Unauthorized
from tidemill.message.client_key import ClientKey
from tidemill.proxy.clients import publishers as publishers_module
from tidemill.proxy.clients.publishers import Publishers
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

A, B = ClientKey("a", 1), ClientKey("b")


def allow(_topic: str) -> None:
    pass


class Follower:
    """A broker that follows the reports."""

    def __init__(self) -> None:
        self.topics: dict[tuple[str, int], list[str]] = {}
        self.reports = 0

    def write(self, report: pb.ProducerReport) -> None:
        self.reports += 1
        for one in report.producers:
            self.topics[one.client_id, one.owner] = list(one.topics)


def test_a_follower_gets_all_producers_and_then_the_changes() -> None:
    publishers, follower = Publishers(), Follower()
    publishers.announce(A, "stream 1", ["x", "y"], allow)
    with publishers.followed(follower.write):
        assert follower.topics == {("a", 1): ["x", "y"]}
        publishers.announce(B, "stream 2", ["x"], allow)
        publishers.announce(B, "stream 2", ["x"], allow)
        assert follower.reports == 2, "an unchanged announcement is not reported"
        publishers.note_sent(B, "z")
        assert follower.topics["b", 0] == ["x", "z"]
        with publishers.open(B, "stream 2"):
            pass
        assert follower.topics["b", 0] == []
    publishers.announce(B, "stream 3", ["x"], allow)
    assert follower.topics["b", 0] == []


def test_a_client_publishes_the_topics_of_all_its_streams() -> None:
    publishers = Publishers()
    publishers.announce(A, "stream 1", ["x"], allow)
    publishers.announce(A, "stream 2", ["y"], allow)
    assert publishers.may_publish(A, "x")
    with publishers.open(A, "stream 1"):
        pass
    assert not publishers.may_publish(A, "x")
    assert publishers.may_publish(A, "y")
    assert not publishers.may_publish(B, "y")


def test_a_client_without_a_stream_gets_no_checks() -> None:
    publishers = Publishers()
    publishers.note_sent(A, "x")
    assert not publishers.may_publish(A, "x")


def test_a_client_that_lost_the_right_gets_no_checks() -> None:
    publishers = Publishers()
    lost: set[str] = set()

    def check(topic: str) -> None:
        if topic in lost:
            raise Unauthorized("no right")

    publishers.announce(A, "stream", ["x"], check)
    assert publishers.may_publish(A, "x")
    lost.add("x")
    assert not publishers.may_publish(A, "x")


def test_the_number_of_reported_pairs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishers_module, "PAIRS_MAX", 3)
    publishers = Publishers()
    publishers.announce(A, "stream 1", ["x", "y"], allow)
    publishers.announce(B, "stream 2", ["x", "y"], allow)
    assert not publishers.may_publish(B, "x")
    publishers.announce(B, "stream 2", ["x"], allow)
    publishers.note_sent(B, "y")
    assert publishers.may_publish(B, "x")
    assert not publishers.may_publish(B, "y")
