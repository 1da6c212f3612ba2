"""The number and the replacement of a broker group's pods, by the leading controller.

Helm changes neither, so an upgrade alone removes no replica and replaces no pod. `pods.py` decides
the next step. This module reads StatefulSets, and writes against the version that it read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, assert_never, final

import structlog
from kubernetes.client import ApiException, V1StatefulSet
from urllib3.exceptions import HTTPError

from tidemill.common.errors import BrokerGroupNotFound
from tidemill.common.replica_group import ReplicaId
from tidemill.controller.election.retirement import forget
from tidemill.controller.kubernetes_store import BrokerGroupSpec, KubernetesStore
from tidemill.controller.meta_store import StoreUnreachable
from tidemill.controller.pods import (
    MasterMove,
    PodReplacement,
    PodResize,
    PodStep,
    PodWait,
    StatefulSetPods,
    next_step,
)

if TYPE_CHECKING:
    from tidemill.controller.election.record import GroupRecord
    from tidemill.controller.election.sessions import GroupObservation
    from tidemill.controller.group import BrokerGroupControl
    from tidemill.controller.groups import BrokerGroupControls
    from tidemill.controller.operator_changes import Denial

PERIOD_S: Final = 2.0  # between two steps; a new pod takes longer to start
# Before the pod of the only replica is replaced. The upgrade also replaces proxies and admin, and
# starts controllers: on a small node they would delay the start of the pod, for which sends wait.
SETTLE_S: Final = 20.0
ERROR_LOG_PERIOD_S: Final = 60.0  # between two logs about one group, while its steps fail
MERGE_PATCH: Final = "application/merge-patch+json"

log = structlog.get_logger()


@final
class ReplicaScaling:
    """The loop that brings StatefulSets to the specs of their broker groups."""

    def __init__(
        self,
        store: KubernetesStore,
        groups: BrokerGroupControls,
        is_leading: Callable[[], bool],
        *,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._calls = store.calls
        self._store = store
        self._groups = groups
        self._is_leading = is_leading
        self._settle_s = settle_s
        self._seen_alone_s: dict[str, float] = {}  # first sight of groups that become replicated
        self._logged_at_s: dict[str, float] = {}  # by group: the last log of an error

    async def run(self) -> None:
        """Take a step every PERIOD_S until cancelled."""
        while True:
            if self._is_leading():
                with self._errors_logged(""):
                    await self.step()
            else:
                for group in self._groups.by_name.values():
                    # The leading controller has the current ones.
                    group.notice = ""
                    group.wanted_replicas = group.wanted_min_in_sync = None
            await asyncio.sleep(PERIOD_S)

    async def step(self) -> None:
        """Take the next step of each group. An error of one group does not stop the others.

        Raises StoreUnreachable if the groups cannot be listed.
        """
        is_replacing = False
        for spec in await self._store.specs():
            with self._errors_logged(spec.group):
                stateful_set = await self._read(spec)
                if stateful_set is None:
                    continue  # Helm creates one object after the other: look again later.
                is_other_replaced = is_replacing
                is_replacing = is_replacing or pods_of(stateful_set).is_changing
                await self._step_of(spec, stateful_set, is_other_replaced=is_other_replaced)

    async def _read(self, spec: BrokerGroupSpec) -> V1StatefulSet | None:
        """Return the StatefulSet of a group; None: there is none yet."""
        try:
            return await self._calls.call(
                self._calls.stateful_sets.read_namespaced_stateful_set,
                spec.stateful_set,
                self._calls.namespace,
            )
        except ApiException as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    async def _find_ending(self, spec: BrokerGroupSpec, count: int) -> frozenset[ReplicaId]:
        """Return the replicas with a pod that is missing or ends, such as at a node drain."""
        ending = set()
        for replica in map(ReplicaId, range(count)):
            try:
                pod = await self._calls.call(
                    self._calls.core.read_namespaced_pod,
                    f"{spec.stateful_set}-{replica}",
                    self._calls.namespace,
                )
            except ApiException as error:
                if error.status != HTTPStatus.NOT_FOUND:
                    raise
                ending.add(replica)
            else:
                assert pod.metadata is not None, "each stored object has metadata"
                if pod.metadata.deletion_timestamp is not None:
                    ending.add(replica)
        return frozenset(ending)

    async def _step_of(
        self, spec: BrokerGroupSpec, stateful_set: V1StatefulSet, *, is_other_replaced: bool
    ) -> None:
        """Take the next step of one group."""
        pods = pods_of(stateful_set)
        group = await self._group(spec)
        stored = await self._store.get(spec.group)
        record = None if stored is None else stored.record
        if spec.is_stopped:
            step: PodStep = (
                PodResize(0, 0) if pods.replicas else PodWait("its BrokerGroup is stopped")
            )
        elif pods.is_changing and is_other_replaced:
            # Pods of one group at a time are replaced, so that other groups take messages.
            step = PodWait("another broker group is being replaced")
        else:
            step = next_step(pods, spec_replicas=spec.replicas, record=record)
        if isinstance(step, MasterMove):
            pods = pods._replace(ending=await self._find_ending(spec, pods.replicas))
            step = next_step(pods, spec_replicas=spec.replicas, record=record)
        if record is None and pods.ready and isinstance(step, PodReplacement):
            step = self._settled(spec.group, step)
        if step == PodWait() and record is not None:
            step = PodWait(_why_below(record, spec))
        await self._do(step, spec, stateful_set, group)
        if group is not None and record is not None:
            await self._forget_last(group, record, pods)

    @contextlib.contextmanager
    def _errors_logged(self, name: str) -> Iterator[None]:
        """Log an error of the block instead of raising it, for one group or (empty) for all.

        The next step tries again. Log at most once in ERROR_LOG_PERIOD_S.
        """
        try:
            yield
        except (ApiException, HTTPError, StoreUnreachable) as error:
            reason = _reason_of(error)
            group = self._groups.by_name.get(name)
            if group is not None:
                group.notice = f"the controller cannot change its pods: {reason}"
            now_s = asyncio.get_running_loop().time()
            if now_s - self._logged_at_s.get(name, -ERROR_LOG_PERIOD_S) < ERROR_LOG_PERIOD_S:
                return
            self._logged_at_s[name] = now_s
            log.error("cannot change broker group pods", group=name or "all", reason=reason)  # noqa: TRY400  # The text says it all.

    def _settled(self, group: str, step: PodReplacement) -> PodStep:
        """Return the step, or a wait for the other processes of the upgrade."""
        now_s = asyncio.get_running_loop().time()
        if group not in self._seen_alone_s:
            log.info("one replica becomes several", group=group, replaced_in_s=self._settle_s)
        since_s = self._seen_alone_s.setdefault(group, now_s)
        is_settled = now_s - since_s >= self._settle_s
        return step if is_settled else PodWait("the other processes of the upgrade start first")

    async def _group(self, spec: BrokerGroupSpec) -> BrokerGroupControl | None:
        """Return the group, after its spec is set; None: it is not founded yet."""
        try:
            group = await self._groups.get(spec.group)
        except BrokerGroupNotFound:
            return None
        group.wanted_replicas = spec.replicas
        group.wanted_min_in_sync = spec.min_in_sync
        return group

    async def _do(
        self,
        step: PodStep,
        spec: BrokerGroupSpec,
        stateful_set: V1StatefulSet,
        group: BrokerGroupControl | None,
    ) -> None:
        notice = ""
        match step:
            case PodResize(replicas, partition):
                await self._patch(spec, stateful_set, replicas=replicas, partition=partition)
            case PodReplacement(partition):
                replicas = pods_of(stateful_set).replicas
                await self._patch(spec, stateful_set, replicas=replicas, partition=partition)
            case MasterMove(target):
                assert group is not None, "a group with a master is founded"
                notice = f"the master moves to replica {target}, because its pod is replaced next"
                await _move(group, target)
            case PodWait(why):
                notice = why
            case _:
                assert_never(step)
        if group is not None and notice != group.notice:
            if notice:
                log.info("pods of a broker group wait", group=spec.group, reason=notice)
            group.notice = notice

    async def _patch(
        self, spec: BrokerGroupSpec, stateful_set: V1StatefulSet, *, replicas: int, partition: int
    ) -> None:
        assert stateful_set.metadata is not None, "each stored object has metadata"
        patch = {
            "metadata": {"resourceVersion": stateful_set.metadata.resource_version},
            "spec": {
                "replicas": replicas,
                "updateStrategy": {
                    "type": "RollingUpdate",
                    "rollingUpdate": {"partition": partition},
                },
            },
        }
        try:
            await self._calls.call(
                self._calls.stateful_sets.patch_namespaced_stateful_set,
                spec.stateful_set,
                self._calls.namespace,
                patch,
                _content_type=MERGE_PATCH,
            )
        except ApiException as error:
            if error.status == HTTPStatus.CONFLICT:
                return  # The next step decides.
            raise
        log.info(
            "pods of a broker group changed",
            group=spec.group,
            replicas=replicas,
            replaced_from=partition,
        )

    async def _forget_last(
        self, group: BrokerGroupControl, record: GroupRecord, pods: StatefulSetPods
    ) -> None:
        """Forget the highest replica without a pod, when it is no longer live."""
        without_pod = [id_ for id_, _ in record.replicas if id_ >= pods.replicas]
        if not without_pod:
            return
        last = max(without_pod)

        def forget_last(record: GroupRecord, observation: GroupObservation) -> GroupRecord | Denial:
            if group.is_heard(record.find_member(last), observation):
                return record
            return forget(record, last)

        await group.change(forget_last)


def _reason_of(error: ApiException | HTTPError | StoreUnreachable) -> str:
    """Return the reason of an error for an operator."""
    match error:
        case ApiException():
            return f"the API server answered {error.status} {error.body or error.reason}"
        case StoreUnreachable():
            return error.describe()
        case _:
            return f"the API server does not answer: {error!r}"


def _why_below(record: GroupRecord, spec: BrokerGroupSpec) -> str:
    """Return why fewer replicas than in the spec acknowledge a message; empty: they do not."""
    if record.min_in_sync >= spec.min_in_sync:
        return ""
    return (
        f"messages are acknowledged with {record.min_in_sync} of {spec.min_in_sync} replicas of"
        f" minInSync, until {spec.min_in_sync} are in sync"
    )


def pods_of(stateful_set: V1StatefulSet) -> StatefulSetPods:
    """Return the pods of a StatefulSet."""
    metadata, spec, status = stateful_set.metadata, stateful_set.spec, stateful_set.status
    assert metadata is not None, "each stored object has metadata"
    assert spec is not None, "each StatefulSet has a spec"
    strategy = spec.update_strategy
    # With OnDelete, Kubernetes replaces no pod: the chart keeps the pod of an only replica.
    partition = spec.replicas if strategy and strategy.type == "OnDelete" else 0
    if strategy and strategy.rolling_update:
        partition = strategy.rolling_update.partition
    generation = (status and status.observed_generation) or 0
    updated = (status and status.updated_replicas) or 0
    # After a rollback in the middle of a replacement both revisions are equal, and the pods that
    # were replaced before it still follow the other template.
    is_outdated = status is not None and updated < (status.replicas or 0)
    is_update = status is not None and status.update_revision != status.current_revision
    return StatefulSetPods(
        replicas=spec.replicas or 0,
        partition=partition or 0,
        ready=(status and status.ready_replicas) or 0,
        updated=updated,
        is_seen=generation >= (metadata.generation or 0),
        is_changing=is_outdated or is_update,
        is_update=is_update,
    )


async def _move(group: BrokerGroupControl, target: ReplicaId) -> None:
    def request_transfer(
        record: GroupRecord, _observation: GroupObservation
    ) -> GroupRecord | Denial:
        if record.transfer == target:
            return record
        return record._replace(transfer=target, version=record.version + 1)

    await group.change(request_transfer)
