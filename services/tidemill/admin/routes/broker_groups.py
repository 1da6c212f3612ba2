"""Broker groups: who belongs to the cluster."""

from __future__ import annotations

import asyncio
import contextlib
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Response

from tidemill.admin.broker_group_schemas import (
    BrokerGroup,
    BrokerGroupChange,
    BrokerGroupList,
    Left,
    NewMember,
    Replica,
)
from tidemill.admin.brokers import AWAY, Brokers, Member
from tidemill.admin.routes import Caller, Cluster, DryRun, json_of, refuse_foreign_pages
from tidemill.common.errors import BrokerGroupNotFound, Conflict
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

router = APIRouter(tags=["broker groups"])

Name = Annotated[str, Path(description="Name of the broker group.")]
BODILESS = [Depends(refuse_foreign_pages)]  # of actions that need no body of type JSON


@router.get("/broker-groups", response_model_exclude_none=True)
async def list_broker_groups(cluster: Cluster) -> BrokerGroupList:
    """List the broker groups, the home first, with what is left at those that drain.

    While the home is away it is the list that it gave last, and nothing is known of what is left.
    """
    return BrokerGroupList(items=await _all(cluster))


@router.get("/broker-groups/{name}", response_model_exclude_none=True)
async def get_broker_group(name: Name, cluster: Cluster) -> BrokerGroup:
    """Show a broker group."""
    return await _find(cluster, name)


@router.put("/broker-groups/{name}", response_model_exclude_none=True)
async def add_broker_group(
    name: Name, new: NewMember, cluster: Cluster, caller: Caller
) -> BrokerGroup:
    """Add a broker group, move one to another address, or take one back that drains.

    The home connects to it and tells it of all topics and consumer groups; it needs to be empty.
    """
    request = pb.AddBrokerGroupRequest(name=name, address=new.address, requested_by=caller)
    await (await cluster.home()).add_broker_group(request)
    await cluster.look()
    return await _find(cluster, name)


@router.post("/broker-groups/{name}:drain", response_model_exclude_none=True, dependencies=BODILESS)
async def drain_broker_group(
    name: Name, cluster: Cluster, caller: Caller, dry_run: DryRun = False
) -> BrokerGroupChange:
    """Let a broker group have no more new messages; what it has is consumed as before."""
    if not dry_run:
        request = pb.BrokerGroupRequest(name=name, requested_by=caller)
        await (await cluster.home()).drain_broker_group(request)
        await cluster.look()
    group = await _find(cluster, name)
    if dry_run:
        _check_not_home(group)
    return BrokerGroupChange(dry_run=dry_run, by=caller, group=group)


@router.delete(
    "/broker-groups/{name}",
    status_code=HTTPStatus.NO_CONTENT,
    response_model=None,
    responses={200: {"description": "The dry run.", "model": BrokerGroupChange}},
)
async def remove_broker_group(
    name: Name, cluster: Cluster, caller: Caller, dry_run: DryRun = False
) -> Response | None:
    """Remove a broker group that drains and is empty; its places go to the others."""
    if not dry_run:
        request = pb.BrokerGroupRequest(name=name, requested_by=caller)
        await (await cluster.home()).remove_broker_group(request)
        await cluster.look()
        return None
    group = await _find(cluster, name)
    _check_removable(group)
    return json_of(BrokerGroupChange(dry_run=True, by=caller, group=group))


async def _find(cluster: Brokers, name: str) -> BrokerGroup:
    found = await _all(cluster)
    for group in found:
        if group.name == name:
            return group
    known = ", ".join(group.name for group in found)
    raise BrokerGroupNotFound(f"there is no broker group {name!r}; there are {known}")


async def _all(cluster: Brokers) -> list[BrokerGroup]:
    """Return all, each asked by itself, and the home for what is left at whom."""
    members = await cluster.members()
    listed: dict[str, pb.BrokerGroup] = {}

    async def ask_home() -> None:
        with contextlib.suppress(*AWAY):
            answer = await members[0].client.list_broker_groups(with_left=True)
            listed.update((group.member.name, group) for group in answer.groups)

    statuses, _ = await asyncio.gather(asyncio.gather(*map(_find_status, members)), ask_home())
    return [
        _shown(member, status, listed.get(member.name))
        for member, status in zip(members, statuses, strict=True)
    ]


async def _find_status(member: Member) -> pb.BrokerStatus | None:
    """Return what a broker says of itself; None: it cannot be reached."""
    try:
        return await member.client.broker_status()
    except AWAY:
        return None


def _shown(
    member: Member, status: pb.BrokerStatus | None, listed: pb.BrokerGroup | None
) -> BrokerGroup:
    shown = BrokerGroup(
        name=member.name,
        state="draining" if member.is_draining else "active",
        is_home=member.is_home,
        address=member.address,
        reachable=status is not None,
        master=member.name,
        epoch=status.epoch if status is not None else None,
        replicas=[Replica(name=member.name, role="master", in_sync=True, behind_bytes=0)],
    )
    if status is None:
        shown.reason = "the admin process cannot reach it"
    elif status.name != member.name:
        shown.reason = f"{status.name} is at its address"
    if listed is None:
        return shown
    # The home may have decided since the list of members was made.
    shown.state = "draining" if listed.member.state == pb.DRAINING else "active"
    if listed.reason and status is not None:
        shown.reason = f"the home does not reach it: {listed.reason}"
    if listed.HasField("left"):
        left = listed.left
        shown.left = Left(
            messages=left.ready_count, in_flight=left.in_flight_count, delayed=left.delayed_count
        )
    return shown


def _check_not_home(group: BrokerGroup) -> None:
    if group.is_home:
        raise Conflict(f"{group.name} is the home of topics, consumer groups and broker groups")


def _check_removable(group: BrokerGroup) -> None:
    """Raise Conflict as the home would; it looks again when it removes."""
    _check_not_home(group)
    if group.state != "draining":
        raise Conflict(f"{group.name} is not draining: drain it first, and wait until it is empty")
    if group.left is None:
        raise Conflict(f"{group.name} cannot be asked what is left there: {group.reason}")
    if group.left.messages or group.left.in_flight or group.left.delayed:
        left = group.left
        raise Conflict(
            f"{group.name} is not empty: {left.messages} messages are ready, {left.in_flight} in"
            f" flight and {left.delayed} delayed"
        )
