"""The address of the master of a broker group, from the records of controllers."""

from __future__ import annotations

from tidemill.admin.cluster.controllers import ControllerClients
from tidemill.admin.cluster.master_addresses import OLDER_POLLS_MAX, MasterAddresses
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire
from tidemill.stubs.tidemill.replication.v1 import replication_pb2 as replication


def group(
    *, master: int, version: int, addresses: tuple[str, ...] = ("a:1", "b:1")
) -> wire.BrokerGroupStatus:
    view = replication.ReplicationView(
        version=version,
        master=replication.ReplicaRun(replica_id=master),
        addresses=dict(enumerate(addresses)),
    )
    return wire.BrokerGroupStatus(name="broker-0", view=view)


def test_any_replica_stands_for_the_master_and_an_unknown_address_for_itself() -> None:
    masters = MasterAddresses(ControllerClients([]))
    assert masters.find("a:1") == "a:1"
    masters.learn(group(master=1, version=3))
    assert [masters.find(each) for each in ("a:1", "b:1", "c:1")] == ["b:1", "b:1", "c:1"]


def test_an_older_version_is_ignored_and_a_move_is_reported_once() -> None:
    masters, moves = MasterAddresses(ControllerClients([])), []
    masters.add_listener("a:1", lambda: moves.append("moved"))
    masters.learn(group(master=0, version=3))
    masters.learn(group(master=1, version=4))
    masters.learn(group(master=0, version=2))
    masters.learn(group(master=1, version=5))
    assert masters.find("a:1") == "b:1"
    assert len(moves) == 1


def test_a_former_address_of_a_replica_still_stands_for_its_group() -> None:
    masters = MasterAddresses(ControllerClients([]))
    masters.learn(group(master=0, version=3))
    masters.learn(group(master=0, version=4, addresses=("c:1", "b:1")))
    assert masters.find("a:1") == "c:1"


def test_the_listener_of_an_address_that_becomes_known_is_notified() -> None:
    """The replica at the address of the settings registers after the master is known."""
    masters, found = MasterAddresses(ControllerClients([])), []
    masters.add_listener("b:1", lambda: found.append(masters.find("b:1")))
    masters.learn(group(master=0, version=3, addresses=("a:1",)))
    assert not found
    masters.learn(group(master=0, version=4))
    assert found == ["a:1"]


def test_an_older_version_is_applied_after_several_polls() -> None:
    masters = MasterAddresses(ControllerClients([]))
    masters.learn(group(master=0, version=900))
    lost = group(master=1, version=2)
    for _ in range(OLDER_POLLS_MAX - 1):
        masters.learn(lost)
    masters.learn(group(master=0, version=900))  # The older version came from a lagging controller.
    for _ in range(OLDER_POLLS_MAX - 1):
        masters.learn(lost)
    assert masters.find("b:1") == "a:1"
    masters.learn(lost)
    assert masters.find("a:1") == "b:1"
