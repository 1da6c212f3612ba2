"""The calls about topics."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from google.protobuf.timestamp_pb2 import Timestamp

from tidemill.admin.cluster import calls
from tidemill.admin.grpc.calls import AdminCall, missing_note, ok
from tidemill.admin.json import render
from tidemill.stubs.apache.rocketmq.v2 import admin_pb2 as admin
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.admin.cluster.brokers import BrokerAnswers

# The permissions of a queue in the route data of RocketMQ.
READ_ONLY: Final = 4
READ_WRITE: Final = 6
TYPE_TAG: Final = "message.type"  # the name of this attribute of a topic in RocketMQ


async def describe_topic_status(
    call: AdminCall, _request: admin.DescribeTopicStatusRequest
) -> admin.DescribeTopicStatusResponse:
    """Describe a topic. A MIXED topic has no single type, so its type is only in the tags."""
    found = await call.brokers.call_home(
        calls.GET_TOPIC_STATUS, pb.GetTopicStatusRequest(name=call.topic)
    )
    config = found.answers[0].value.topic
    message_type = render.topic_of(config).message_type.value
    names = v2.MessageType.keys()
    answer = admin.DescribeTopicStatusResponse(
        status=ok(missing_note(found.unreachable)),
        topic_message_type=v2.MessageType.Value(message_type)
        if message_type in names
        else v2.MESSAGE_TYPE_UNSPECIFIED,
        tags={TYPE_TAG: message_type},
    )
    if config.created_at_ms:
        answer.create_timestamp.CopyFrom(timestamp_of(config.created_at_ms))
    return answer


async def get_topic_route(
    call: AdminCall, _request: admin.GetTopicRouteRequest
) -> admin.GetTopicRouteResponse:
    """Return the queues of a topic by broker group, as the route data of RocketMQ.

    `brokerAddrs` is empty: clients connect to proxies, and never to brokers.
    """
    found = await status_everywhere(call)
    draining = {each.name for each in await call.brokers.members() if each.is_draining}
    route = {
        "brokerDatas": [
            {"cluster": call.parts.cluster, "brokerName": broker, "brokerAddrs": {}}
            for broker, _ in found.answers
        ],
        "queueDatas": [
            {
                "brokerName": broker,
                "readQueueNums": len(status.queues),
                "writeQueueNums": 0 if broker in draining else len(status.queues),
                "perm": READ_ONLY if broker in draining else READ_WRITE,
                "topicSysFlag": 0,
            }
            for broker, status in found.answers
        ],
    }
    return admin.GetTopicRouteResponse(
        status=ok(missing_note(found.unreachable)), topic_route_data=json.dumps(route)
    )


async def status_everywhere(call: AdminCall) -> BrokerAnswers[pb.TopicStatus]:
    """Return the status of the topic at all broker groups."""
    return await call.brokers.call_all(
        calls.GET_TOPIC_STATUS, pb.GetTopicStatusRequest(name=call.topic)
    )


def timestamp_of(at_ms: int) -> Timestamp:
    """Return a time of the protocol."""
    seconds, ms = divmod(at_ms, 1_000)
    return Timestamp(seconds=seconds, nanos=ms * 1_000_000)
