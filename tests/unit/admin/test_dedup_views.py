"""The deduplication of a topic in JSON."""

from __future__ import annotations

from tidemill.admin.json.render import topic_of
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

POLICY = pb.DedupPolicy(
    window_ms=1_000, key_from=pb.DEDUP_KEY_SOURCE_PROPERTY, mode=pb.DEDUP_MODE_FIRST
)


def topic(placement: pb.KeyPlacement | None, dedup: pb.DedupPolicy | None) -> pb.TopicConfig:
    return pb.TopicConfig(
        name="jobs", type=pb.TOPIC_TYPE_MIXED, queues=1, dedup=dedup, placement=placement
    )


def test_the_list_before_an_open_spread_are_the_old_owners() -> None:
    placement = pb.KeyPlacement(broker_groups=["a", "b"], version=2, before=["a"])
    view = topic_of(topic(placement, POLICY))
    assert view.dedup is not None
    assert (view.dedup.broker_groups, view.dedup.moving_from) == (["a", "b"], ["a"])
    assert view.dedup_off_pending is None


def test_without_deduplication_the_list_before_are_the_broker_groups_that_may_know_keys() -> None:
    view = topic_of(topic(pb.KeyPlacement(version=2, before=["a"]), None))
    assert (view.dedup, view.dedup_off_pending) == (None, ["a"])
    view = topic_of(topic(None, None))
    assert (view.dedup, view.dedup_off_pending) == (None, None)
