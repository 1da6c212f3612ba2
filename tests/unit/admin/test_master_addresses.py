"""Whom the admin process connects to, by what controllers tell."""

from __future__ import annotations

from tidemill.admin.cluster.controllers import ControllerClients
from tidemill.admin.cluster.master_addresses import OLDER_POLLS_MAX, MasterAddresses
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire
from tidemill.stubs.tidemill.replication.v1 import replication_pb2 as replication


def group(*, master: int, version: int, addresses: tuple[str, ...] = ("a:1", "b:1")) -> wire.Group:
    view = replication.GroupView(
        version=version,
        master=replication.Member(replica_id=master),
        addresses=dict(enumerate(addresses)),
    )
    return wire.Group(name="broker-0", view=view)


def test_any_replica_means_the_master_and_what_is_unknown_itself() -> None:
    masters = MasterAddresses(ControllerClients([]))
    assert masters.find("a:1") == "a:1"
    masters.learn(group(master=1, version=3))
    assert [masters.find(each) for each in ("a:1", "b:1", "c:1")] == ["b:1", "b:1", "c:1"]


def test_what_is_older_does_not_count_and_a_move_is_told_once() -> None:
    masters, told = MasterAddresses(ControllerClients([])), []
    masters.add_listener("a:1", lambda: told.append("moved"))
    masters.learn(group(master=0, version=3))
    masters.learn(group(master=1, version=4))
    masters.learn(group(master=0, version=2))
    masters.learn(group(master=1, version=5))
    assert masters.find("a:1") == "b:1"
    assert len(told) == 1


def test_where_a_replica_has_been_still_means_its_group() -> None:
    masters = MasterAddresses(ControllerClients([]))
    masters.learn(group(master=0, version=3))
    masters.learn(group(master=0, version=4, addresses=("c:1", "b:1")))
    assert masters.find("a:1") == "c:1"


def test_an_address_that_comes_to_mean_a_group_is_told_of_its_master() -> None:
    """An admin process names a replica that registers later than the master is known."""
    masters, told = MasterAddresses(ControllerClients([])), []
    masters.add_listener("b:1", lambda: told.append(masters.find("b:1")))
    masters.learn(group(master=0, version=3, addresses=("a:1",)))
    assert not told
    masters.learn(group(master=0, version=4))
    assert told == ["a:1"]


def test_an_older_version_that_is_said_again_and_again_counts() -> None:
    masters = MasterAddresses(ControllerClients([]))
    masters.learn(group(master=0, version=900))
    lost = group(master=1, version=2)
    for _ in range(OLDER_POLLS_MAX - 1):
        masters.learn(lost)
    masters.learn(group(master=0, version=900))  # So it was a controller that lags.
    for _ in range(OLDER_POLLS_MAX - 1):
        masters.learn(lost)
    assert masters.find("b:1") == "a:1"
    masters.learn(lost)
    assert masters.find("a:1") == "b:1"
