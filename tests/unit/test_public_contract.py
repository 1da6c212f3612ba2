"""The public contract agrees with the one inside the official Python client, number by number."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

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
    parts: dict[str, Any] = json.loads(described.stdout)
    return parts


def test_what_both_have_is_the_same() -> None:
    ours, theirs = contract(OURS), contract(THEIRS)
    common = ours.keys() & theirs.keys()
    assert len(common) > 400
    assert {name: ours[name] for name in common} == {name: theirs[name] for name in common}


def test_the_client_has_nothing_that_we_have_not() -> None:
    assert contract(THEIRS).keys() - contract(OURS).keys() == set()


def test_what_only_we_have_is_known() -> None:
    names = {name.removeprefix(PREFIX) for name in contract(OURS).keys() - contract(THEIRS).keys()}
    # The parts of a message are covered by its name.
    parts = {name for name in names if name.partition(".")[0] in ONLY_OURS}
    covering = {name.partition(".")[0] for name in parts}
    assert (names - parts) | covering == ONLY_OURS
