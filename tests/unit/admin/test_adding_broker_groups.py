"""The checks before a broker group is added, moved or drained."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple, cast

import pytest

from tests.support.worlds.fake_calls import CallsByRequest
from tidemill.admin.audit.author import Author
from tidemill.admin.http.actor import Actor
from tidemill.admin.http.request_access import OPEN
from tidemill.admin.json.broker_groups import BrokerGroupChangeView, NewBrokerGroup
from tidemill.admin.routes.broker_groups import add_broker_group, drain_broker_group
from tidemill.common.errors import BadRequest, BrokerGroupUnreachable, BrokerTimeout, Conflict
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

AUTHOR = Author(Actor("", "", "me", "10.1.2.3"), "admin", "PUT /broker-groups/{name}")


class Client(CallsByRequest):
    """The client of an address with a broker, or without one."""

    def __init__(self, name: str = "", home: Any = None) -> None:
        self._name = name
        self._home = home

    async def get_broker_status(self, _request: pb.GetBrokerStatusRequest) -> pb.BrokerStatus:
        if not self._name:
            raise BrokerTimeout("no broker answers")
        return pb.BrokerStatus(name=self._name)

    async def get_config(self, _request: pb.GetConfigRequest) -> pb.ConfigUpdate:
        return pb.ConfigUpdate(
            broker_name="broker-0", membership=pb.Membership(cluster_id=self._home.cluster_id)
        )

    async def add_broker_group(self, request: pb.AddBrokerGroupRequest) -> pb.BrokerGroup:
        self._home.addresses.setdefault(request.name, request.address)
        if self._home.moves_members:
            self._home.addresses[request.name] = request.address
        address = self._home.addresses[request.name]
        return pb.BrokerGroup(member=pb.ClusterMember(name=request.name, address=address))

    async def list_broker_groups(self, request: pb.ListBrokerGroupsRequest) -> pb.BrokerGroupList:
        assert request.with_backlog
        return pb.BrokerGroupList()


class Member(NamedTuple):
    name: str
    address: str
    is_home: bool
    is_draining: bool
    client: Client


class Cluster:
    """The home and broker-1, which are up, and broker-2, which is not a member yet."""

    def __init__(self) -> None:
        self.addresses = {"broker-0": "h0:1", "broker-1": "h1:1"}
        self.is_up = True
        self.cluster_id = "c"
        self.moves_members = True
        self._at = {f"h{n}:1": f"broker-{n}" for n in range(3)}

    async def client_at(self, address: str) -> Client:
        return Client(self._at.get(address, ""), self)

    async def refresh(self) -> None:
        if not self.is_up:
            raise BrokerTimeout("it does not answer")

    async def home(self) -> Client:
        return await self.client_at("h0:1")

    async def members(self) -> list[Member]:
        return [
            Member(name, at, name == "broker-0", False, await self.client_at(at))
            for name, at in self.addresses.items()
        ]


def add(
    cluster: Cluster, name: str, address: str, *, force: bool = False, dry_run: bool = False
) -> BrokerGroupChangeView:
    new = NewBrokerGroup(address=address, force=force)
    return asyncio.run(
        add_broker_group(name, new, cast("Any", cluster), OPEN, "me", AUTHOR, dry_run=dry_run)
    )


def test_a_broker_with_the_name_at_the_address_is_added() -> None:
    cluster = Cluster()
    assert add(cluster, "broker-2", "h2:1", dry_run=True).group.address == "h2:1"
    assert "broker-2" not in cluster.addresses
    assert add(cluster, "broker-2", "h2:1").group.address == "h2:1"


def test_a_broker_group_that_is_alone_adds_itself_first() -> None:
    cluster = Cluster()
    cluster.cluster_id = ""
    with pytest.raises(Conflict, match="tidemill broker-group add broker-0 ADDRESS"):
        add(cluster, "broker-2", "h2:1")
    assert "broker-2" not in cluster.addresses


def test_without_force_a_broker_must_answer_at_the_address() -> None:
    cluster = Cluster()
    with pytest.raises(Conflict, match="no broker answers at h9:1"):
        add(cluster, "broker-9", "h9:1")
    with pytest.raises(Conflict, match="is called broker-2, not broker-9"):
        add(cluster, "broker-9", "h2:1")
    with pytest.raises(BadRequest, match="not a valid name"):
        add(cluster, "bro ker", "h2:1", force=True)
    assert add(cluster, "broker-9", "h9:1", force=True).group.address == "h9:1"


def test_a_member_is_not_moved_to_an_address_without_a_broker() -> None:
    cluster = Cluster()
    with pytest.raises(Conflict, match="broker-1 stays at h1:1"):
        add(cluster, "broker-1", "h9:1")
    assert cluster.addresses["broker-1"] == "h1:1"
    # The same address needs no check, so a drain can be undone while the member is down.
    assert add(cluster, "broker-1", "h1:1").group.address == "h1:1"


def test_a_home_that_keeps_the_old_address_is_a_conflict() -> None:
    cluster = Cluster()
    cluster.moves_members = False
    with pytest.raises(Conflict, match="broker-1 stays at h1:1"):
        add(cluster, "broker-1", "h9:1", force=True)


def test_a_dry_run_of_a_drain_fails_while_the_home_is_unreachable() -> None:
    cluster = Cluster()
    cluster.is_up = False
    with pytest.raises(BrokerGroupUnreachable, match="the home is unreachable"):
        asyncio.run(
            drain_broker_group("broker-1", cast("Any", cluster), "me", AUTHOR, dry_run=True)
        )
