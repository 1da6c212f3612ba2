"""Connected clients: list them, print a stack trace, verify a message."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from tidemill.admin.audit.access_reports import note_access
from tidemill.admin.audit.author import UPDATE
from tidemill.admin.audit.controller_actions import recorded
from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import Brokers
from tidemill.admin.cluster.proxies import (
    ConnectedClient,
    command_client,
    find_client,
    kick_client,
    list_clients,
)
from tidemill.admin.http.paging import PAGE_SIZE, NameCursor, PageSize
from tidemill.admin.http.request_access import READS, RequestAccess
from tidemill.admin.json.clients import (
    CLIENT_TIMEOUT_MS,
    CLIENT_TIMEOUT_MS_MAX,
    ClientKickView,
    ClientKind,
    ClientListView,
    ClientProxyView,
    ClientView,
    KickedProxyView,
    StackTraceView,
    SubscriptionView,
    VerificationRequest,
    VerificationView,
)
from tidemill.admin.json.conflicts import conflicts_of
from tidemill.admin.routes import (
    Access,
    Caller,
    ChangeAuthor,
    Cluster,
    DryRun,
    Namespace,
    OwnAccessLog,
)
from tidemill.common.errors import BrokerGroupUnreachable, ClientCannot, MessageNotFound
from tidemill.message.client_key import NO_OWNER
from tidemill.message.namespaces import check_namespace
from tidemill.message.resources import resource_name
from tidemill.security.acl import Action, topic_resource
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

router = APIRouter(tags=["clients"])

ClientId = Annotated[str, Path(max_length=255, description="Id of the client.")]
Group = Annotated[str, Query(max_length=255, description="Only consumers of this group.")]
Topic = Annotated[
    str,
    Query(max_length=255, description="Only clients that send to this topic or subscribe to it."),
]
ClientUser = Annotated[
    str, Query(max_length=64, description="Only the client of this user. Default: of all users.")
]
TimeoutMs = Annotated[
    int,
    Query(
        alias="timeoutMs",
        ge=1,
        le=CLIENT_TIMEOUT_MS_MAX,
        description="Timeout of the answer of the client.",
    ),
]

_KINDS: dict[int, ClientKind] = {
    v2.PRODUCER: "producer",
    v2.PUSH_CONSUMER: "pushConsumer",
    v2.SIMPLE_CONSUMER: "simpleConsumer",
    v2.PULL_CONSUMER: "pullConsumer",
    v2.LITE_PUSH_CONSUMER: "litePushConsumer",
    v2.LITE_SIMPLE_CONSUMER: "liteSimpleConsumer",
}


@router.get("/clients", response_model_exclude_none=True)
async def get_clients(
    cluster: Cluster,
    access: Access,
    cursor: NameCursor,
    group: Group = "",
    topic: Topic = "",
    namespace: Namespace = "",
    page_size: PageSize = PAGE_SIZE,
) -> ClientListView:
    """List the clients of all proxies, ordered by id and user.

    A user without the right Get on Cluster:clients sees its own clients.
    """
    after, owner = cursor.after, access.client_owner
    check_namespace(namespace)
    asked = pb.ListClientsRequest(
        group=group,
        topic=topic,
        namespace=namespace,
        after=after,
        clients_max=page_size,
        owner=owner,
    )
    page = await list_clients(cluster, asked)
    if not page.clients and not after and owner == NO_OWNER:
        # A group or topic that does not exist is an error, not an empty list.
        if group:
            await cluster.call_home(
                calls.GET_GROUP_PROGRESS, pb.GetGroupProgressRequest(name=group)
            )
        if topic:
            await cluster.call_home(calls.GET_TOPIC_STATUS, pb.GetTopicStatusRequest(name=topic))
    shown = [_show(client_id, client) for client_id, client in page.clients]
    silent = await _add_conflicts(cluster, shown, access)
    return ClientListView(
        clients=shown,
        next_page_token=cursor.next(page.clients[-1][0]) if page.has_more else None,
        unreachable=sorted({*page.unreachable, *silent}) or None,
    )


@router.get("/clients/{client_id}", response_model_exclude_none=True)
async def get_client(client_id: ClientId, cluster: Cluster, access: Access) -> ClientView:
    """Show a client with its number of messages in flight.

    A user without the right Get on Cluster:clients sees its own clients.
    """
    owner = access.client_owner
    client, unreachable = await find_client(cluster, client_id, owner)
    request = pb.GetHeldRequest(client_id=client_id, owner=owner)
    held = await cluster.call_all(calls.GET_HELD, request)
    shown = _show(client_id, client)
    shown.in_flight = sum(reply.in_flight_count for _, reply in held.answers)
    silent = await _add_conflicts(cluster, [shown], access)
    # A broker may be unreachable for several questions.
    shown.unreachable = sorted({*unreachable, *held.unreachable, *silent}) or None
    return shown


@router.post("/clients/{client_id}:stack", response_model_exclude_none=True)
async def print_stack(
    client_id: ClientId,
    cluster: Cluster,
    caller: Caller,
    author: ChangeAuthor,
    own: OwnAccessLog,
    timeout_ms: TimeoutMs = CLIENT_TIMEOUT_MS,
) -> StackTraceView:
    """Print the stack traces of all threads of a client. Only Java and Go clients can do this."""
    resource = f"Client:{client_id}"
    note_access(own, author.actor, author.call, resource=resource, action=UPDATE)
    command = pb.ClientCommand(
        client_id=client_id, timeout_ms=timeout_ms, print_stack=pb.PrintStack(), requested_by=caller
    )
    answer = await command_client(cluster, command)
    if answer.code != v2.OK:
        raise _cannot(client_id, "print its stack", answer)
    return StackTraceView(client_id=client_id, stack=answer.stack)


@router.post("/clients/{client_id}:verify", response_model_exclude_none=True)
async def verify_message(
    client_id: ClientId,
    verification: VerificationRequest,
    cluster: Cluster,
    access: Access,
    caller: Caller,
    author: ChangeAuthor,
    own: OwnAccessLog,
) -> VerificationView:
    """Let a client consume a message without settling it. Only Java push consumers can do this.

    Without `force`, the client must subscribe to the message.
    """
    topic, message_id = verification.topic, verification.message_id
    access.require(Action.SUB, topic_resource(topic))  # The client gets the body.
    message = await _find_message(cluster, topic, message_id, access)
    note_access(own, author.actor, author.call, resource=f"Topic:{topic}", action="Sub")
    command = pb.ClientCommand(
        client_id=client_id,
        timeout_ms=verification.timeout_ms,
        verify=pb.VerifiedMessage(topic=topic, message=message, is_forced=verification.force),
        requested_by=caller,
    )
    answer = await command_client(cluster, command)
    if answer.code not in {v2.OK, v2.FAILED_TO_CONSUME_MESSAGE}:
        raise _cannot(client_id, "verify a message", answer)
    return VerificationView(
        client_id=client_id,
        topic=topic,
        message_id=message_id,
        consumed=answer.code == v2.OK,
        code=answer.code,
        reason=answer.message or None,
    )


@router.post("/clients/{client_id}:kick", response_model_exclude_none=True)
async def kick(
    client_id: ClientId,
    cluster: Cluster,
    caller: Caller,
    author: ChangeAuthor,
    user: ClientUser = "",
    dry_run: DryRun = False,
) -> ClientKickView:
    """End the polls and streams of a client, and give its messages to others.

    The client may come back at once; a ban keeps it out.
    """
    asked = pb.KickClient(client_id=client_id, user=user, is_dry_run=dry_run, requested_by=caller)
    if dry_run:
        answers = await kick_client(cluster, asked)
    else:
        answers = await recorded(
            cluster,
            author.of(f"Client:{client_id}"),
            lambda: kick_client(cluster, asked),
            after={"kickedUser": user} if user else {},
        )
    return ClientKickView(
        client_id=client_id,
        dry_run=dry_run,
        proxies=[
            KickedProxyView(name=name, polls=kicked.polls, streams=kicked.streams)
            for name, kicked in answers.kicked
        ],
        unreachable=answers.unreachable or None,
    )


async def _add_conflicts(
    cluster: Brokers, shown: list[ClientView], access: RequestAccess
) -> list[str]:
    """Add the conflicts of each consumer; return the unreachable broker groups."""
    named = {client.group for client in shown if client.group}
    groups = sorted(group for group in named if access.allows_group(READS, group))
    if not groups:
        return []
    asked = pb.ListConflictsRequest(groups=groups)
    try:
        answers = await cluster.call_all(calls.LIST_CONFLICTS, asked)
    except BrokerGroupUnreachable:
        return [member.name for member in await cluster.members()]
    conflicts = conflicts_of(answers)
    for client in shown:
        subscribed = None if client.topics is None else frozenset(client.topics)
        found = [
            conflict
            for conflict in conflicts
            if conflict.group == client.group
            and (subscribed is None or conflict.topic in subscribed)
        ]
        client.conflicts = found or None
    return list(answers.unreachable)


async def _find_message(
    cluster: Brokers, topic: str, message_id: str, access: RequestAccess
) -> pb.FoundMessage:
    """Return the original of a message, or else any copy of it."""
    request = pb.FindMessagesRequest(topic=topic, message_id=message_id)
    found = await cluster.call_all(calls.FIND_MESSAGES, request)
    copies = [
        message
        for _, reply in found.answers
        for message in reply.messages
        if access.allows_topic(Action.SUB, message.stored_topic or topic)
    ]
    if copies:
        return min(copies, key=lambda copy: (copy.delivery_attempt, copy.stored_at_ms))
    if found.unreachable:
        raise BrokerGroupUnreachable(
            f"{', '.join(found.unreachable)} cannot be reached, and no other broker group has"
            f" message {message_id}; retry later"
        )
    raise MessageNotFound(f"topic {topic} has no message {message_id}")


def _cannot(client_id: str, action: str, answer: pb.ClientAnswer) -> ClientCannot:
    name = v2.Code.Name(v2.Code.ValueType(answer.code)) if answer.code in v2.Code.values() else ""
    reply = ": ".join(part for part in (name or str(answer.code), answer.message) if part)
    return ClientCannot(f"client {client_id} cannot {action}; it answered {reply}")


def _show(client_id: str, client: ConnectedClient) -> ClientView:
    state = client.newest
    settings = v2.Settings.FromString(state.settings) if state.settings else None
    shown = ClientView(
        client_id=client_id,
        users=sorted({each.user for _, each in client.states if each.user}) or None,
        kind=_KINDS.get(state.client_type, "unknown"),
        group=state.group or None,
        language=state.language,
        version=state.version,
        connected_ms=max(each.connected_ms for _, each in client.states),
        silent_ms=min(each.silent_ms for _, each in client.states),
        proxies=[
            ClientProxyView(
                name=proxy.name,
                address=each.address,
                connected_ms=each.connected_ms,
                silent_ms=each.silent_ms,
                has_stream=each.has_stream,
            )
            for proxy, each in client.states
        ],
    )
    if settings is not None:
        _show_settings(shown, settings)
    return shown


def _show_settings(shown: ClientView, settings: v2.Settings) -> None:
    shown.host = settings.user_agent.hostname or None
    if settings.HasField("publishing"):
        shown.topics = [resource_name(topic).full for topic in settings.publishing.topics]
        return
    shown.subscriptions = [
        SubscriptionView(
            topic=resource_name(entry.topic).full,
            filter_type="SQL" if entry.expression.type == v2.SQL else "TAG",
            expression=entry.expression.expression or "*",
        )
        for entry in settings.subscription.subscriptions
    ]
    shown.topics = [entry.topic for entry in shown.subscriptions]
