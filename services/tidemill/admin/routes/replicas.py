"""Replicas of broker groups: master, sync state set and the last elections."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Depends, Request, Response

from tidemill.admin.audit.author import DELETE
from tidemill.admin.audit.controller_actions import recorded
from tidemill.admin.cluster.brokers import Brokers
from tidemill.admin.cluster.controllers import ControllerClients
from tidemill.admin.json.replicas import (
    CutTailView,
    ElectionView,
    MasterReplacementRequest,
    MasterTransferRequest,
    MinInSyncRequest,
    ReplicaChangeView,
    ReplicaDrainRequest,
    ReplicaStateView,
    ReplicatedBrokerGroupListView,
    ReplicatedBrokerGroupView,
)
from tidemill.admin.routes import BrokerGroupName, Caller, ChangeAuthor, Cluster, DryRun, json_of
from tidemill.common.errors import ServiceError
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire

router = APIRouter(tags=["replicas"])


def controllers_of(request: Request) -> ControllerClients:
    """Return the controller clients of the application."""
    controllers = request.app.state.controllers
    assert isinstance(controllers, ControllerClients)
    return controllers


All = Annotated[ControllerClients, Depends(controllers_of)]


@router.get("/replicas", response_model_exclude_none=True)
async def list_replicas(controllers: All, cluster: Cluster) -> ReplicatedBrokerGroupListView:
    """List the broker groups with their replicas and last elections."""
    shown = [_of(group) for group in await controllers.groups()]
    await _add_problems(shown, cluster)
    return ReplicatedBrokerGroupListView(items=shown)


@router.get("/replicas/{name}", response_model_exclude_none=True)
async def get_replicas(
    name: BrokerGroupName, controllers: All, cluster: Cluster
) -> ReplicatedBrokerGroupView:
    """Show the replicas of a broker group and its last elections."""
    shown = _of((await controllers.groups(name))[0])
    await _add_problems([shown], cluster)
    return shown


@router.post("/replicas/{name}:transfer", response_model_exclude_none=True)
async def transfer_master(
    name: BrokerGroupName,
    wish: Annotated[MasterTransferRequest, Body(default_factory=MasterTransferRequest)],
    controllers: All,
    cluster: Cluster,
    caller: Caller,
    author: ChangeAuthor,
    dry_run: DryRun = False,
) -> ReplicaChangeView:
    """Start a planned transfer of the master role to another replica. Sends pause for a moment.

    The answer does not wait for the transfer. The controller rejects a replica that is not in sync.
    """
    if dry_run:
        planned = await controllers.transfer(name, wish.target, is_dry=True)
        return _changed(planned, caller, dry_run=True)
    done = await recorded(
        cluster,
        author.of(f"BrokerGroup:{name}"),
        lambda: controllers.transfer(name, wish.target),
        after={"transfer": wish.target},
    )
    return _changed(done, caller, dry_run=False)


@router.post("/replicas/{name}:drain", response_model_exclude_none=True)
async def drain_replica(
    name: BrokerGroupName,
    wish: ReplicaDrainRequest,
    controllers: All,
    cluster: Cluster,
    caller: Caller,
    author: ChangeAuthor,
    dry_run: DryRun = False,
) -> ReplicaChangeView:
    """Drain a replica before its pod or machine is removed, or undo the drain.

    A master hands over, and the replica leaves the sync state set. The answer does not wait for
    this: `role` is `retired` when the drain is complete. The controller rejects a drain that leaves
    fewer than `minInSync` replicas in sync.
    """
    if dry_run:
        planned = await controllers.drain(name, wish.replica, undo=wish.undo, is_dry=True)
        return _changed(planned, caller, dry_run=True)
    done = await recorded(
        cluster,
        author.of(f"Replica:{name}-{wish.replica}"),
        lambda: controllers.drain(name, wish.replica, undo=wish.undo),
        after={"drained": not wish.undo},
    )
    return _changed(done, caller, dry_run=False)


@router.post("/replicas/{name}:setMinInSync", response_model_exclude_none=True)
async def set_min_in_sync(
    name: BrokerGroupName,
    wish: MinInSyncRequest,
    controllers: All,
    cluster: Cluster,
    caller: Caller,
    author: ChangeAuthor,
    dry_run: DryRun = False,
) -> ReplicaChangeView:
    """Set the number of replicas that must store a message before it is acknowledged.

    With 1, an acknowledged message may be stored at the master alone. The controller rejects the
    change if a `BrokerGroup` resource sets this number, and while there is no master.
    """
    if dry_run:
        planned = await controllers.set_min_in_sync(name, wish.min_in_sync, is_dry=True)
        return _changed(planned, caller, dry_run=True)
    done = await recorded(
        cluster,
        author.of(f"BrokerGroup:{name}"),
        lambda: controllers.set_min_in_sync(name, wish.min_in_sync),
        after={"minInSync": wish.min_in_sync},
    )
    return _changed(done, caller, dry_run=False)


@router.delete(
    "/replicas/{name}",
    status_code=204,
    response_model=None,
    responses={200: {"description": "Result of a dry run.", "model": ReplicaChangeView}},
)
async def forget_replicas(
    name: BrokerGroupName,
    controllers: All,
    cluster: Cluster,
    caller: Caller,
    author: ChangeAuthor,
    dry_run: DryRun = False,
) -> Response | None:
    """Delete the record of a broker group whose replicas no longer exist.

    The controller rejects this while a replica sent a heartbeat within the last half minute and did
    not stop cleanly. Afterwards it is unknown which replica has all messages, so replicas that come
    back need `:replace`.
    """
    if dry_run:
        planned = await controllers.plan_forget(name)
        return json_of(_changed(planned, caller, dry_run=True))
    await recorded(
        cluster,
        author.of(f"BrokerGroup:{name}", DELETE),
        lambda: controllers.forget(name),
        after={"record": "deleted"},
    )
    return None


@router.post("/replicas/{name}:replace", response_model_exclude_none=True)
async def replace_master(
    name: BrokerGroupName,
    wish: MasterReplacementRequest,
    controllers: All,
    cluster: Cluster,
    caller: Caller,
    author: ChangeAuthor,
    dry_run: DryRun = False,
) -> ReplicaChangeView:
    """Make a replica master at once, even if it may lack acknowledged messages.

    Use it only if the complete replicas do not come back: the missing messages are lost.
    """
    if dry_run:
        [before] = await controllers.groups(name)
        planned = await controllers.force(name, wish.target, wish.reason, is_dry=True)
        shown = _changed(planned, caller, dry_run=True)
        _show_loss(shown, before, planned)
        return shown
    done = await recorded(
        cluster,
        author.of(f"BrokerGroup:{name}"),
        lambda: controllers.force(name, wish.target, wish.reason),
        after={"master": wish.target, "reason": wish.reason},
    )
    return _changed(done, caller, dry_run=False)


def _changed(group: wire.BrokerGroupStatus, caller: str, *, dry_run: bool) -> ReplicaChangeView:
    lost_bytes = 0 if dry_run else None
    return ReplicaChangeView(**dict(_of(group)), dry_run=dry_run, by=caller, lost_bytes=lost_bytes)


def _show_loss(
    shown: ReplicaChangeView, before: wire.BrokerGroupStatus, planned: wire.BrokerGroupStatus
) -> None:
    """Show the confirmed log that the master of an unclean election does not have."""
    if planned.view.unclean_since != planned.view.epoch or planned.view.epoch == before.view.epoch:
        return
    beats = {one.replica_id: one.heartbeat for one in before.replicas if one.HasField("heartbeat")}
    complete = [one.replica_id for one in before.view.sss if one.replica_id in beats]
    target = next(one for one in planned.replicas if one.replica_id == shown.master)
    if not complete:
        shown.unknown = "the controllers have no heartbeat of a replica in sync"
    elif target.is_diverged:
        shown.unknown = f"the log of replica {shown.master} differs from that of the last master"
    if shown.unknown is not None:
        shown.lost_bytes = None
        return
    confirm = max(one.confirm for one in beats.values())
    shown.lost_bytes = max(confirm - target.heartbeat.log_end, 0)


async def _add_problems(shown: list[ReplicatedBrokerGroupView], cluster: Brokers) -> None:
    """Add to the alarms that the home cannot reach a broker group."""
    try:
        problems = {one.name: one.describe_problem() for one in await cluster.members()}
    except ServiceError:
        return  # The controllers know the state when no broker answers, or none is the master.
    for group in shown:
        alarms = [group.alarm, problems.get(group.name)]
        group.alarm = "; ".join(filter(None, alarms)) or None


def _of(group: wire.BrokerGroupStatus) -> ReplicatedBrokerGroupView:
    view = group.view
    master = view.master.replica_id if view.HasField("master") else None
    ends = {one.replica_id: one.heartbeat.log_end for one in group.replicas}
    in_sync = {one.replica_id for one in view.sss}

    def state(one: wire.ReplicaStatus) -> ReplicaStateView:
        has_heartbeat = one.HasField("heartbeat")
        role = "in-sync" if one.replica_id in in_sync else "learner"
        if one.retired and role == "learner":
            role = "retired"
        lag = None if master is None else max(ends.get(master, 0) - one.heartbeat.log_end, 0)
        return ReplicaStateView(
            replica=one.replica_id,
            role="master" if one.replica_id == master else role,
            retired=one.retired or None,
            address=one.address,
            silent_ms=one.silent_ms,
            log_end=one.heartbeat.log_end if has_heartbeat else None,
            confirm=one.heartbeat.confirm if has_heartbeat else None,
            lag_bytes=lag if has_heartbeat else None,
            unclean=one.is_unclean,
            diverged=one.is_diverged,
            full=one.heartbeat.health == wire.HEALTH_FULL,
            unheard=list(one.unheard),
        )

    return ReplicatedBrokerGroupView(
        name=group.name,
        epoch=view.epoch,
        version=view.version,
        master=master,
        in_sync=len(view.sss),
        min_in_sync=view.min_in_sync,
        unclean_since=view.unclean_since or None,
        alarm=group.alarm or None,
        notice=group.notice or None,
        transfer=group.transfer if group.HasField("transfer") else None,
        replicas=[state(one) for one in group.replicas],
        history=[
            ElectionView(
                epoch=one.epoch,
                source=one.source if one.HasField("source") else None,
                target=one.target,
                reason=one.reason,
                at_ms=one.at_ms,
                detected_ms=one.detected_ms,
                away_ms=one.away_ms if one.HasField("away_ms") else None,
                cuts=[_cut(cut) for cut in one.cuts],
            )
            for one in reversed(group.history)
        ],
    )


def _cut(cut: wire.Cut) -> CutTailView:
    return CutTailView(
        replica=cut.replica_id,
        offset=cut.offset,
        bytes=cut.size_bytes,
        records=cut.records,
        confirmed_bytes=cut.confirmed_bytes,
    )
