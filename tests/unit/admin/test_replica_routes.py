"""The replicas, as the controllers know them."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from tests.support.worlds.fake_calls import CallsByRequest
from tidemill.admin.cluster.brokers import BrokerGroupClient
from tidemill.admin.routes.broker_groups import list_broker_groups
from tidemill.admin.routes.replicas import list_replicas
from tidemill.common.errors import NotMaster
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire


class Controllers:
    """Controllers with one broker group that has an alarm."""

    async def groups(self) -> list[wire.BrokerGroupStatus]:
        return [
            wire.BrokerGroupStatus(
                name="broker-0", alarm="run: tidemill broker-group transfer --unclean"
            )
        ]


class HomeWithoutMaster:
    """The brokers of a cluster. Its home has no master."""

    async def members(self) -> list[object]:
        raise NotMaster("this replica is not the master; call the master")


def test_controllers_are_shown_while_no_replica_of_the_home_is_master() -> None:
    shown = asyncio.run(list_replicas(cast("Any", Controllers()), cast("Any", HomeWithoutMaster())))
    assert [one.alarm for one in shown.items] == ["run: tidemill broker-group transfer --unclean"]


class Master(CallsByRequest):
    """The client of a broker group: it reaches the master wherever the master is."""

    async def get_broker_status(self, _request: pb.GetBrokerStatusRequest) -> pb.BrokerStatus:
        return pb.BrokerStatus(name="broker-0", replica_name="broker-0-1", epoch=2)

    async def list_broker_groups(self, _request: pb.ListBrokerGroupsRequest) -> pb.BrokerGroupList:
        return pb.BrokerGroupList()


class Home:
    """The brokers of a cluster with one broker group, listed with the address of replica 0."""

    async def members(self) -> list[BrokerGroupClient]:
        return [BrokerGroupClient("broker-0", "h0:1", True, False, cast("Any", Master()))]


class ControllersOfReplicas:
    """Controllers that know two replicas and maybe a master."""

    are_configured = True

    def __init__(self, master: int | None) -> None:
        self.master = master

    async def groups(self) -> list[wire.BrokerGroupStatus]:
        replicas = [wire.ReplicaStatus(replica_id=n, address=f"h{n}:1") for n in range(2)]
        group = wire.BrokerGroupStatus(name="broker-0", replicas=replicas)
        if self.master is not None:
            group.view.master.replica_id = self.master
        return [group]


@pytest.mark.parametrize(("master", "address"), [(0, "h0:1"), (1, "h1:1"), (None, None)])
def test_a_broker_group_shows_the_address_of_its_master(
    master: int | None, address: str | None
) -> None:
    controllers = cast("Any", ControllersOfReplicas(master))
    shown = asyncio.run(list_broker_groups(cast("Any", Home()), controllers)).items[0]
    assert (shown.address, shown.master_address) == ("h0:1", address)
