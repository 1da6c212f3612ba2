"""The producers that may get the checks of half messages."""

from __future__ import annotations

import pytest

from tidemill.common.errors import Unauthorized
from tidemill.message.client_key import ClientKey
from tidemill.proxy.clients import publishers as publishers_module
from tidemill.proxy.clients.publishers import Publishers
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

A, B = ClientKey("a", 1), ClientKey("b")


class Stream:
    """A stream that is only compared."""

    connection = "connection"

    def drain_connection(self) -> None:
        raise AssertionError("unused")

    def hold(self, size_bytes: int) -> bool:
        raise AssertionError(size_bytes)

    def release(self, size_bytes: int) -> None:
        raise AssertionError(size_bytes)

    async def send(self, message: bytes) -> None:
        raise AssertionError(message)


ONE, TWO, THREE = Stream(), Stream(), Stream()


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
    publishers.announce(A, ONE, ["x", "y"], allow)
    with publishers.followed(follower.write):
        assert follower.topics == {("a", 1): ["x", "y"]}
        publishers.announce(B, TWO, ["x"], allow)
        publishers.announce(B, TWO, ["x"], allow)
        assert follower.reports == 2, "an unchanged announcement is not reported"
        publishers.note_sent(B, "z")
        assert follower.topics["b", 0] == ["x", "z"]
        with publishers.open(B, TWO, allow):
            pass
        assert follower.topics["b", 0] == []
    publishers.announce(B, THREE, ["x"], allow)
    assert follower.topics["b", 0] == []


def test_a_client_publishes_the_topics_of_all_its_streams() -> None:
    publishers = Publishers()
    publishers.announce(A, ONE, ["x"], allow)
    publishers.announce(A, TWO, ["y"], allow)
    assert publishers.stream_of(A, "x")
    with publishers.open(A, ONE, allow):
        pass
    assert not publishers.stream_of(A, "x")
    assert publishers.stream_of(A, "y")
    assert not publishers.stream_of(B, "y")


def test_a_client_without_a_stream_gets_no_checks() -> None:
    publishers = Publishers()
    publishers.note_sent(A, "x")
    assert not publishers.stream_of(A, "x")


def test_a_stream_without_settings_gets_the_checks_of_half_messages() -> None:
    """The Python client opens its stream again minutes before it sends its settings."""
    publishers, follower = Publishers(), Follower()
    with publishers.followed(follower.write):
        with publishers.open(A, ONE, allow):
            assert not publishers.stream_of(A, "x")
            publishers.note_sent(A, "x")
            assert publishers.stream_of(A, "x") is ONE
            assert follower.topics == {("a", 1): ["x"]}
            publishers.announce(A, ONE, ["y"], allow)
            assert follower.topics == {("a", 1): ["x", "y"]}
        assert follower.topics == {("a", 1): []}
        publishers.note_sent(A, "x")
        assert not publishers.stream_of(A, "x")


def test_the_stream_of_a_consumer_gets_no_checks() -> None:
    publishers = Publishers()
    with publishers.open(A, ONE, allow):
        publishers.exclude(A, ONE)
        publishers.note_sent(A, "x")
        assert not publishers.stream_of(A, "x")


def test_a_client_that_lost_the_right_gets_no_checks() -> None:
    publishers = Publishers()
    lost: set[str] = set()

    def check(topic: str) -> None:
        if topic in lost:
            raise Unauthorized("no right")

    publishers.announce(A, ONE, ["x"], check)
    assert publishers.stream_of(A, "x")
    lost.add("x")
    assert not publishers.stream_of(A, "x")


def test_a_check_goes_to_a_stream_that_publishes_its_topic() -> None:
    publishers = Publishers()
    publishers.announce(A, ONE, ["x"], allow)
    publishers.announce(A, TWO, ["y"], allow)
    assert publishers.stream_of(A, "x") is ONE
    assert publishers.stream_of(A, "y") is TWO
    publishers.note_sent(A, "z")
    assert publishers.stream_of(A, "z") is TWO


def test_a_topic_of_a_half_message_survives_new_settings() -> None:
    publishers = Publishers()
    publishers.announce(A, ONE, [], allow)
    publishers.note_sent(A, "x")
    publishers.announce(A, ONE, [], allow)
    assert publishers.stream_of(A, "x") is ONE


def test_a_sharer_gets_as_many_pairs_as_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishers_module, "PAIRS_MAX", 8)
    publishers, follower = Publishers(), Follower()
    with publishers.followed(follower.write):
        publishers.announce(A, ONE, [f"t{n}" for n in range(20)], allow, sharer="large")
        assert len(follower.topics["a", 1]) == 4
        publishers.announce(B, TWO, ["x"], allow, sharer="small")
        assert publishers.stream_of(B, "x") is TWO
        publishers.announce(A, ONE, ["t0"], allow, sharer="large")
        assert follower.topics["a", 1] == ["t0"]


def test_a_client_has_few_topics_of_half_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishers_module, "SENT_TOPICS_MAX", 2)
    publishers, follower = Publishers(), Follower()
    publishers.announce(A, ONE, [], allow)
    with publishers.followed(follower.write):
        for topic in ("x", "y", "z"):
            publishers.note_sent(A, topic)
    assert follower.topics["a", 1] == ["y", "z"], "the newest"
