"""The public contract agrees with the one inside the official Python client, number by number."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tidemill.stubs.apache.rocketmq.v2 import service_pb2
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2
from tidemill.transport.aio.reflection import public_pool

DESCRIBE = Path(__file__).parent.parent / "support" / "describe_contract.py"
OURS = "tidemill.stubs.apache.rocketmq.v2"
THEIRS = "rocketmq.grpc_protocol"

PREFIX = "apache.rocketmq.v2."

# Added to the protocol after client 5.1.2 was published.
ONLY_OURS = {
    "Code.INVALID_CLIENT_PROPERTIES",
    "Settings.client_properties",
    "Settings.ClientPropertiesEntry",
    "Settings.ClientPropertiesEntry.key",
    "Settings.ClientPropertiesEntry.value",
    # Under a number that the protocol does not use: what a pull tells besides.
    "Provenance",
    "SystemProperties.provenance",
    # Methods, messages and enums of the admin service, each with all its parts.
    "Admin.AdminSendMessage",
    "Admin.DeleteSubscription",
    "Admin.DescribeGroupAccumulation",
    "Admin.DescribeSubscription",
    "Admin.DescribeTopicStatus",
    "Admin.GetConsumerRunningInfo",
    "Admin.GetProxyRuntimeStats",
    "Admin.GetTopicRoute",
    "Admin.ListConsumerConnection",
    "Admin.ListSubscription",
    "Admin.PrintThreadStackTrace",
    "Admin.QueryMessage",
    "Admin.QueryTimeSpan",
    "Admin.ResetGroupOffset",
    "Admin.VerifyMessage",
    "AdminSendMessageRequest",
    "AdminSendMessageResponse",
    "ClientInfo",
    "ConsumeStatus",
    "ConsumerRunningInfo",
    "DeleteSubscriptionRequest",
    "DeleteSubscriptionResponse",
    "DescribeGroupAccumulationRequest",
    "DescribeGroupAccumulationResponse",
    "DescribeSubscriptionRequest",
    "DescribeSubscriptionResponse",
    "DescribeTopicStatusRequest",
    "DescribeTopicStatusResponse",
    "GetConsumerRunningInfoRequest",
    "GetConsumerRunningInfoResponse",
    "GetProxyRuntimeStatsRequest",
    "GetProxyRuntimeStatsResponse",
    "GetTopicRouteRequest",
    "GetTopicRouteResponse",
    "ListConsumerConnectionRequest",
    "ListConsumerConnectionResponse",
    "ListMessageRequest",
    "ListMessageResponse",
    "ListSubscriptionRequest",
    "ListSubscriptionResponse",
    "MessageModel",
    "MessageQueueItem",
    "PrintThreadStackTraceRequest",
    "PrintThreadStackTraceResponse",
    "ProcessQueueInfo",
    "QueryTimeSpanRequest",
    "QueryTimeSpanResponse",
    "ResetGroupOffsetRequest",
    "ResetGroupOffsetResponse",
    "SubscriptionInfo",
    "VerifyMessageRequest",
    "VerifyMessageResponse",
}


@cache
def contract(package: str) -> dict[str, Any]:
    modules = [f"{package}.{name}_pb2" for name in ("definition", "service", "admin")]
    described = subprocess.run(
        [sys.executable, str(DESCRIBE), *modules], check=True, capture_output=True, text=True
    )
    # So that both may be in one process ours are compiled under another name.
    parts: dict[str, Any] = json.loads(described.stdout.replace(f"tidemill.{PREFIX}", PREFIX))
    return parts


def test_shared_contract_names_are_equal() -> None:
    ours, theirs = contract(OURS), contract(THEIRS)
    common = ours.keys() & theirs.keys()
    assert len(common) > 400
    assert {name: ours[name] for name in common} == {name: theirs[name] for name in common}


def test_the_client_has_nothing_that_we_have_not() -> None:
    assert contract(THEIRS).keys() - contract(OURS).keys() == set()


@pytest.mark.parametrize(
    "modules",
    [
        ("rocketmq", "tidemill.stubs.apache.rocketmq.v2.service_pb2"),
        ("tidemill.stubs.apache.rocketmq.v2.service_pb2", "rocketmq"),
        ("rocketmq", "tidemill_pipeline.client", "tidemill.stubs.apache.rocketmq.v2.admin_pb2"),
    ],
)
def test_the_official_client_and_ours_live_in_one_process(modules: tuple[str, ...]) -> None:
    imports = "; ".join(f"import {module}" for module in modules)
    done = subprocess.run(
        [sys.executable, "-c", imports], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_reflection_lists_the_public_names() -> None:
    assert {service_pb2.DESCRIPTOR.name, pipeline_pb2.DESCRIPTOR.name}, "both are loaded"
    services = "apache.rocketmq.v2.MessagingService", "tidemill.pipeline.v1.PipelineSource"
    pool = public_pool(services)
    send = pool.FindServiceByName(services[0]).methods_by_name["SendMessage"]
    assert send.input_type.full_name == "apache.rocketmq.v2.SendMessageRequest"
    messages = send.input_type.fields_by_name["messages"].message_type
    assert messages is not None
    assert messages.full_name == "apache.rocketmq.v2.Message"
    read = pool.FindServiceByName(services[1]).methods_by_name["ReadMessages"].output_type
    assert read.fields_by_name["messages"].message_type is messages


def test_additional_contract_names_are_listed() -> None:
    names = {name.removeprefix(PREFIX) for name in contract(OURS).keys() - contract(THEIRS).keys()}
    # The parts of a message are covered by its name.
    parts = {name for name in names if name.partition(".")[0] in ONLY_OURS}
    covering = {name.partition(".")[0] for name in parts}
    assert (names - parts) | covering == ONLY_OURS
