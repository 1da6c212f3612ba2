"""The configuration of a broker at the proxy."""

from __future__ import annotations

from tidemill.proxy.link.broker_configuration import BrokerConfiguration
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


def test_a_configuration_does_not_keep_its_frame_in_memory() -> None:
    """A reference to a part of a frame would keep the frame, with megabytes of replies."""
    frame = pb.ReplyFrame(
        config=pb.ConfigUpdate(
            topics=[pb.TopicConfig(name="topic", queues=8)],
            groups=[pb.GroupConfig(name="group", id=1)],
            membership=pb.Membership(cluster_id="one"),
        )
    )
    configuration = BrokerConfiguration()
    configuration.apply(frame.config)
    frame.config.topics[0].queues = 9
    frame.config.groups[0].id = 2
    frame.config.membership.cluster_id = "another"
    assert configuration.topics["topic"].queues == 8
    assert configuration.groups["group"].id == 1
    assert configuration.membership.cluster_id == "one"
