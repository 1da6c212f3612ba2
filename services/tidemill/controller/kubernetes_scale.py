"""How many pods a broker group has and which are replaced: the leading controller sees to it.

Helm leaves both alone, so that an upgrade takes no replica away and replaces no pod by itself. What
to do is decided in `pods.py`; here it is read, and written against the version that was read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, assert_never, final

import httpx
import structlog

from tidemill.common.errors import BrokerGroupNotFound
from tidemill.controller.election.retirement import forget
from tidemill.controller.kubernetes_store import KubernetesStore, Wanted
from tidemill.controller.meta_store import StoreUnreachable
from tidemill.controller.pods import MoveMaster, Pods, Replace, Resize, Step, Wait, next_step

if TYPE_CHECKING:
    from tidemill.common.replica_group import ReplicaId
    from tidemill.controller.election.record import GroupRecord
    from tidemill.controller.election.sessions import Sight
    from tidemill.controller.group import Group, Refusal
    from tidemill.controller.groups import Groups

PERIOD_S: Final = 2.0  # between two looks; a new pod takes longer to start

log = structlog.get_logger()


@final
class Scaling:
    """Compares what is wanted with what there is, again and again."""

    def __init__(
        self, store: KubernetesStore, groups: Groups, is_leading: Callable[[], bool]
    ) -> None:
        self._api = store.api
        self._store = store
        self._groups = groups
        self._is_leading = is_leading

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            if self._is_leading():
                with contextlib.suppress(StoreUnreachable, httpx.TransportError):
                    await self.step()
            else:
                for group in self._groups.by_name.values():
                    group.notice = ""  # Whoever leads now knows.
            await asyncio.sleep(PERIOD_S)

    async def step(self) -> None:
        """Look once. Raises StoreUnreachable, httpx.TransportError."""
        is_replacing = False
        for wanted in await self._store.wanted():
            found = await self._api.call("GET", self._path(wanted))
            if not found.is_success:
                continue  # It comes with the next look, as Helm makes one after the other.
            stateful_set = found.json()
            pods = pods_of(stateful_set)
            group = await self._group(wanted)
            stored = await self._store.get(wanted.group)
            record = None if stored is None else stored.record
            if wanted.is_stopped:
                step: Step = Resize(0, 0) if pods.replicas else Wait("its BrokerGroup is stopped")
            elif pods.is_changing and is_replacing:
                # Of all groups one is being replaced at a time: the others take what is sent.
                step = Wait("another broker group is being replaced")
            else:
                step = next_step(pods, wanted=wanted.replicas, record=record)
            is_replacing = is_replacing or pods.is_changing
            await self._do(step, wanted, stateful_set, group)
            if group is not None and record is not None:
                await self._forget_the_gone(group, record, pods)

    async def _group(self, wanted: Wanted) -> Group | None:
        """Return the group, which is told what is wanted; None: nobody has founded it yet."""
        try:
            group = await self._groups.find(wanted.group)
        except BrokerGroupNotFound:
            return None
        group.wanted_replicas = wanted.replicas
        group.wanted_min_in_sync = wanted.min_in_sync
        return group

    async def _do(
        self, step: Step, wanted: Wanted, stateful_set: dict[str, Any], group: Group | None
    ) -> None:
        notice = ""
        match step:
            case Resize(replicas, partition):
                await self._patch(wanted, stateful_set, replicas=replicas, partition=partition)
            case Replace(partition):
                await self._patch(
                    wanted,
                    stateful_set,
                    replicas=stateful_set["spec"].get("replicas", 0),
                    partition=partition,
                )
            case MoveMaster(target):
                assert group is not None, "it has a master"
                notice = f"the master moves to replica {target}, as its pod is to be replaced"
                await _move(group, target)
            case Wait(why):
                notice = why
            case _:
                assert_never(step)
        if group is not None and notice != group.notice:
            if notice:
                log.info("the pods of a broker group", group=wanted.group, waits=notice)
            group.notice = notice

    async def _patch(
        self, wanted: Wanted, stateful_set: dict[str, Any], *, replicas: int, partition: int
    ) -> None:
        done = await self._api.call(
            "PATCH",
            self._path(wanted),
            {
                "metadata": {"resourceVersion": stateful_set["metadata"]["resourceVersion"]},
                "spec": {
                    "replicas": replicas,
                    "updateStrategy": {
                        "type": "RollingUpdate",
                        "rollingUpdate": {"partition": partition},
                    },
                },
            },
            kind="application/merge-patch+json",
        )
        if done.is_success:
            log.info(
                "the pods of a broker group",
                group=wanted.group,
                replicas=replicas,
                replaced_from=partition,
            )
        elif done.status_code != HTTPStatus.CONFLICT:  # Then it is looked at again.
            log.error("the pods of a broker group stay", group=wanted.group, reason=done.text)

    async def _forget_the_gone(self, group: Group, record: GroupRecord, pods: Pods) -> None:
        """Forget the highest replica whose pod is gone, when nothing is heard of it any more."""
        gone = [id_ for id_, _ in record.replicas if id_ >= pods.replicas]
        if not gone:
            return
        last = max(gone)

        def ask(record: GroupRecord, sight: Sight) -> GroupRecord | Refusal:
            if group.is_heard(record.find_member(last), sight):
                return record
            return forget(record, last)

        await group.change(ask)

    def _path(self, wanted: Wanted) -> str:
        return f"/apis/apps/v1/namespaces/{self._api.namespace}/statefulsets/{wanted.stateful_set}"


def pods_of(found: dict[str, Any]) -> Pods:
    """Return the pods of a StatefulSet."""
    spec, status = found["spec"], found.get("status", {})
    strategy = spec.get("updateStrategy", {}).get("rollingUpdate") or {}
    return Pods(
        replicas=spec.get("replicas", 0),
        partition=strategy.get("partition", 0),
        ready=status.get("readyReplicas", 0),
        updated=status.get("updatedReplicas", 0),
        is_seen=status.get("observedGeneration", 0) >= found["metadata"].get("generation", 0),
        is_changing=status.get("updateRevision") != status.get("currentRevision"),
    )


async def _move(group: Group, target: ReplicaId) -> None:
    def ask(record: GroupRecord, _sight: Sight) -> GroupRecord | Refusal:
        if record.transfer == target:
            return record
        return record._replace(transfer=target, version=record.version + 1)

    await group.change(ask)
