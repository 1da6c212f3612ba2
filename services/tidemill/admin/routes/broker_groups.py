"""Broker groups: who belongs to the cluster."""

from __future__ import annotations

import asyncio
import contextlib
from http import HTTPStatus
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Path, Query, Response

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import UNREACHABLE_ERRORS, BrokerGroupClient, Brokers
from tidemill.admin.cluster.controllers import ControllerClients
from tidemill.admin.json.broker_groups import (
    BacklogItemView,
    BacklogView,
    BrokerGroupChangeView,
    BrokerGroupListView,
    BrokerGroupView,
    NewBrokerGroup,
    ReplicaView,
)
from tidemill.admin.routes import Caller, Cluster, DryRun, json_of, refuse_foreign_pages
from tidemill.admin.routes.replicas import All
from tidemill.common.errors import BrokerGroupNotFound, BrokerGroupUnreachable, Conflict
from tidemill.message.broker_names import check_address, check_name
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire

router = APIRouter(tags=["broker groups"])

ANSWER_TIMEOUT_S: Final = 3.0  # of a broker that is to be added, before it is taken for none

Name = Annotated[str, Path(description="Name of the broker group.")]
Force = Annotated[
    bool, Query(description="Give up what is left there, also where nobody knows what that is.")
]
BODILESS = [Depends(refuse_foreign_pages)]  # of actions that need no body of type JSON


@router.get("/broker-groups", response_model_exclude_none=True)
async def list_broker_groups(cluster: Cluster, controllers: All) -> BrokerGroupListView:
    """List the broker groups, the home first, with what is left at those that drain.

    While the home is away it is the list that it gave last, and nothing is known of what is left.
    """
    groups = await _all(cluster)
    await _show_replicas(groups, controllers)
    return BrokerGroupListView(items=groups)


@router.get("/broker-groups/{name}", response_model_exclude_none=True)
async def get_broker_group(name: Name, cluster: Cluster, controllers: All) -> BrokerGroupView:
    """Show a broker group."""
    group = await _find(cluster, name)
    await _show_replicas([group], controllers)
    return group


@router.put("/broker-groups/{name}", response_model_exclude_none=True)
async def add_broker_group(
    name: Name, new: NewBrokerGroup, cluster: Cluster, caller: Caller, dry_run: DryRun = False
) -> BrokerGroupChangeView:
    """Add a broker group, move one to another address, or take one back that drains.

    The home connects to it and tells it of all topics and consumer groups; it needs to be empty.
    A broker group that is alone is added first itself, by which it becomes the home. Refused unless
    a broker of that name answers at the address, or it is forced.
    """
    check_address(new.address)
    known = await _find_member(cluster, name)
    if known is None:
        check_name(name)
    if not new.force and (known is None or known.address != new.address):
        await _check_answers(cluster, name, new.address, known)
    if dry_run:
        planned = _planned(name, new) if known is None else await _find(cluster, name)
        planned.address = new.address
        return BrokerGroupChangeView(dry_run=True, by=caller, group=planned)
    request = pb.AddBrokerGroupRequest(name=name, address=new.address, requested_by=caller)
    added = await (await cluster.home()).call(calls.ADD_BROKER_GROUP, request)
    if added.member.address != new.address:
        raise Conflict(f"{name} stays at {added.member.address}: it was not moved")
    await cluster.look()
    return BrokerGroupChangeView(dry_run=False, by=caller, group=await _find(cluster, name))


@router.post("/broker-groups/{name}:drain", response_model_exclude_none=True, dependencies=BODILESS)
async def drain_broker_group(
    name: Name, cluster: Cluster, caller: Caller, dry_run: DryRun = False
) -> BrokerGroupChangeView:
    """Let a broker group have no more new messages; what it has is consumed as before."""
    if dry_run:
        await _check_home_is_up(cluster)
    else:
        request = pb.DrainBrokerGroupRequest(name=name, requested_by=caller)
        await (await cluster.home()).call(calls.DRAIN_BROKER_GROUP, request)
        await cluster.look()
    group = await _find(cluster, name)
    if dry_run:
        _check_not_home(group)
    return BrokerGroupChangeView(dry_run=dry_run, by=caller, group=group)


