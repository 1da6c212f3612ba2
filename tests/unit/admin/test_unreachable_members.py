"""Broker groups that the home cannot reach, as operators see them."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from tests.support.worlds.fake_calls import CallsByRequest
from tidemill.admin.cluster.brokers import MEMBER_UNREACHABLE_MS, BrokerGroupClient, Brokers
from tidemill.admin.routes.broker_groups import list_broker_groups
from tidemill.admin.routes.replicas import get_replicas, list_replicas
from tidemill.common.errors import BrokerTimeout, BrokerUnreachable, Draining, ServiceError
from tidemill.common.readiness import ProcessReadiness
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire

NO_CLIENT = cast("Any", None)  # none of these tests calls a broker


def member(name: str, unreachable_ms: int, reason: str = "") -> BrokerGroupClient:
    return BrokerGroupClient(
        name, f"{name}:1", name == "broker-0", False, NO_CLIENT, unreachable_ms, reason
    )


class Cluster:
    """The home and two members."""

    def __init__(self) -> None:
        self.listed = [
            member("broker-0", 0),
            member("broker-1", MEMBER_UNREACHABLE_MS, "it refuses"),
            member("broker-2", MEMBER_UNREACHABLE_MS - 1, "it refuses"),
        ]
        self.is_up = True

    async def members(self) -> list[BrokerGroupClient]:
        if not self.is_up:
            raise BrokerUnreachable("no broker answers")
        return self.listed


class Controllers:
    async def groups(self, name: str = "") -> list[wire.BrokerGroupStatus]:
        names = [name] if name else ["broker-0", "broker-1", "broker-2"]
        alarms = {"broker-1": "only 1 replica is in sync"}
        return [wire.BrokerGroupStatus(name=one, alarm=alarms.get(one, "")) for one in names]


def alarms(cluster: Cluster) -> list[str | None]:
    listed = asyncio.run(list_replicas(cast("Any", Controllers()), cast("Any", cluster)))
    return [group.alarm for group in listed.items]


def test_the_alarm_of_a_broker_group_says_that_the_home_cannot_reach_it() -> None:
    cluster = Cluster()
    alarm = "only 1 replica is in sync; the home has not reached it for 10 s: it refuses"
    assert alarms(cluster) == [None, alarm, None]
    shown = get_replicas("broker-1", cast("Any", Controllers()), cast("Any", cluster))
    assert asyncio.run(shown).alarm == alarm


def test_the_replicas_are_shown_while_no_broker_answers() -> None:
    cluster = Cluster()
    cluster.is_up = False
    assert alarms(cluster) == [None, "only 1 replica is in sync", None]


def test_a_member_that_is_connected_and_mute_is_described() -> None:
    one = member("broker-1", 12_345)
    assert one.describe_problem() == (
        "the home has not reached it for 12 s: it is connected and does not answer"
    )


@pytest.mark.parametrize("is_listed", [True, False])
def test_readiness_names_members_without_a_change_of_the_status(is_listed: bool) -> None:
    brokers = Brokers([], NO_CLIENT, timeout_ms=1)
    readiness = ProcessReadiness(find_problems=brokers.problems)
    readiness.phase = "serving"
    if is_listed:
        brokers._members = Cluster().listed
    problem = "[!] broker-1: the home has not reached it for 10 s: it refuses"
    assert readiness.report() == (True, ["ready", *[problem] * is_listed])


class FailedClient(CallsByRequest):
    """The client of a broker that is unreachable for one reason."""

    def __init__(self, error: ServiceError) -> None:
        self._error = error

    async def get_broker_status(self, _request: pb.GetBrokerStatusRequest) -> pb.BrokerStatus:
        raise self._error

    async def list_broker_groups(self, _request: pb.ListBrokerGroupsRequest) -> pb.BrokerGroupList:
        raise self._error


class NoControllers:
    are_configured = False


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (BrokerTimeout("no reply"), "it does not answer"),
        (BrokerUnreachable("refused"), "no connection"),
        (Draining("it stops"), "it is stopping"),
    ],
)
def test_the_list_states_why_the_admin_process_does_not_reach_a_broker(
    error: ServiceError, reason: str
) -> None:
    cluster = Cluster()
    client = cast("Any", FailedClient(error))
    cluster.listed = [cluster.listed[0]._replace(client=client)]
    listing = list_broker_groups(cast("Any", cluster), cast("Any", NoControllers()))
    [group] = asyncio.run(listing).items
    assert not group.reachable
    assert group.reason == f"unreachable from the admin process: {reason}"
