"""The store of group records in Kubernetes: the status of BrokerGroup resources, and a Lease.

    BrokerGroup CLUSTER-GROUP   spec    what is wanted, which is its user's
                                status  the record; replaced by PUT with the resourceVersion read
    Lease       CLUSTER-NAME    holder, and in an annotation how often it was written

A resourceVersion is the token of a record: it is never used twice, also when a group is removed and
made again. Reads name none, so that the API server asks a quorum. A write of which no answer came,
or an error of the server itself, is UNKNOWN: it may have been done, or be under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final, NamedTuple, final

import httpx
import structlog

from tidemill.controller.election.leadership import LeaseSeen, LeaseTiming
from tidemill.controller.election.record import GroupRecord
from tidemill.controller.election.swap import Attempt, Stored
from tidemill.controller.kubernetes_api import Json, KubernetesApi
from tidemill.controller.meta_store import Changed, NotStored, StoreUnreachable
from tidemill.controller.record_json import from_json, to_json

READS_MAX: Final = 2  # tries of a read; who decides comes again by itself
WATCH_AGAIN_S: Final = 0.5  # after one that failed
RENEWALS: Final = "tidemill.io/renewals"

# Nothing was sent of a call that ended so.
_NOT_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)

log = structlog.get_logger()


class Wanted(NamedTuple):
    """What the user of a broker group wants."""

    group: str
    replicas: int
    min_in_sync: int
    stateful_set: str
    is_stopped: bool = False


@final
class KubernetesStore:
    """The records of one cluster (a Helm release) in one namespace."""

    def __init__(self, api: KubernetesApi, cluster: str, *, makes_resources: bool = False) -> None:
        """Keep the records of `cluster`.

        `makes_resources` is for tests: whose groups there are is said by Helm, and a controller
        has no right to make one.
        """
        self.api = api
        self._cluster = cluster
        self._makes_resources = makes_resources
        self._groups = f"/apis/tidemill.io/v1/namespaces/{api.namespace}/brokergroups"
        self._leases = f"/apis/coordination.k8s.io/v1/namespaces/{api.namespace}/leases"
        # By lease, what was seen last and the version that says so.
        self._leases_seen: dict[str, tuple[LeaseSeen, Json]] = {}

    # ------------------------------------------------------------ records

    async def get(self, group: str) -> Stored | None:
        """Return a group's record; None: there is no such group. Raises StoreUnreachable."""
        found = await self._read(self._path(group))
        return None if found is None else _stored(found)

    async def create(self, group: str, record: GroupRecord) -> Stored | NotStored:
        """Store the first record of a group, which Helm has made. Raises StoreUnreachable.

        How many replicas must be in sync says its resource.
        """
        found = await self._read(self._path(group))
        if found is None and self._makes_resources:
            found = await self._make(group, record)
        if found is None or _stored(found) is not None:
            return NotStored.CONFLICT
        record = record._replace(min_in_sync=found["spec"]["minInSync"])
        return await self._put(group, record, found["metadata"]["resourceVersion"])

    async def swap(self, group: str, attempt: Attempt) -> Stored | NotStored:
        """Write a record in the place of the one that it was made from. Raises StoreUnreachable."""
        return await self._put(group, attempt.record, attempt.base.token)

    async def remove(
        self,
        group: str,
        token: str,  # noqa: ARG002  # Other stores need it.
    ) -> NotStored | None:
        """Never: whose groups there are is said by their resources."""
        raise StoreUnreachable(
            f"broker group {group} is a resource: kubectl delete brokergroup"
            f" {self._cluster}-{group} takes it away"
        )

    async def groups(self) -> list[str]:
        """Return the names of all groups, sorted. Raises StoreUnreachable."""
        items = (await self._list())["items"]
        return sorted(one["spec"]["group"] for one in items if _stored(one) is not None)

    async def wanted(self) -> list[Wanted]:
        """Return what is wanted of the groups. Raises StoreUnreachable."""
        specs = [one["spec"] for one in (await self._list())["items"]]
        return [
            Wanted(
                spec["group"],
                spec["replicas"],
                spec["minInSync"],
                spec["statefulSet"],
                bool(spec.get("stopped")),
            )
            for spec in specs
            if spec.get("statefulSet")
        ]

    async def watch(self) -> AsyncGenerator[Changed, None]:
        """Yield all groups, then changes as they come.

        While the API server is away nothing comes; what has changed meanwhile comes afterwards.
        """
        known: dict[str, str] = {}
        while True:
            with contextlib.suppress(StoreUnreachable, httpx.TransportError, ValueError):
                listed = await self._list()
                items = {one["spec"]["group"]: one for one in listed["items"]}
                for group in [name for name in known if name not in items]:
                    del known[group]
                    yield Changed(group, None)
                for change in map(_changed, items.values()):
                    if change is not None and _is_new(change, known):
                        yield change
                version = listed["metadata"]["resourceVersion"]
                async for change in self._changes(version):
                    if _is_new(change, known):
                        yield change
            await asyncio.sleep(WATCH_AGAIN_S)

    # ------------------------------------------------------------ leases

    async def read_lease(self, name: str) -> LeaseSeen | None:
        """Return a lease; None: nobody has held it. Raises StoreUnreachable."""
        found = await self._read(f"{self._leases}/{self._cluster}-{name}")
        if found is None:
            return None
        return self._saw_lease(name, found)

    async def write_lease(
        self, name: str, seen: LeaseSeen | None, holder: str
    ) -> LeaseSeen | NotStored:
        """Take, renew or (with no holder) release a lease that was last `seen` so."""
        metadata: Json = {"name": f"{self._cluster}-{name}"}
        if seen is not None:
            if self._leases_seen.get(name, (None,))[0] != seen:
                await self.read_lease(name)
            known = self._leases_seen.get(name)
            if known is None or known[0] != seen:
                return NotStored.CONFLICT
            metadata = known[1]
        renewals = 1 if seen is None else seen.renewals + 1
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                **metadata,
                "annotations": {**metadata.get("annotations", {}), RENEWALS: str(renewals)},
            },
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": LeaseTiming().duration_ms // 1000,
                # For people who look; who waits for the lease goes by its own clock.
                "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            },
        }
        if seen is None:
            written = await self._write("POST", self._leases, lease)
        else:
            written = await self._write("PUT", f"{self._leases}/{metadata['name']}", lease)
        return written if isinstance(written, NotStored) else self._saw_lease(name, written)

    def _saw_lease(self, name: str, found: Json) -> LeaseSeen:
        metadata = found["metadata"]
        renewals = int(metadata.get("annotations", {}).get(RENEWALS, 0))
        seen = LeaseSeen(found["spec"].get("holderIdentity") or "", renewals)
        kept = {key: metadata[key] for key in ("name", "resourceVersion")}
        for key in ("annotations", "labels"):
            kept |= {key: metadata[key]} if key in metadata else {}
        self._leases_seen[name] = (seen, kept)
        return seen

    # ------------------------------------------------------------ calls

    def _path(self, group: str) -> str:
        return f"{self._groups}/{self._cluster}-{group}"

    async def _list(self) -> Json:
        """Return all groups of this cluster, and the version of the list."""
        found = await self._read(self._groups)
        if found is None:
            raise StoreUnreachable(
                "the cluster knows no BrokerGroups: install charts/tidemill/crds"
            )
        return {**found, "items": [one for one in found["items"] if self._is_ours(one)]}

    def _is_ours(self, one: Json) -> bool:
        name: str = one["metadata"]["name"]
        return name == f"{self._cluster}-{one['spec']['group']}"

    async def _changes(self, version: str) -> AsyncGenerator[Changed, None]:
        """Yield what changes from a version on, until the server ends it or has forgotten it."""
        async with self.api.watching(self._groups, {"resourceVersion": version}) as response:
            if response.is_error:
                return
            async for line in response.aiter_lines():
                event = json.loads(line)
                if event["type"] not in {"ADDED", "MODIFIED", "DELETED"}:
                    return
                one = event["object"]
                if not self._is_ours(one):
                    continue
                if event["type"] == "DELETED":
                    yield Changed(one["spec"]["group"], None)
                elif (change := _changed(one)) is not None:
                    yield change

    async def _make(self, group: str, record: GroupRecord) -> Json | None:
        made = {
            "apiVersion": "tidemill.io/v1",
            "kind": "BrokerGroup",
            "metadata": {"name": f"{self._cluster}-{group}"},
            "spec": {
                "group": group,
                "replicas": max(1, len(record.replicas)),
                "minInSync": record.min_in_sync,
            },
        }
        await self._write("POST", self._groups, made)
        return await self._read(self._path(group))

    async def _put(self, group: str, record: GroupRecord, version: str) -> Stored | NotStored:
        master = "" if record.master is None else f"{group}-{record.master.replica_id}"
        in_sync = ", ".join(f"{group}-{one.replica_id}" for one in sorted(record.sss))
        written = await self._write(
            "PUT",
            f"{self._path(group)}/status",
            {
                "apiVersion": "tidemill.io/v1",
                "kind": "BrokerGroup",
                "metadata": {
                    "name": f"{self._cluster}-{group}",
                    "namespace": self.api.namespace,
                    "resourceVersion": version,
                },
                "status": {"master": master, "inSync": in_sync, "record": to_json(record)},
            },
        )
        if isinstance(written, NotStored):
            return written
        return Stored(record, written["metadata"]["resourceVersion"])

    async def _read(self, path: str) -> Json | None:
        """Return an object, None where there is none. Raises StoreUnreachable."""
        why = ""
        for _ in range(READS_MAX):
            try:
                response = await self.api.call("GET", path)
            except httpx.TransportError as error:
                why = repr(error)
                continue
            if response.status_code == HTTPStatus.NOT_FOUND:
                return None
            if response.is_success:
                found: Json = response.json()
                return found
            why = _refusal(response)
        raise StoreUnreachable(f"GET {path}: {why}")

    async def _write(self, method: str, path: str, body: Json) -> Json | NotStored:
        """Write an object, once. Raises StoreUnreachable when nothing was written."""
        try:
            response = await self.api.call(method, path, body)
        except _NOT_SENT as error:
            raise StoreUnreachable(f"{method} {path}: {error!r}") from error
        except httpx.TransportError as error:
            log.warning("nobody answers a write", path=path, reason=repr(error))
            return NotStored.UNKNOWN
        if response.is_success:
            written: Json = response.json()
            return written
        if response.status_code in {HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND}:
            return NotStored.CONFLICT
        if response.is_server_error:
            # It may have written, and then not heard of it from its own store.
            log.warning("a write failed in the server", path=path, reason=response.text)
            return NotStored.UNKNOWN
        raise StoreUnreachable(f"{method} {path}: {_refusal(response)}")


def _refusal(response: httpx.Response) -> str:
    """Return why a call was refused: the server names the right that is missing."""
    if response.status_code in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        log.error("the API server refuses a call", reason=response.text)
    return f"{response.status_code} {response.text}"


def _stored(found: Json) -> Stored | None:
    """Return the record of a resource; None while it has none."""
    record = found.get("status", {}).get("record")
    return (
        None if record is None else Stored(from_json(record), found["metadata"]["resourceVersion"])
    )


def _changed(found: Json) -> Changed | None:
    stored = _stored(found)
    return None if stored is None else Changed(found["spec"]["group"], stored)


def _is_new(change: Changed, known: dict[str, str]) -> bool:
    """Whether a change was not told; note that it is now."""
    if change.stored is None:
        return known.pop(change.group, None) is not None
    is_new = known.get(change.group) != change.stored.token
    known[change.group] = change.stored.token
    return is_new