@router.delete(
    "/broker-groups/{name}",
    status_code=HTTPStatus.NO_CONTENT,
    response_model=None,
    responses={
        200: {"description": "The dry run, or what was forced.", "model": BrokerGroupChangeView}
    },
)
async def remove_broker_group(
    name: Name, cluster: Cluster, caller: Caller, dry_run: DryRun = False, force: Force = False
) -> Response | None:
    """Remove a broker group that drains and is empty; its places go to the others.

    One that is forced out keeps what is left there in its data directory: nobody receives that
    before it is added again.
    """
    if dry_run:
        await _check_home_is_up(cluster)
    group = await _find(cluster, name) if dry_run or force else None
    if dry_run and group is not None:
        _check_removable(group, force=force)
        return json_of(BrokerGroupChangeView(dry_run=True, by=caller, group=group))
    request = pb.RemoveBrokerGroupRequest(name=name, requested_by=caller, force=force)
    removed = await (await cluster.home()).call(calls.REMOVE_BROKER_GROUP, request)
    await cluster.look()
    if group is None:
        return None
    _show_left(group, removed)
    return json_of(BrokerGroupChangeView(dry_run=False, by=caller, group=group))


async def _check_home_is_up(cluster: Brokers) -> None:
    """Raise what a change would be refused with while the home is away; take its list."""
    try:
        await cluster.look()
    except UNREACHABLE_ERRORS as error:
        raise BrokerGroupUnreachable(
            f"the home is away, and nobody else changes the list of broker groups: start it again"
            f" ({error.message})"
        ) from error


async def _find_member(cluster: Brokers, name: str) -> BrokerGroupClient | None:
    await _check_home_is_up(cluster)
    return next((member for member in await cluster.members() if member.name == name), None)


async def _check_answers(
    cluster: Brokers, name: str, address: str, known: BrokerGroupClient | None
) -> None:
    """Raise BrokerGroupUnreachable or Conflict unless a broker of this name is at an address."""
    kept = f"; {name} stays at {known.address}" if known is not None else ""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            status = await (await cluster.client_at(address)).call(
                calls.GET_BROKER_STATUS, pb.GetBrokerStatusRequest()
            )
    except (TimeoutError, *UNREACHABLE_ERRORS) as error:
        raise BrokerGroupUnreachable(
            f"no broker answers at {address}{kept}. Start it first; `tidemill broker-group add"
            f" {name} {address} --force` adds it as it is"
        ) from error
    if status.name != name:
        raise Conflict(f"the broker at {address} is called {status.name}, not {name}{kept}")


def _planned(name: str, new: NewBrokerGroup) -> BrokerGroupView:
    """Return what a broker group will be that is none yet."""
    return BrokerGroupView(
        name=name,
        state="active",
        is_home=False,
        address=new.address,
        reachable=not new.force,
        master=name,
        epoch=None,
        replicas=[],
    )


async def _find(cluster: Brokers, name: str) -> BrokerGroupView:
    found = await _all(cluster)
    for group in found:
        if group.name == name:
            return group
    known = ", ".join(group.name for group in found)
    raise BrokerGroupNotFound(f"there is no broker group {name!r}; there are {known}")


async def _all(cluster: Brokers) -> list[BrokerGroupView]:
    """Return all, each asked by itself, and the home for what is left at whom."""
    members = await cluster.members()
    listed: dict[str, pb.BrokerGroup] = {}

    async def ask_home() -> None:
        with contextlib.suppress(*UNREACHABLE_ERRORS):
            answer = await members[0].client.call(
                calls.LIST_BROKER_GROUPS, pb.ListBrokerGroupsRequest(with_backlog=True)
            )
            listed.update((group.member.name, group) for group in answer.groups)

    statuses, _ = await asyncio.gather(asyncio.gather(*map(_find_status, members)), ask_home())
    return [
        _shown(member, status, listed.get(member.name))
        for member, status in zip(members, statuses, strict=True)
    ]


async def _find_status(member: BrokerGroupClient) -> pb.BrokerStatus | None:
    """Return what a broker says of itself; None: it cannot be reached."""
    try:
        return await member.client.call(calls.GET_BROKER_STATUS, pb.GetBrokerStatusRequest())
    except UNREACHABLE_ERRORS:
        return None


