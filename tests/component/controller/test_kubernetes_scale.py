"""The pods of a broker group are added, removed and replaced through an API server in memory."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import pytest
from kubernetes.client import V1StatefulSet
from structlog.testing import capture_logs

from tests.support.clocks import ManualClock
from tests.support.worlds.memory_kubernetes import Answer, Json, MemoryKubernetes
from tests.support.worlds.replica_records import member_of, record_of_three
from tidemill.common.replica_group import ReplicaId
from tidemill.controller.election.record import GroupRecord
from tidemill.controller.election.sessions import ElectionTiming, Heartbeat, ReplicaHealth
from tidemill.controller.group import BrokerGroupControl
from tidemill.controller.groups import BrokerGroupControls
from tidemill.controller.kubernetes_calls import KubernetesCalls
from tidemill.controller.kubernetes_scale import ReplicaScaling
from tidemill.controller.kubernetes_store import KubernetesStore
from tidemill.controller.metrics import ControllerMetrics

NAME = "broker-0"
GROUP = "/apis/tidemill.io/v1/namespaces/messages/brokergroups/mill-broker-0"
SET = "/apis/apps/v1/namespaces/messages/statefulsets/mill-broker-0"
PODS = "/api/v1/namespaces/messages/pods"
OTHER_GROUP, OTHER_SET = f"{GROUP[:-1]}1", f"{SET[:-1]}1"


class World:
    """A leading controller, and the StatefulSet of one group."""

    def __init__(self, server: MemoryKubernetes, store: KubernetesStore) -> None:
        self.server = server
        self.store = store
        self.clock = ManualClock()
        make = functools.partial(
            BrokerGroupControl,
            store=store,
            clock=self.clock,
            timing=ElectionTiming(),
            rank=lambda: 0,
            metrics=ControllerMetrics(),
        )
        self.groups = BrokerGroupControls(store, make, founds_with=None)
        self.is_leading = True
        self.scaling = self.scaling_of(settle_s=0.0)

    def scaling_of(self, *, settle_s: float) -> ReplicaScaling:
        return ReplicaScaling(self.store, self.groups, lambda: self.is_leading, settle_s=settle_s)

    @property
    def spec(self) -> Any:
        return self.server.objects[SET]["spec"]

    @property
    def partition(self) -> int:
        return self.partition_of(SET)

    def partition_of(self, path: str) -> int:
        strategy = self.server.objects[path]["spec"]["updateStrategy"]
        return int(strategy["rollingUpdate"]["partition"])

    def wants(self, replicas: int) -> None:
        self.server.objects[GROUP]["spec"]["replicas"] = replicas

    def status(self, path: str = SET, **status: object) -> None:
        """Set status fields of a StatefulSet, as Kubernetes does."""
        found = self.server.objects[path]
        found["status"] = {**found["status"], **status}

    def set_pods(self, *ordinals: int, ending: tuple[int, ...] = ()) -> None:
        """Set the pods of the StatefulSet that exist."""
        for ordinal in ordinals:
            ends = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if ordinal in ending else {}
            metadata = {"name": f"mill-broker-0-{ordinal}", **ends}
            self.server.objects[f"{PODS}/mill-broker-0-{ordinal}"] = {"metadata": metadata}

    def add_other_group(self) -> None:
        """Add broker-1, which is listed after broker-0, with the same pods and spec."""
        objects = self.server.objects
        objects[OTHER_SET] = copy.deepcopy(objects[SET])
        objects[OTHER_GROUP] = copy.deepcopy(objects[GROUP])
        objects[OTHER_GROUP]["metadata"]["name"] = "mill-broker-1"
        objects[OTHER_GROUP]["spec"].update(group="broker-1", statefulSet="mill-broker-1")

    def reject(self, rejected_method: str, status: HTTPStatus) -> None:
        """Answer calls of a method for the StatefulSet of broker-0 with `status`."""
        answer = self.server.answer

        def rejected(method: str, path: str, body: Json) -> Answer | None:
            if (method, path) == (rejected_method, SET):
                return Answer(status, {"message": "as the test wants it"})
            return answer(method, path, body)

        self.server.answer = rejected  # type: ignore[method-assign]  # of this test

    async def found(self, record: GroupRecord, name: str = NAME) -> BrokerGroupControl:
        await self.store.create(name, record)
        group = await self.groups.get(name)
        self.hear(group, *(id_ for id_, _ in record.replicas))
        return group

    def hear(self, group: BrokerGroupControl, *replicas: int) -> None:
        for replica in replicas:
            group.note_heartbeat(member_of(replica), BEAT)


BEAT = Heartbeat(
    is_master=False,
    epoch_seen=3,
    version_seen=7,
    log_epoch=3,
    log_end=100,
    durable_end=100,
    confirm=100,
    health=ReplicaHealth.OK,
    page_age_ms=0,
)


@contextlib.asynccontextmanager
async def world_of(*, there: int, wanted: int) -> AsyncIterator[World]:
    server = MemoryKubernetes()
    server.objects[SET] = {
        "metadata": {"name": "mill-broker-0", "resourceVersion": "0", "generation": 1},
        "spec": {
            "replicas": there,
            "updateStrategy": {"type": "RollingUpdate"},
            "selector": {},
            "template": {},
            "serviceName": "mill",
        },
        "status": {
            "observedGeneration": 1,
            "replicas": there,
            "readyReplicas": there,
            "updatedReplicas": there,
            "currentRevision": "one",
            "updateRevision": "one",
        },
    }
    server.objects[GROUP] = {
        "metadata": {"name": "mill-broker-0", "resourceVersion": "0"},
        "spec": {"group": NAME, "replicas": wanted, "minInSync": 2, "statefulSet": "mill-broker-0"},
    }
    with server.serving(), KubernetesCalls.open(server.access()) as calls:
        yield World(server, KubernetesStore(calls, "mill"))


def test_a_new_group_gets_its_pods_and_no_template_replaces_them() -> None:
    async def run() -> None:
        async with world_of(there=1, wanted=3) as world:
            await world.scaling.step()
            assert (world.spec["replicas"], world.partition) == (3, 3)

    asyncio.run(run())


def test_the_pod_of_one_replica_is_replaced_before_others_join() -> None:
    """The chart keeps the pod with OnDelete, so that it does not end before a controller runs."""

    async def run() -> None:
        async with world_of(there=1, wanted=3) as world:
            world.spec["updateStrategy"] = {"type": "OnDelete"}
            world.server.objects[SET]["metadata"]["generation"] = 2
            await world.scaling.step()
            assert world.spec["updateStrategy"] == {"type": "OnDelete"}, "not processed yet"
            world.status(observedGeneration=2, updateRevision="two", updatedReplicas=0)
            await world.scaling_of(settle_s=60.0).step()
            assert world.spec["updateStrategy"] == {"type": "OnDelete"}, "others start first"
            await world.scaling.step()
            assert (world.spec["replicas"], world.partition) == (1, 0)
            assert world.spec["updateStrategy"]["type"] == "RollingUpdate"
            world.status(currentRevision="two", updatedReplicas=1)
            await world.found(record_of_three())
            await world.scaling.step()
            assert (world.spec["replicas"], world.partition) == (3, 3)

    asyncio.run(run())


def test_a_shrinking_group_retires_removes_and_forgets_its_highest_replica() -> None:
    async def run() -> None:
        async with world_of(there=3, wanted=3) as world:
            group = await world.found(record_of_three())
            await world.scaling.step()
            world.wants(2)
            await world.scaling.step()
            assert world.spec["replicas"] == 3, "it is in the set still"
            assert group.notice.startswith("replica 2 cannot be removed yet")
            await group.reconcile()  # retired, and out
            await world.scaling.step()
            assert (world.spec["replicas"], world.partition) == (2, 2)
            assert group.stored is not None
            assert group.stored.record.find(ReplicaId(2)) is not None, "its process is heard"
            world.clock.advance(2_000)
            world.hear(group, 0, 1)
            await world.scaling.step()
            assert group.stored.record.find(ReplicaId(2)) is None
            assert group.stored.record.sss == {member_of(0), member_of(1)}
            assert group.notice == ""

    asyncio.run(run())


def test_a_stopped_group_has_no_pods_and_keeps_its_replicas() -> None:
    async def run() -> None:
        async with world_of(there=3, wanted=3) as world:
            group = await world.found(record_of_three())
            world.server.objects[GROUP]["spec"]["stopped"] = True
            for _ in range(2):
                await world.scaling.step()
                assert world.spec["replicas"] == 0
            assert group.notice == "its BrokerGroup is stopped"
            world.clock.advance(60_000)
            await world.scaling.step()
            assert group.stored is not None
            assert group.stored.record == record_of_three()
            world.server.objects[GROUP]["spec"]["stopped"] = False
            await world.scaling.step()
            assert world.spec["replicas"] == 3

    asyncio.run(run())


def test_the_resource_sets_min_in_sync() -> None:
    async def run() -> None:
        async with world_of(there=3, wanted=3) as world:
            group = await world.found(record_of_three())
            world.server.objects[GROUP]["spec"]["minInSync"] = 3
            await world.scaling.step()
            await group.reconcile()
            assert group.stored is not None
            assert group.stored.record.min_in_sync == 3

    asyncio.run(run())


def test_operators_see_that_min_in_sync_is_not_reached_yet() -> None:
    """A group that grows from one replica acknowledges messages that only one replica has."""

    async def run() -> None:
        async with world_of(there=3, wanted=3) as world:
            spec = world.server.objects[GROUP]["spec"]
            spec["minInSync"] = 1
            group = await world.found(record_of_three()._replace(sss=frozenset({member_of(0)})))
            spec["minInSync"] = 2
            for _ in range(2):
                await world.scaling.step()
            assert group.notice == (
                "messages are acknowledged with 1 of 2 replicas of minInSync, until 2 are in sync"
            )
            spec["minInSync"] = 1
            await world.scaling.step()
            assert group.notice == ""

    asyncio.run(run())


def test_an_upgrade_goes_from_pod_to_pod_and_moves_the_master() -> None:
    async def run() -> None:
        async with world_of(there=3, wanted=3) as world:
            group = await world.found(record_of_three())
            await world.scaling.step()
            world.status(updateRevision="two", updatedReplicas=0)
            await world.scaling.step()
            assert world.partition == 2
            await world.scaling.step()
            assert group.notice == "pod 2 is being replaced"
            world.status(updatedReplicas=1)
            await world.scaling.step()
            world.status(updatedReplicas=2)
            world.set_pods(0, 1, 2)
            await world.scaling.step()
            assert world.partition == 1, "replica 0 is the master"
            assert group.stored is not None
            assert group.stored.record.transfer == 1
            await world.scaling.step()
            assert group.stored.record.version == 8, "it is asked once"

    asyncio.run(run())


def test_an_upgrade_replaces_the_pods_of_one_group_after_the_other() -> None:
    """The other groups take messages meanwhile."""

    async def run() -> None:
        async with world_of(there=3, wanted=3) as world:
            world.add_other_group()
            await world.found(record_of_three())
            other = await world.found(record_of_three(), "broker-1")
            await world.scaling.step()
            for path in (SET, OTHER_SET):
                world.status(path, updateRevision="two", updatedReplicas=0)
            for _ in range(2):
                await world.scaling.step()
                assert (world.partition, world.partition_of(OTHER_SET)) == (2, 3)
                assert other.notice == "another broker group is being replaced"
            world.status(updatedReplicas=1)
            await world.scaling.step()
            assert (world.partition, world.partition_of(OTHER_SET)) == (1, 3)
            world.status(currentRevision="two", updatedReplicas=3)
            for _ in range(2):
                await world.scaling.step()
                assert (world.partition, world.partition_of(OTHER_SET)) == (3, 2)
            assert other.notice == "pod 2 is being replaced"

    asyncio.run(run())


def test_the_master_moves_to_no_pod_that_ends_or_is_missing() -> None:
    """A node of another pod is drained during the upgrade."""

    async def run() -> None:
        async with world_of(there=3, wanted=3) as world:
            group = await world.found(record_of_three())
            rolling = {"type": "RollingUpdate", "rollingUpdate": {"partition": 1}}
            world.spec["updateStrategy"] = rolling
            world.status(updateRevision="two", updatedReplicas=2)
            assert group.stored is not None
            world.set_pods(0, 2, ending=(2,))
            await world.scaling.step()
            assert group.stored.record.transfer is None
            assert world.partition == 1, "the pod of the master stays"
            assert group.notice.startswith("pod 1 ends")
            world.set_pods(0, 1, 2, ending=(1,))
            await world.scaling.step()
            assert group.stored.record.transfer == 2

    asyncio.run(run())


def test_a_patch_does_not_overwrite_a_newer_stateful_set() -> None:
    async def run() -> None:
        async with world_of(there=1, wanted=3) as world:
            stale = V1StatefulSet.from_dict(world.server.objects[SET])
            assert stale is not None
            world.server.objects[SET]["metadata"]["resourceVersion"] = "9"
            [spec] = await world.store.specs()
            await world.scaling._patch(spec, stale, replicas=3, partition=3)
            assert world.spec["replicas"] == 1

    asyncio.run(run())


def test_a_damaged_record_stops_no_other_group_and_is_logged_once() -> None:
    async def run() -> None:
        async with world_of(there=1, wanted=3) as world:
            world.add_other_group()
            world.server.objects[GROUP]["status"] = {"record": {"min_in_sync": 2}}
            with capture_logs() as logs:
                for _ in range(3):
                    await world.scaling.step()
            assert world.server.objects[OTHER_SET]["spec"]["replicas"] == 3
            assert world.spec["replicas"] == 1
            [error] = [one for one in logs if one["log_level"] == "error"]
            assert error["group"] == NAME
            assert "status.record of BrokerGroup mill-broker-0 is damaged" in error["reason"]

    asyncio.run(run())


@pytest.mark.parametrize("method", ["GET", "PATCH"])
@pytest.mark.parametrize("status", [HTTPStatus.FORBIDDEN, HTTPStatus.INTERNAL_SERVER_ERROR])
def test_a_rejected_call_stops_no_other_group_and_is_logged_once(
    method: str, status: HTTPStatus
) -> None:
    async def run() -> None:
        async with world_of(there=1, wanted=3) as world:
            world.add_other_group()
            group = await world.found(record_of_three())
            world.reject(method, status)
            with capture_logs() as logs:
                for _ in range(3):
                    await world.scaling.step()
            assert world.server.objects[OTHER_SET]["spec"]["replicas"] == 3
            [error] = [one for one in logs if one["log_level"] == "error"]
            assert error["group"] == NAME
            assert f"the API server answered {status.value} " in error["reason"]
            assert "as the test wants it" in error["reason"]
            assert group.notice == f"the controller cannot change its pods: {error['reason']}"

    asyncio.run(run())


def test_a_group_without_a_stateful_set_is_no_error() -> None:
    """Helm creates one object after the other."""

    async def run() -> None:
        async with world_of(there=1, wanted=3) as world:
            world.add_other_group()
            del world.server.objects[SET]
            with capture_logs() as logs:
                await world.scaling.step()
            assert world.server.objects[OTHER_SET]["spec"]["replicas"] == 3
            assert not [one for one in logs if one["log_level"] == "error"]

    asyncio.run(run())


def test_groups_that_cannot_be_listed_are_logged() -> None:
    async def run() -> None:
        async with world_of(there=1, wanted=3) as world:
            world.server.failure = HTTPStatus.FORBIDDEN
            with capture_logs() as logs:
                task = asyncio.create_task(world.scaling.run())
                for _ in range(1_000):
                    await asyncio.sleep(0.01)
                    if "all" in [one.get("group") for one in logs]:
                        break
                else:
                    pytest.fail("no error is logged")
                assert not task.done()
                task.cancel()

    asyncio.run(run())


def test_a_rollback_replaces_a_pod_whose_new_template_did_not_start() -> None:
    """The partition must stay below the pod until Kubernetes has replaced it."""

    async def run() -> None:
        async with world_of(there=3, wanted=3) as world:
            group = await world.found(record_of_three())
            await world.scaling.step()
            world.status(updateRevision="two", updatedReplicas=0)
            await world.scaling.step()
            assert world.partition == 2
            # The new pod 2 never becomes ready. A rollback sets the former template.
            world.status(updateRevision="one", updatedReplicas=2, readyReplicas=2)
            await world.scaling.step()
            assert world.partition == 2
            assert group.notice == "2 of 3 pods are ready"
            world.status(updatedReplicas=3, readyReplicas=3)
            await world.scaling.step()
            assert world.partition == 3

    asyncio.run(run())


def test_a_pod_that_ends_does_not_become_the_master() -> None:
    """A pod that ends counts in the status of the StatefulSet, but not as one that is updated."""

    async def run() -> None:
        async with world_of(there=3, wanted=3) as world:
            record = record_of_three()
            group = await world.found(record._replace(master=member_of(2)))
            await world.scaling.step()
            world.status(updatedReplicas=2)  # A node is drained: pod 0 ends, and is ready still.
            for _ in range(5):
                await world.scaling.step()
                assert group.stored is not None
                assert group.stored.record.transfer is None
            world.status(updatedReplicas=3)
            await world.scaling.step()
            assert world.partition == 3

    asyncio.run(run())


def test_a_new_leader_does_not_use_a_spec_from_its_former_lead() -> None:
    async def run() -> None:
        async with world_of(there=3, wanted=3) as world:
            group = await world.found(record_of_three())
            world.server.objects[GROUP]["spec"]["minInSync"] = 1
            await world.scaling.step()
            world.is_leading = False
            task = asyncio.create_task(world.scaling.run())
            await asyncio.sleep(0)
            task.cancel()
            # Another controller leads, and the spec changes back.
            world.server.objects[GROUP]["spec"]["minInSync"] = 2
            world.is_leading = True
            await group.reconcile()
            assert group.stored is not None
            assert group.stored.record.min_in_sync == 2

    asyncio.run(run())
