"""The store in Kubernetes keeps to what every store does, and to what an API server brings.

The suite runs against a server in memory, and with `make meta-store-test` against a real one, in
the namespace TIDEMILL_TEST_NAMESPACE, where the BrokerGroups of cluster `suite` and its Leases are
deleted before each test.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.support.worlds.memory_kubernetes import MemoryKubernetes
from tests.support.worlds.meta_store_suite import GROUP, MetaStoreSuite, done, leased
from tests.support.worlds.replica_records import record_of_three
from tidemill.controller.election.swap import Resolution, bump, resolve
from tidemill.controller.kubernetes_api import Access, KubernetesApi
from tidemill.controller.kubernetes_store import KubernetesStore
from tidemill.controller.meta_store import MetaStore, NotStored, StoreUnreachable

KUBECONFIG = os.environ.get("KUBECONFIG", "")
NAMESPACE = os.environ.get("TIDEMILL_TEST_NAMESPACE", "default")
ACCESS = Access("https://kubernetes.test", tls=False, namespace="messages")
GROUPS = "/apis/tidemill.io/v1/namespaces/messages/brokergroups"


@contextlib.asynccontextmanager
async def store_of(
    server: MemoryKubernetes, *, makes_resources: bool = True
) -> AsyncIterator[KubernetesStore]:
    """Open a store of the server."""
    async with KubernetesApi.open(ACCESS, server) as api:
        yield KubernetesStore(api, "mill", makes_resources=makes_resources)


class TestKubernetesStore(MetaStoreSuite):
    @contextlib.asynccontextmanager
    async def stores(self) -> AsyncIterator[tuple[MetaStore, MetaStore]]:
        server = MemoryKubernetes()
        async with store_of(server) as one, store_of(server) as other:
            yield one, other


@pytest.mark.cluster
class TestRealApiServer(MetaStoreSuite):
    @contextlib.asynccontextmanager
    async def stores(self) -> AsyncIterator[tuple[MetaStore, MetaStore]]:
        access = Access.of_kubeconfig(Path(KUBECONFIG), NAMESPACE)
        async with KubernetesApi.open(access) as first, KubernetesApi.open(access) as second:
            await emptied(first)
            yield tuple(  # type: ignore[misc]  # mypy does not count them.
                KubernetesStore(api, "suite", makes_resources=True) for api in (first, second)
            )


async def emptied(api: KubernetesApi) -> None:
    """Delete what an earlier test has left."""
    for group, kind in (("tidemill.io", "brokergroups"), ("coordination.k8s.io", "leases")):
        path = f"/apis/{group}/v1/namespaces/{api.namespace}/{kind}"
        for one in (await api.call("GET", path)).json()["items"]:
            if one["metadata"]["name"].startswith("suite-"):
                await api.call("DELETE", f"{path}/{one['metadata']['name']}")


def test_a_write_whose_answer_is_lost_is_unknown_and_found_by_its_id() -> None:
    async def run() -> None:
        server = MemoryKubernetes()
        async with store_of(server) as store:
            base = done(await store.create(GROUP, record_of_three()))
            server.lose_answers = 1
            made = bump(base, "mine")
            assert await store.swap(GROUP, made) is NotStored.UNKNOWN
            found = await store.get(GROUP)
            assert found is not None
            assert resolve(made, found) is Resolution.APPLIED

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
def test_what_an_error_says_of_a_write(status: HTTPStatus, is_unknown: bool) -> None:
    async def run() -> None:
        server = MemoryKubernetes()
        async with store_of(server) as store:
            base = done(await store.create(GROUP, record_of_three()))
            server.fails_with = status
            with pytest.raises(StoreUnreachable):
                await store.get(GROUP)
            if is_unknown:
                assert await store.swap(GROUP, bump(base, "mine")) is NotStored.UNKNOWN
            else:
                with pytest.raises(StoreUnreachable):
                    await store.swap(GROUP, bump(base, "mine"))

    asyncio.run(run())


def test_a_group_is_made_by_its_resource_alone_which_says_how_many_must_be_in_sync() -> None:
    async def run() -> None:
        server = MemoryKubernetes()
        async with store_of(server, makes_resources=False) as store:
            assert await store.create(GROUP, record_of_three()) is NotStored.CONFLICT
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


def test_groups_of_other_releases_are_none_of_ours() -> None:
    async def run() -> None:
        server = MemoryKubernetes()
        async with store_of(server) as ours, KubernetesApi.open(ACCESS, server) as api:
            other = KubernetesStore(api, "other", makes_resources=True)
            done(await other.create(GROUP, record_of_three()))
            assert await ours.groups() == []
            assert await ours.get(GROUP) is None
            leased(await other.write_lease("controller", None, "one"))
            assert await ours.read_lease("controller") is None

    asyncio.run(run())
