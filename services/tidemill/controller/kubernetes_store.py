"""The store of group records in Kubernetes: the status of BrokerGroup resources, and a Lease.

    BrokerGroup CLUSTER-GROUP   spec    the replicas that its user wants
                                status  the record; replaced by PUT with the resourceVersion read
    Lease       CLUSTER-NAME    holder, and in an annotation the number of its writes

The resourceVersion is the token of a record. It is never used twice, also when a group is deleted
and created again. Reads name no version, so that the API server asks a quorum. If the answer to a
write is lost, or is a server error, the result is UNKNOWN: the server may or may not do the write.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final, NamedTuple, TypeVar, final

import structlog
from kubernetes.client import ApiException, V1Lease, V1LeaseSpec, V1ObjectMeta
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError

from tidemill.controller.election.leadership import LeaseSeen, LeaseTiming
from tidemill.controller.election.record import GroupRecord
from tidemill.controller.election.swap import StoredRecord, WriteAttempt
from tidemill.controller.kubernetes_calls import Json, KubernetesCalls
from tidemill.controller.meta_store import (
    RecordChange,
    StoreDamaged,
    StoreUnreachable,
    WriteFailure,
)
from tidemill.controller.record_json import from_json, to_json

READS_MAX: Final = 2  # tries of a read; its caller asks again soon
RELIST_PAUSE_S: Final = 0.5  # between a watch that ended and the next one
RENEWALS: Final = "tidemill.io/renewals"
GROUP_API: Final = ("tidemill.io", "v1")
GROUP_PLURAL: Final = "brokergroups"

T = TypeVar("T")

log = structlog.get_logger()


class BrokerGroupSpec(NamedTuple):
    """The replicas that the user of a broker group wants."""

    group: str
    replicas: int
    min_in_sync: int
    stateful_set: str
    is_stopped: bool = False


@final
class KubernetesStore:
    """The records of one cluster (a Helm release) in one namespace."""

    has_specs: Final = True

    def __init__(
        self, calls: KubernetesCalls, cluster: str, *, makes_resources: bool = False
    ) -> None:
        """Keep the records of `cluster`.

        `makes_resources` is for tests. Otherwise Helm creates the resources: a controller has no
        right to create one.
        """
        self.calls = calls
        self._cluster = cluster
        self._makes_resources = makes_resources
        self._resources: Any = calls.custom_objects  # Any: its methods return `object`.
        self._collection = (*GROUP_API, calls.namespace, GROUP_PLURAL)
        # By name of the lease: its last known state, and the object that has it.
        self._leases: dict[str, tuple[LeaseSeen, V1Lease]] = {}

    # ------------------------------------------------------------ records

    async def get(self, group: str) -> StoredRecord | None:
        """Return a group's record; None: there is no such group. Raises StoreUnreachable."""
        resource = await self._get(group)
        return None if resource is None else _stored(resource)

    async def create(self, group: str, record: GroupRecord) -> StoredRecord | WriteFailure:
        """Store the first record of a group, if its resource exists. Raises StoreUnreachable.

        The resource gives min-in-sync.
        """
        resource = await self._get(group)
        if resource is None and self._makes_resources:
            resource = await self._make(group, record)
        if resource is None or _stored(resource) is not None:
            return WriteFailure.CONFLICT
        record = record._replace(min_in_sync=resource["spec"]["minInSync"])
        return await self._put(group, record, resource["metadata"]["resourceVersion"])

    async def swap(self, group: str, attempt: WriteAttempt) -> StoredRecord | WriteFailure:
        """Replace the record on which the attempt is based. Raises StoreUnreachable."""
        return await self._put(group, attempt.record, attempt.base.token)

    async def remove(
        self,
        group: str,
        token: str,  # noqa: ARG002  # Other stores need it.
    ) -> WriteFailure | None:
        """Raise StoreUnreachable: users delete the resource instead."""
        raise StoreUnreachable(
            f"the record of broker group {group} belongs to a resource; to delete both, run"
            f" kubectl delete brokergroup {self._cluster}-{group}"
        )

    async def groups(self) -> list[str]:
        """Return the names of all groups, sorted. Raises StoreUnreachable."""
        items = (await self._list())["items"]
        return sorted(one["spec"]["group"] for one in items if _record_of(one) is not None)

    async def specs(self) -> list[BrokerGroupSpec]:
        """Return the specs of all groups with a StatefulSet. Raises StoreUnreachable."""
        specs = [one["spec"] for one in (await self._list())["items"]]
        return [
            BrokerGroupSpec(
                spec["group"],
                spec["replicas"],
                spec["minInSync"],
                spec["statefulSet"],
                bool(spec.get("stopped")),
            )
            for spec in specs
            if spec.get("statefulSet")
        ]

    async def changes(self) -> AsyncGenerator[RecordChange, None]:
        """Yield all groups, then changes as they come.

        While the API server is unreachable, it yields nothing; afterwards, the missed changes.
        """
        known: dict[str, str] = {}
        while True:
            with contextlib.suppress(StoreUnreachable):
                listed = await self._list()
                items = {one["spec"]["group"]: one for one in listed["items"]}
                for group in [name for name in known if name not in items]:
                    del known[group]
                    yield RecordChange(group, None)
                for change in map(_changed, items.values()):
                    if change is not None and _is_new(change, known):
                        yield change
                version = listed["metadata"]["resourceVersion"]
                async for change in self._changes_after(version):
                    if _is_new(change, known):
                        yield change
            await asyncio.sleep(RELIST_PAUSE_S)

    # ------------------------------------------------------------ leases

    async def read_lease(self, name: str) -> LeaseSeen | None:
        """Return a lease; None: it was never held. Raises StoreUnreachable."""
        resource = await self._read(
            self.calls.leases.read_namespaced_lease, self._lease_name(name), self.calls.namespace
        )
        return None if resource is None else self._note_lease(name, resource)

    async def write_lease(
        self, name: str, seen: LeaseSeen | None, holder: str
    ) -> LeaseSeen | WriteFailure:
        """Take, renew or (without a holder) release a lease if its state is still `seen`."""
        metadata = V1ObjectMeta(name=self._lease_name(name))
        if seen is not None:
            if self._leases.get(name, (None,))[0] != seen:
                await self.read_lease(name)
            known = self._leases.get(name)
            if known is None or known[0] != seen:
                return WriteFailure.CONFLICT
            metadata = _kept_metadata(known[1])
        renewals = 1 if seen is None else seen.renewals + 1
        metadata.annotations = {**(metadata.annotations or {}), RENEWALS: str(renewals)}
        lease = V1Lease(
            metadata=metadata,
            spec=V1LeaseSpec(
                holder_identity=holder,
                lease_duration_seconds=LeaseTiming().duration_ms // 1000,
                renew_time=_renew_time(),
            ),
        )
        api, namespace = self.calls.leases, self.calls.namespace
        result = (
            await self._write(api.create_namespaced_lease, namespace, lease)
            if seen is None
            else await self._write(api.replace_namespaced_lease, metadata.name, namespace, lease)
        )
        return result if isinstance(result, WriteFailure) else self._note_lease(name, result)

    def _lease_name(self, name: str) -> str:
        return f"{self._cluster}-{name}"

    def _note_lease(self, name: str, lease: V1Lease) -> LeaseSeen:
        assert lease.metadata is not None, "each stored object has metadata"
        renewals = int((lease.metadata.annotations or {}).get(RENEWALS, 0))
        holder = None if lease.spec is None else lease.spec.holder_identity
        seen = LeaseSeen(holder or "", renewals)
        self._leases[name] = (seen, lease)
        return seen

    # ------------------------------------------------------------ calls

    async def _get(self, group: str) -> Json | None:
        return await self._read(
            self._resources.get_namespaced_custom_object, *self._collection, self._name(group)
        )

    def _name(self, group: str) -> str:
        return f"{self._cluster}-{group}"

    async def _list(self) -> Json:
        """Return all groups of this cluster, and the version of the list."""
        resource = await self._read(
            self._resources.list_namespaced_custom_object, *self._collection
        )
        if resource is None:
            raise StoreUnreachable(
                "the cluster has no BrokerGroup resources; install charts/tidemill/crds"
            )
        return {**resource, "items": [one for one in resource["items"] if self._is_ours(one)]}

    def _is_ours(self, one: Json) -> bool:
        name: str = one["metadata"]["name"]
        return name == self._name(one["spec"]["group"])

    async def _changes_after(self, version: str) -> AsyncGenerator[RecordChange, None]:
        """Yield changes after a version, until the server ends the watch or forgot the version."""
        events = self.calls.events(
            self._resources.list_namespaced_custom_object, *self._collection, version=version
        )
        async with contextlib.aclosing(events):
            async for event in events:
                one = event["raw_object"]
                if not self._is_ours(one):
                    continue
                if event["type"] == "DELETED":
                    yield RecordChange(one["spec"]["group"], None)
                elif (change := _changed(one)) is not None:
                    yield change

    async def _make(self, group: str, record: GroupRecord) -> Json | None:
        made = {
            "apiVersion": "tidemill.io/v1",
            "kind": "BrokerGroup",
            "metadata": {"name": self._name(group)},
            "spec": {
                "group": group,
                "replicas": max(1, len(record.replicas)),
                "minInSync": record.min_in_sync,
            },
        }
        await self._write(self._resources.create_namespaced_custom_object, *self._collection, made)
        return await self._get(group)

    async def _put(
        self, group: str, record: GroupRecord, version: str
    ) -> StoredRecord | WriteFailure:
        master = "" if record.master is None else f"{group}-{record.master.replica_id}"
        in_sync = ", ".join(f"{group}-{one.replica_id}" for one in sorted(record.sss))
        result: Json | WriteFailure = await self._write(
            self._resources.replace_namespaced_custom_object_status,
            *self._collection,
            self._name(group),
            {
                "apiVersion": "tidemill.io/v1",
                "kind": "BrokerGroup",
                "metadata": {
                    "name": self._name(group),
                    "namespace": self.calls.namespace,
                    "resourceVersion": version,
                },
                "status": {"master": master, "inSync": in_sync, "record": to_json(record)},
            },
        )
        if isinstance(result, WriteFailure):
            return result
        return StoredRecord(record, result["metadata"]["resourceVersion"])

    async def _read(self, method: Callable[..., T], *arguments: object) -> T | None:
        """Return an object; None: it does not exist. Raises StoreUnreachable."""
        why = ""
        for _ in range(READS_MAX):
            try:
                return await self.calls.call(method, *arguments)
            except HTTPError as error:
                why = repr(error)
            except ApiException as error:
                if error.status == HTTPStatus.NOT_FOUND:
                    return None
                why = _refusal(error)
        raise StoreUnreachable(f"{_title(method, arguments)}: {why}")

    async def _write(self, method: Callable[..., T], *arguments: object) -> T | WriteFailure:
        """Write an object, once. Raises StoreUnreachable if nothing was written."""
        title = _title(method, arguments)
        try:
            return await self.calls.call(method, *arguments)
        except (NewConnectionError, ConnectTimeoutError) as error:
            raise StoreUnreachable(f"{title}: {error!r}") from error
        except HTTPError as error:
            log.warning("the answer to a write is lost", call=title, reason=repr(error))
            return WriteFailure.UNKNOWN
        except ApiException as error:
            if error.status in {HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND}:
                return WriteFailure.CONFLICT
            if not error.status or error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                # The server may have written, without an answer from its own store.
                log.warning("the API server failed at a write", call=title, reason=error.body)
                return WriteFailure.UNKNOWN
            raise StoreUnreachable(f"{title}: {_refusal(error)}") from error


