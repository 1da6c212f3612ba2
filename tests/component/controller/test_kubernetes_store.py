"""The store in Kubernetes passes the suite of all stores, and handles errors of an API server.

The suite runs against a server in memory, and with `make meta-store-test` against a real one. There
it uses the namespace TIDEMILL_TEST_NAMESPACE, and each test first deletes the BrokerGroups and
Leases of the cluster `suite`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from http import HTTPStatus
from typing import Any

import pytest

from tests.support.worlds.memory_kubernetes import MemoryKubernetes
from tests.support.worlds.meta_store_suite import GROUP, MetaStoreSuite, done, leased
from tests.support.worlds.replica_records import record_of_three
from tidemill.common.kubernetes_access import find_access
from tidemill.controller.election.swap import WriteOutcome, attempt_no_change, outcome_of
from tidemill.controller.kubernetes_calls import KubernetesCalls
from tidemill.controller.kubernetes_store import KubernetesStore
from tidemill.controller.meta_store import MetaStore, StoreDamaged, StoreUnreachable, WriteFailure

NAMESPACE = os.environ.get("TIDEMILL_TEST_NAMESPACE", "default")
GROUPS = "/apis/tidemill.io/v1/namespaces/messages/brokergroups"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/messages/leases"


@contextlib.contextmanager
def store_of(
    server: MemoryKubernetes, cluster: str = "mill", *, makes_resources: bool = True
) -> Iterator[KubernetesStore]:
    """Open a store of the server."""
    with KubernetesCalls.open(server.access()) as calls:
        yield KubernetesStore(calls, cluster, makes_resources=makes_resources)


@pytest.fixture
def server() -> Iterator[MemoryKubernetes]:
    with MemoryKubernetes().serving() as server:
        yield server


class TestKubernetesStore(MetaStoreSuite):
    @contextlib.asynccontextmanager
    async def stores(self) -> AsyncIterator[tuple[MetaStore, MetaStore]]:
        with (
            MemoryKubernetes().serving() as server,
            store_of(server) as one,
            store_of(server) as other,
        ):
            yield one, other


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record.pop("minInSync"),
        lambda record: record.update(master=7),
        lambda record: record.update(sss=[{"replica": 0}]),
        lambda record: record.update(history=[{}]),
    ],
)
def test_a_damaged_record_is_named_and_the_other_groups_go_on(
    server: MemoryKubernetes, damage: Callable[[dict[str, Any]], object]
) -> None:
    async def run(store: KubernetesStore) -> None:
        for group in (GROUP, "other"):
            done(await store.create(group, record_of_three()))
        damage(server.objects[f"{GROUPS}/mill-{GROUP}"]["status"]["record"])
        with pytest.raises(StoreDamaged, match=f"BrokerGroup mill-{GROUP} is damaged"):
            await store.get(GROUP)
        assert await store.groups() == [GROUP, "other"]
        async with contextlib.aclosing(store.changes()) as changes, asyncio.timeout(20):
            assert (await anext(changes)).group == "other"

    with store_of(server) as store:
        asyncio.run(run(store))


@pytest.mark.cluster
class TestRealApiServer(MetaStoreSuite):
    @contextlib.asynccontextmanager
    async def stores(self) -> AsyncIterator[tuple[MetaStore, MetaStore]]:
        access = find_access()._replace(namespace=NAMESPACE)
        with KubernetesCalls.open(access) as first, KubernetesCalls.open(access) as second:
            await delete_objects_of_suite(first)
            yield tuple(  # type: ignore[misc]  # mypy does not count them.
                KubernetesStore(calls, "suite", makes_resources=True) for calls in (first, second)
            )


async def delete_objects_of_suite(calls: KubernetesCalls) -> None:
    api: Any = calls.custom_objects
    for group, plural in (("tidemill.io", "brokergroups"), ("coordination.k8s.io", "leases")):
        collection = (group, "v1", calls.namespace, plural)
        for one in (await calls.call(api.list_namespaced_custom_object, *collection))["items"]:
            if (name := one["metadata"]["name"]).startswith("suite-"):
                await calls.call(api.delete_namespaced_custom_object, *collection, name)


def test_a_write_with_a_lost_answer_is_unknown_until_a_read_finds_its_id(
    server: MemoryKubernetes,
) -> None:
    async def run() -> None:
        with store_of(server) as store:
            base = done(await store.create(GROUP, record_of_three()))
            server.lost_answers = 1
            made = attempt_no_change(base, "mine")
            assert await store.swap(GROUP, made) is WriteFailure.UNKNOWN
            found = await store.get(GROUP)
            assert found is not None
            assert outcome_of(made, found) is WriteOutcome.APPLIED

    asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "is_unknown"),
    [
        (HTTPStatus.INTERNAL_SERVER_ERROR, True),
        (HTTPStatus.GATEWAY_TIMEOUT, True),
        (HTTPStatus.TOO_MANY_REQUESTS, False),
        (HTTPStatus.FORBIDDEN, False),
    ],
)
def test_a_failed_write_is_unknown_only_after_a_server_error(
    server: MemoryKubernetes, status: HTTPStatus, is_unknown: bool
) -> None:
    async def run() -> None:
        with store_of(server) as store:
            base = done(await store.create(GROUP, record_of_three()))
            server.failure = status
            with pytest.raises(StoreUnreachable):
                await store.get(GROUP)
            if is_unknown:
                assert (
                    await store.swap(GROUP, attempt_no_change(base, "mine")) is WriteFailure.UNKNOWN
                )
            else:
                with pytest.raises(StoreUnreachable):
                    await store.swap(GROUP, attempt_no_change(base, "mine"))

    asyncio.run(run())


def test_calls_fail_at_once_when_nothing_listens(server: MemoryKubernetes) -> None:
    async def run() -> None:
        access = server.access()
        access.configuration.host = "http://127.0.0.1:1"
        with KubernetesCalls.open(access) as calls:
            store = KubernetesStore(calls, "mill")
            with pytest.raises(StoreUnreachable):
                await store.get(GROUP)
            with pytest.raises(StoreUnreachable, match="create_namespaced_lease messages"):
                await store.write_lease("controller", None, "one")

    asyncio.run(run())


def test_create_needs_the_resource_and_takes_min_in_sync_from_it(server: MemoryKubernetes) -> None:
    async def run() -> None:
        with store_of(server, makes_resources=False) as store:
            assert await store.create(GROUP, record_of_three()) is WriteFailure.CONFLICT
            server.objects[f"{GROUPS}/mill-{GROUP}"] = {
                "metadata": {"name": f"mill-{GROUP}", "resourceVersion": "0"},
                "spec": {"group": GROUP, "replicas": 3, "minInSync": 3, "statefulSet": "mill-x"},
            }
            assert await store.get(GROUP) is None
            assert await store.groups() == []
            stored = done(await store.create(GROUP, record_of_three()))
            assert stored.record.min_in_sync == 3
            assert await store.get(GROUP) == stored

    asyncio.run(run())


def test_a_store_ignores_groups_and_leases_of_other_releases(server: MemoryKubernetes) -> None:
    async def run() -> None:
        with store_of(server) as ours, store_of(server, "other") as other:
            done(await other.create(GROUP, record_of_three()))
            assert await ours.groups() == []
            assert await ours.get(GROUP) is None
            leased(await other.write_lease("controller", None, "one"))
            assert await ours.read_lease("controller") is None

    asyncio.run(run())


def test_a_renewed_lease_keeps_labels_and_annotations_of_others(server: MemoryKubernetes) -> None:
    async def run() -> None:
        with store_of(server) as store:
            seen = leased(await store.write_lease("controller", None, "one"))
            metadata = server.objects[f"{LEASES}/mill-controller"]["metadata"]
            metadata["labels"] = {"team": "a"}
            metadata["annotations"]["note"] = "b"
            await store.read_lease("controller")
            leased(await store.write_lease("controller", seen, "one"))
            metadata = server.objects[f"{LEASES}/mill-controller"]["metadata"]
            assert metadata["labels"] == {"team": "a"}
            assert metadata["annotations"] == {"note": "b", "tidemill.io/renewals": "2"}

    asyncio.run(run())


def test_a_lease_time_has_microseconds(server: MemoryKubernetes) -> None:
    async def run() -> None:
        with store_of(server) as store:
            leased(await store.write_lease("controller", None, "one"))
            time = server.objects[f"{LEASES}/mill-controller"]["spec"]["renewTime"]
            assert len(time.partition(".")[2].removesuffix("+00:00")) == 6

    asyncio.run(run())
