"""Broker groups: list, add, drain and remove the members of the cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Final

from fastapi import APIRouter, Query, Response

from tidemill.admin.audit.author import DELETE
from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import (
    MEMBER_UNREACHABLE_MS,
    UNREACHABLE_ERRORS,
    BrokerGroupClient,
    Brokers,
)
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
from tidemill.admin.routes import (
    Access,
    BrokerGroupName,
    Caller,
    ChangeAuthor,
    Cluster,
    DryRun,
    json_of,
)
from tidemill.admin.routes.replicas import All
from tidemill.common.errors import (
    BrokerGroupNotFound,
    BrokerGroupUnreachable,
    BrokerTimeout,
    Conflict,
    Draining,
    UnavailableError,
)
from tidemill.common.feature_level import read_level
from tidemill.message.broker_names import check_address, check_name
from tidemill.security.acl import Action, Resource, ResourceType
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire

BROKER_GROUPS: Final = Resource(ResourceType.CLUSTER, "broker-groups")

router = APIRouter(tags=["broker groups"])

ANSWER_TIMEOUT_S: Final = 3.0  # of a broker to add; afterwards the address has no broker

Force = Annotated[
    bool, Query(description="Remove the broker group even if its backlog is not empty or unknown.")
]


@router.get("/broker-groups", response_model_exclude_none=True)
async def list_broker_groups(cluster: Cluster, controllers: All) -> BrokerGroupListView:
    """List the broker groups, the home first, with the backlog of those that drain.

    While the home is unreachable, the answer is its last list, without backlogs.
    """
    groups = await _all(cluster)
    await _show_replicas(groups, controllers)
    return BrokerGroupListView(items=groups)


@router.get("/broker-groups/{name}", response_model_exclude_none=True)
async def get_broker_group(
    name: BrokerGroupName, cluster: Cluster, controllers: All
) -> BrokerGroupView:
    """Show a broker group."""
    group = await _find(cluster, name)
    await _show_replicas([group], controllers)
    return group


@router.put("/broker-groups/{name}", response_model_exclude_none=True)
async def add_broker_group(
    name: BrokerGroupName,
    new: NewBrokerGroup,
    cluster: Cluster,
    access: Access,
    caller: Caller,
    author: ChangeAuthor,
    dry_run: DryRun = False,
) -> BrokerGroupChangeView:
    """Add a broker group, change its address, or undo its drain.

    The home connects to the new broker group and copies all topics and consumer groups to it. The
    new one must be empty. A single broker group first adds itself and becomes the home. Without
    `force`, a broker with this name must answer at the address.
    """
    check_address(new.address)
    known = await _find_member(cluster, name)
    access.require(Action.CREATE if known is None else Action.UPDATE, BROKER_GROUPS)
    if known is None:
        check_name(name)
        await _check_cluster(cluster)
    if not new.force and (known is None or known.address != new.address):
        await _check_answers(cluster, name, new.address, known)
    if dry_run:
        planned = _planned(name, new) if known is None else await _find(cluster, name)
        planned.address = new.address
        return BrokerGroupChangeView(dry_run=True, by=caller, group=planned)
    request = pb.AddBrokerGroupRequest(
        name=name, address=new.address, requested_by=caller, audit=author.of(f"BrokerGroup:{name}")
    )
    added = await (await cluster.home()).call(calls.ADD_BROKER_GROUP, request)
    if added.member.address != new.address:
        raise Conflict(f"{name} stays at {added.member.address}: the home did not move it")
    await cluster.refresh()
    return BrokerGroupChangeView(dry_run=False, by=caller, group=await _find(cluster, name))


@router.post("/broker-groups/{name}:drain", response_model_exclude_none=True)
async def drain_broker_group(
    name: BrokerGroupName,
    cluster: Cluster,
    caller: Caller,
    author: ChangeAuthor,
    dry_run: DryRun = False,
) -> BrokerGroupChangeView:
    """Stop new messages to a broker group. Consumers still receive its stored messages."""
    if dry_run:
        await _check_home_is_up(cluster)
    else:
        request = pb.DrainBrokerGroupRequest(
            name=name, requested_by=caller, audit=author.of(f"BrokerGroup:{name}")
        )
        await (await cluster.home()).call(calls.DRAIN_BROKER_GROUP, request)
        await cluster.refresh()
    group = await _find(cluster, name)
    if dry_run:
        _check_not_home(group)
    return BrokerGroupChangeView(dry_run=dry_run, by=caller, group=group)


@router.delete(
    "/broker-groups/{name}",
    status_code=HTTPStatus.NO_CONTENT,
    response_model=None,
    responses={
        200: {
            "description": "Result of a dry run or a forced removal.",
            "model": BrokerGroupChangeView,
        }
    },
)
async def remove_broker_group(
    name: BrokerGroupName,
    cluster: Cluster,
    caller: Caller,
    author: ChangeAuthor,
    dry_run: DryRun = False,
    force: Force = False,
) -> Response | None:
    """Remove a draining broker group with an empty backlog. The others take its message groups.

    After a forced removal, the data directory keeps the backlog. Consumers receive it only after
    the broker group is added again.
    """
    if dry_run:
        await _check_home_is_up(cluster)
    group = await _find(cluster, name) if dry_run or force else None
    if dry_run and group is not None:
        _check_removable(group, force=force)
        return json_of(BrokerGroupChangeView(dry_run=True, by=caller, group=group))
    request = pb.RemoveBrokerGroupRequest(
        name=name, requested_by=caller, force=force, audit=author.of(f"BrokerGroup:{name}", DELETE)
    )
    removed = await (await cluster.home()).call(calls.REMOVE_BROKER_GROUP, request)
    await cluster.refresh()
    if group is None:
        return None
    _show_backlog(group, removed)
    return json_of(BrokerGroupChangeView(dry_run=False, by=caller, group=group))


async def _check_home_is_up(cluster: Brokers) -> None:
    """Refresh the list of members. Raises BrokerGroupUnreachable if the home is unreachable."""
    try:
        await cluster.refresh()
    except UNREACHABLE_ERRORS as error:
        raise BrokerGroupUnreachable(
            f"the home is unreachable, and only the home changes the list of broker groups; start"
            f" it again ({error.message})"
        ) from error


async def _find_member(cluster: Brokers, name: str) -> BrokerGroupClient | None:
    await _check_home_is_up(cluster)
    return next((member for member in await cluster.members() if member.name == name), None)


async def _check_cluster(cluster: Brokers) -> None:
    """Raise Conflict while the only broker group has not added itself."""
    config = await (await cluster.home()).call(calls.GET_CONFIG, pb.GetConfigRequest())
    if not config.membership.cluster_id:
        name = config.broker_name
        raise Conflict(
            f"{name} is the only broker group, and the others would not know its address. First add"
            f" it with its own address: tidemill broker-group add {name} ADDRESS"
        )


async def _check_answers(
    cluster: Brokers, name: str, address: str, known: BrokerGroupClient | None
) -> None:
    """Raise Conflict unless a broker of this name answers at an address."""
    unchanged = f"; {name} stays at {known.address}" if known is not None else ""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            status = await (await cluster.client_at(address)).call(
                calls.GET_BROKER_STATUS, pb.GetBrokerStatusRequest()
            )
    except (TimeoutError, *UNREACHABLE_ERRORS) as error:
        raise Conflict(
            f"no broker answers at {address}{unchanged}. Start the broker first, or add it without"
            f" a check: tidemill broker-group add {name} {address} --force"
        ) from error
    if status.name != name:
        raise Conflict(f"the broker at {address} is called {status.name}, not {name}{unchanged}")


def _planned(name: str, new: NewBrokerGroup) -> BrokerGroupView:
    """Return the view of a broker group that will be added."""
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


async def find_broker_groups(
    cluster: Brokers, controllers: ControllerClients, *, timeout_s: float
) -> tuple[list[BrokerGroupView], bool]:
    """Return what is known of all broker groups in time, and whether a controller has answered.

    A broker group that does not answer in time is shown as unreachable.
    """

    async def ask_controllers() -> dict[str, wire.BrokerGroupStatus] | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await _records_of(controllers)
        except TimeoutError:
            return None

    groups, known = await asyncio.gather(_all(cluster, timeout_s), ask_controllers())
    _add_replicas(groups, known or {})
    return groups, known is not None


async def _all(cluster: Brokers, timeout_s: float | None = None) -> list[BrokerGroupView]:
    """Return all broker groups: the status of each one, and the backlogs from the home."""
    members = await cluster.members()
    listed: dict[str, pb.BrokerGroup] = {}

    async def ask_home() -> None:
        with contextlib.suppress(TimeoutError, *UNREACHABLE_ERRORS):
            async with asyncio.timeout(timeout_s):
                answer = await members[0].client.call(
                    calls.LIST_BROKER_GROUPS, pb.ListBrokerGroupsRequest(with_backlog=True)
                )
            listed.update((group.member.name, group) for group in answer.groups)

    statuses, _ = await asyncio.gather(
        asyncio.gather(*(_find_status(member, timeout_s) for member in members)), ask_home()
    )
    return [
        _shown(member, status, listed.get(member.name))
        for member, status in zip(members, statuses, strict=True)
    ]


async def _find_status(
    member: BrokerGroupClient, timeout_s: float | None
) -> pb.BrokerStatus | UnavailableError:
    """Return the status of a broker, or why it is unreachable."""
    try:
        async with asyncio.timeout(timeout_s):
            return await member.client.call(calls.GET_BROKER_STATUS, pb.GetBrokerStatusRequest())
    except TimeoutError:
        return BrokerTimeout(f"{member.name} did not answer within {timeout_s:g} s")
    except UNREACHABLE_ERRORS as error:
        return error


def _describe(error: UnavailableError) -> str:
    """Return why a broker is unreachable, in a few words."""
    match error:
        case BrokerTimeout():
            return "it does not answer"
        case Draining():
            return "it is stopping"
        case _:
            return "no connection"


def _shown(
    member: BrokerGroupClient,
    answer: pb.BrokerStatus | UnavailableError,
    listed: pb.BrokerGroup | None,
) -> BrokerGroupView:
    status = answer if isinstance(answer, pb.BrokerStatus) else None
    # The name of an unreachable replica is unknown.
    replica = (status.replica_name if status is not None else "") or member.name
    shown = BrokerGroupView(
        name=member.name,
        state="draining" if member.is_draining else "active",
        is_home=member.is_home,
        address=member.address,
        reachable=status is not None,
        master=replica,
        epoch=status.epoch if status is not None else None,
        feature_level=read_level(status.feature_level) if status is not None else None,
        replicas=[ReplicaView(name=replica, role="master", in_sync=True, behind_bytes=0)],
    )
    if isinstance(answer, UnavailableError):
        shown.reason = f"unreachable from the admin process: {_describe(answer)}"
    elif answer.name != member.name:
        shown.reason = f"another broker group is at its address: {answer.name}"
    if listed is None:
        return shown
    # The reply of the home may be newer than the list of members.
    shown.state = "draining" if listed.member.state == pb.MEMBER_STATE_DRAINING else "active"
    if listed.reason and status is not None:
        shown.reason = f"unreachable from the home: {listed.reason}"
    elif listed.unreachable_ms >= MEMBER_UNREACHABLE_MS and status is not None:
        shown.reason = "unreachable from the home: it is connected and does not answer"
    shown.unreachable_ms = listed.unreachable_ms or None
    _show_backlog(shown, listed)
    return shown


async def _show_replicas(groups: list[BrokerGroupView], controllers: ControllerClients) -> None:
    """Add the replicas and the master that controllers know, if there are controllers."""
    # The status of the master is correct without controllers.
    _add_replicas(groups, await _records_of(controllers) or {})


async def _records_of(controllers: ControllerClients) -> dict[str, wire.BrokerGroupStatus] | None:
    """Return the records by broker group; none without controllers, None if none answers."""
    if not controllers.are_configured:
        return {}
    try:
        return {found.name: found for found in await controllers.groups()}
    except BrokerGroupUnreachable:
        return None


def _add_replicas(
    groups: list[BrokerGroupView], known: Mapping[str, wire.BrokerGroupStatus]
) -> None:
    for group in groups:
        if group.name in known:
            _show_replicas_of(group, known[group.name])


def _show_replicas_of(shown: BrokerGroupView, known: wire.BrokerGroupStatus) -> None:
    view = known.view
    ends = {one.replica_id: one.heartbeat.log_end for one in known.replicas}
    in_sync = {one.replica_id for one in view.sss}
    master = view.master.replica_id if view.HasField("master") else None
    shown.epoch = view.epoch
    if master is not None:
        shown.master = _replica_name(shown.name, master)
        addresses = {one.replica_id: one.address for one in known.replicas}
        shown.master_address = addresses.get(master)
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
    """Return the name of a replica, as the chart and the standalone form it."""
    return f"{group}-{number}"


def _show_backlog(shown: BrokerGroupView, listed: pb.BrokerGroup) -> None:
    shown.left = shown.last_left = None
    if listed.HasField("backlog"):
        shown.left = _backlog(listed.backlog)
    elif listed.last_backlog_at_ms:
        shown.last_left = _backlog(listed.last_backlog)
        shown.last_left.at_ms = listed.last_backlog_at_ms


def _backlog(backlog: pb.Backlog) -> BacklogView:
    return BacklogView(
        messages=backlog.ready_count,
        in_flight=backlog.in_flight_count,
        delayed=backlog.delayed_count,
        half_messages=backlog.half_count,
        dedup_keys=backlog.key_count,
        items=[
            BacklogItemView(
                topic=item.topic,
                group=item.group or None,
                messages=item.ready_count,
                in_flight=item.in_flight_count,
                unread=item.is_unread,
                pulled_queue=item.pulled_queue_id if item.HasField("pulled_queue_id") else None,
            )
            for item in backlog.items
        ],
        unnamed=backlog.unnamed_count,
    )


def _check_not_home(group: BrokerGroupView) -> None:
    if group.is_home:
        raise Conflict(
            f"{group.name} is the home, which stores the topics, consumer groups and broker groups,"
            f" so it cannot be drained or removed. To move it to another machine, stop it, copy its"
            f" data directory and start it there"
        )


def _check_removable(group: BrokerGroupView, *, force: bool) -> None:
    """Raise Conflict as the home would. The home repeats the check when it removes the group."""
    _check_not_home(group)
    if group.state != "draining":
        raise Conflict(
            f"{group.name} is not draining: drain it first and wait until its backlog is empty;"
            f" force does not remove a broker group that is not draining"
        )
    if force:
        return
    if group.left is None:
        raise Conflict(
            f"the backlog of {group.name} is unknown: {group.reason}. Start it again, or give up"
            f" its messages: tidemill broker-group remove {group.name} --force"
        )
    backlog = group.left
    messages = backlog.messages, backlog.in_flight, backlog.delayed
    if any([*messages, backlog.half_messages, backlog.dedup_keys]):
        text = "{} messages are ready, {} in flight and {} delayed".format(*messages)
        if backlog.half_messages:
            halves = f"{backlog.half_messages} half messages are open (tidemill transaction list)"
            text += f", and {halves}"
        if backlog.dedup_keys:
            keys = f"{backlog.dedup_keys} dedup keys are known: wait for the end of their windows"
            text += f", and {keys}"
        raise Conflict(f"{group.name} is not empty: {text}")