def _shown(
    member: BrokerGroupClient, status: pb.BrokerStatus | None, listed: pb.BrokerGroup | None
) -> BrokerGroupView:
    # A broker that cannot be asked may be any of its group.
    replica = (status.replica_name if status is not None else "") or member.name
    shown = BrokerGroupView(
        name=member.name,
        state="draining" if member.is_draining else "active",
        is_home=member.is_home,
        address=member.address,
        reachable=status is not None,
        master=replica,
        epoch=status.epoch if status is not None else None,
        replicas=[ReplicaView(name=replica, role="master", in_sync=True, behind_bytes=0)],
    )
    if status is None:
        shown.reason = "the admin process cannot reach it"
    elif status.name != member.name:
        shown.reason = f"{status.name} is at its address"
    if listed is None:
        return shown
    # The home may have decided since the list of members was made.
    shown.state = "draining" if listed.member.state == pb.MEMBER_STATE_DRAINING else "active"
    if listed.reason and status is not None:
        shown.reason = f"the home does not reach it: {listed.reason}"
    _show_left(shown, listed)
    return shown


async def _show_replicas(groups: list[BrokerGroupView], controllers: ControllerClients) -> None:
    """Add what controllers know of who is master and who follows; without them it stays so."""
    if not controllers.are_there:
        return
    try:
        known = {found.name: found for found in await controllers.groups()}
    except BrokerGroupUnreachable:
        return  # What the master says of itself is true without them.
    for group in groups:
        if group.name in known:
            _show_replicas_of(group, known[group.name])


def _show_replicas_of(shown: BrokerGroupView, known: wire.Group) -> None:
    view = known.view
    ends = {one.replica_id: one.heartbeat.log_end for one in known.replicas}
    in_sync = {one.replica_id for one in view.sss}
    master = view.master.replica_id if view.HasField("master") else None
    shown.epoch = view.epoch
    if master is not None:
        shown.master = _replica_name(shown.name, master)
    shown.replicas = [
        ReplicaView(
            name=_replica_name(shown.name, number),
            role="master" if number == master else "replica",
            in_sync=number in in_sync,
            behind_bytes=max(max(ends.values()) - end, 0),
        )
        for number, end in sorted(ends.items(), key=lambda one: (one[0] != master, one[0]))
    ]


def _replica_name(group: str, number: int) -> str:
    """Return what a replica is called wherever somebody starts them by their number."""
    return f"{group}-{number}"


def _show_left(shown: BrokerGroupView, listed: pb.BrokerGroup) -> None:
    shown.left = shown.last_left = None
    if listed.HasField("backlog"):
        shown.left = _left(listed.backlog)
    elif listed.last_backlog_at_ms:
        shown.last_left = _left(listed.last_backlog)
        shown.last_left.at_ms = listed.last_backlog_at_ms


def _left(left: pb.Backlog) -> BacklogView:
    return BacklogView(
        messages=left.ready_count,
        in_flight=left.in_flight_count,
        delayed=left.delayed_count,
        items=[
            BacklogItemView(
                topic=item.topic,
                group=item.group or None,
                messages=item.ready_count,
                in_flight=item.in_flight_count,
                unread=item.is_unread,
                pulled_queue=item.pulled_queue_id if item.HasField("pulled_queue_id") else None,
            )
            for item in left.items
        ],
        unnamed=left.unnamed_count,
    )


def _check_not_home(group: BrokerGroupView) -> None:
    if group.is_home:
        raise Conflict(
            f"{group.name} is the home of topics, consumer groups and broker groups: it stays. To"
            f" have it on another machine, stop it, take its data directory there, and start it"
        )


def _check_removable(group: BrokerGroupView, *, force: bool) -> None:
    """Raise Conflict as the home would; it looks again when it removes."""
    _check_not_home(group)
    if group.state != "draining":
        raise Conflict(
            f"{group.name} is not draining: drain it first, and wait until it is empty; one that"
            f" still takes messages is not removed by force either"
        )
    if force:
        return
    if group.left is None:
        raise Conflict(
            f"{group.name} cannot be asked what is left there: {group.reason}. Start it again, or"
            f" give up what it has: `tidemill broker-group remove {group.name} --force`"
        )
    if group.left.messages or group.left.in_flight or group.left.delayed:
        left = group.left
        raise Conflict(
            f"{group.name} is not empty: {left.messages} messages are ready, {left.in_flight} in"
            f" flight and {left.delayed} delayed"
        )