def _title(method: Callable[..., object], arguments: tuple[Any, ...]) -> str:
    """Return the name of a call and its object, for errors and logs."""
    return " ".join([method.__name__, *(one for one in arguments if isinstance(one, str))])


def _refusal(error: ApiException) -> str:
    """Return why the server rejected a call; it names the right that is missing."""
    if error.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        log.error("the API server rejects a call", reason=error.body)
    return f"{error.status} {error.body or error.reason}"


def _kept_metadata(lease: V1Lease) -> V1ObjectMeta:
    """Return the metadata for the next write of a lease."""
    assert lease.metadata is not None, "each stored object has metadata"
    return V1ObjectMeta(
        name=lease.metadata.name,
        resource_version=lease.metadata.resource_version,
        annotations=lease.metadata.annotations,
        labels=lease.metadata.labels,
    )


def _renew_time() -> datetime:
    """Return the time, for people; other controllers use their own clock.

    The server demands a fraction of a second, which the client omits if it is 0.
    """
    now = datetime.now(UTC)
    return now.replace(microsecond=now.microsecond or 1)


def _stored(resource: Json) -> StoredRecord | None:
    """Return the record of a resource; None: it has none yet. Raises StoreDamaged."""
    record = _record_of(resource)
    if record is None:
        return None
    try:
        return StoredRecord(from_json(record), resource["metadata"]["resourceVersion"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        name = resource["metadata"]["name"]
        raise StoreDamaged(
            f"status.record of BrokerGroup {name} is damaged ({error!r}); restore the resource with"
            " its newest status, or delete its status: the replicas register again, and an alarm"
            " names the command that chooses the master"
        ) from error


def _record_of(resource: Json) -> Any:
    """Return the record of a resource as JSON values, unchecked; None: it has none yet."""
    return resource.get("status", {}).get("record")


def _changed(resource: Json) -> RecordChange | None:
    """Return the change of a resource; None without a record, or with a damaged one."""
    try:
        stored = _stored(resource)
    except StoreDamaged as error:
        # The changes of the other groups go on. A read of this group raises the error.
        log.warning("damaged group record", reason=str(error))
        return None
    return None if stored is None else RecordChange(resource["spec"]["group"], stored)


def _is_new(change: RecordChange, known: dict[str, str]) -> bool:
    """Return whether a change was not yielded before, and note it."""
    if change.stored is None:
        return known.pop(change.group, None) is not None
    is_new = known.get(change.group) != change.stored.token
    known[change.group] = change.stored.token
    return is_new
