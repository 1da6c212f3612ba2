"""The calls about connected clients and their subscriptions."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.configuration import read_configuration
from tidemill.admin.grpc.calls import LISTED_MAX, AdminCall, missing_note, ok, refuse_lite_topic
from tidemill.admin.http.paging import FIRST_PAGE
from tidemill.admin.http.request_access import READS
from tidemill.admin.json.clients import VerificationRequest
from tidemill.admin.json.conflicts import conflicts_of
from tidemill.admin.routes import clients
from tidemill.common.addresses import without_brackets
from tidemill.common.errors import BadRequest
from tidemill.message.client_key import NO_OWNER
from tidemill.stubs.apache.rocketmq.v2 import admin_pb2 as admin
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.admin.json.clients import ClientListView, ClientView, SubscriptionView

CUT_NOTE = f"only the first {LISTED_MAX} clients"
HIDDEN_NOTE = (
    "consumers of other users are left out, because they need Get on Cluster:clients; their"
    " subscriptions have no filter and are not online"
)


async def list_subscription(
    call: AdminCall, _request: admin.ListSubscriptionRequest
) -> admin.ListSubscriptionResponse:
    """List the subscriptions of groups to topics, also those without a connected consumer."""
    listed = await _subscribers(call)
    found = await _subscriptions(call, listed)
    # Consumers with the same filter have one subscription. Messages of protobuf have no hash.
    infos = list({info.SerializeToString(): info for _, info in found}.values())
    online = {(info.group.name, info.topic.name) for info in infos}
    inconsistent = await _inconsistent_pairs(call)
    # A group that was used before has a position in the topic, and its filter is unknown.
    for pair in await _begun_pairs(call):
        group, topic = map(call.resource, pair)
        if (group.name, topic.name) not in online:
            infos.append(
                admin.SubscriptionInfo(
                    group=group,
                    topic=topic,
                    message_model=admin.CLUSTERING,
                    subscription_consistency=pair not in inconsistent,
                )
            )
    hidden = HIDDEN_NOTE if call.access.client_owner != NO_OWNER else ""
    return admin.ListSubscriptionResponse(status=_status(listed, hidden), subscription_info=infos)


async def describe_subscription(
    call: AdminCall, _request: admin.DescribeSubscriptionRequest
) -> admin.DescribeSubscriptionResponse:
    """List the subscriptions of each connected consumer."""
    listed = await _subscribers(call)
    return admin.DescribeSubscriptionResponse(
        status=_status(listed),
        client_subscription_info=[
            admin.DescribeSubscriptionResponse.ClientSubscriptionInfo(
                client_info=_client(client), subscription_info=info
            )
            for client, info in await _subscriptions(call, listed)
        ],
    )


async def list_consumer_connection(
    call: AdminCall, request: admin.ListConsumerConnectionRequest
) -> admin.ListConsumerConnectionResponse:
    """List the connected consumers of a group."""
    refuse_lite_topic(request)
    listed = await _listed(call)
    return admin.ListConsumerConnectionResponse(
        status=_status(listed), client_info=[_client(each) for each in listed.clients]
    )


async def get_consumer_running_info(
    call: AdminCall, request: admin.GetConsumerRunningInfoRequest
) -> admin.GetConsumerRunningInfoResponse:
    """Return the reports of a consumer about itself. No client reports queues or rates."""
    client = await _client_of_group(call, request.client_id)
    properties = {
        "clientType": client.kind,
        "language": client.language,
        "version": client.version,
        "connectedMs": str(client.connected_ms),
        "silentMs": str(client.silent_ms),
        "inFlight": str(client.in_flight or 0),
    }
    return admin.GetConsumerRunningInfoResponse(
        status=ok(missing_note(client.unreachable)),
        consumer_running_info=admin.ConsumerRunningInfo(
            properties=properties,
            subscriptions={each.topic: _filter(each) for each in client.subscriptions or ()},
        ),
    )


async def print_thread_stack_trace(
    call: AdminCall, request: admin.PrintThreadStackTraceRequest
) -> admin.PrintThreadStackTraceResponse:
    """Let a client print its stack traces."""
    await _client_of_group(call, request.client_id)
    caller, own = call.author.actor.text, call.parts.access_log
    printed = await clients.print_stack(request.client_id, call.brokers, caller, call.author, own)
    return admin.PrintThreadStackTraceResponse(status=ok(), thread_stack_trace=printed.stack)


async def verify_message(
    call: AdminCall, request: admin.VerifyMessageRequest
) -> admin.VerifyMessageResponse:
    """Let a client consume a message without settling it."""
    await _client_of_group(call, request.client_id)
    if not request.message_id:
        raise BadRequest("the request has no message_id")
    verification = VerificationRequest(topic=call.topic, message_id=request.message_id)
    verified = await clients.verify_message(
        request.client_id,
        verification,
        call.brokers,
        call.access,
        call.author.actor.text,
        call.author,
        call.parts.access_log,
    )
    if verified.consumed:
        return admin.VerifyMessageResponse(status=ok())
    reason = verified.reason or "the listener of the client did not report success"
    return admin.VerifyMessageResponse(
        status=v2.Status(code=v2.FAILED_TO_CONSUME_MESSAGE, message=reason)
    )


# ---------------------------------------------------------------- clients


async def _listed(call: AdminCall) -> ClientListView:
    return await clients.get_clients(
        call.brokers,
        call.access,
        FIRST_PAGE,
        group=call.group,
        topic=call.topic,
        page_size=LISTED_MAX,
    )


async def _subscribers(call: AdminCall) -> ClientListView:
    if not (call.group or call.topic):
        raise BadRequest("the request names neither a topic nor a group; set one of them")
    return await _listed(call)


async def _client_of_group(call: AdminCall, client_id: str) -> ClientView:
    """Return a client. Raises ClientNotFound, and BadRequest if it is of another group."""
    if not client_id:
        raise BadRequest("the request has no client_id")
    client = await clients.get_client(client_id, call.brokers, call.access)
    if client.group != call.group:
        has = f"is of group {client.group}" if client.group else "has no consumer group"
        raise BadRequest(f"client {client_id} {has}, not of {call.group}")
    return client


def _status(listed: ClientListView, hidden: str = "") -> v2.Status:
    cut = CUT_NOTE if listed.next_page_token is not None else ""
    return ok(hidden, cut, missing_note(listed.unreachable))


def _client(client: ClientView) -> admin.ClientInfo:
    # The host of the last call.
    address = without_brackets(client.proxies[0].address.rpartition(":")[0])
    return admin.ClientInfo(
        client_id=client.client_id,
        version=client.version,
        language=client.language,
        hostname=client.host or "",
        egress_ip=address,
        message_model=admin.CLUSTERING if client.group else admin.MESSAGE_MODEL_UNSPECIFIED,
    )


# ---------------------------------------------------------------- subscriptions


async def _subscriptions(
    call: AdminCall, listed: ClientListView
) -> list[tuple[ClientView, admin.SubscriptionInfo]]:
    """Return the subscriptions of consumers that the request asks for and the caller may see."""
    found = [
        (client, client.group, each)
        for client in listed.clients
        if client.group and call.access.allows_group(READS, client.group)
        for each in client.subscriptions or ()
        if call.topic in {"", each.topic} and call.access.allows_topic(READS, each.topic)
    ]
    filters = defaultdict(set)
    for _, group, each in found:
        filters[group, each.topic].add((each.filter_type, each.expression))
    inconsistent = await _inconsistent_pairs(call)
    inconsistent |= {pair for pair, different in filters.items() if len(different) > 1}
    return [
        (
            client,
            admin.SubscriptionInfo(
                group=call.resource(group),
                topic=call.resource(each.topic),
                expression=_filter(each),
                online=True,
                message_model=admin.CLUSTERING,
                subscription_consistency=(group, each.topic) not in inconsistent,
            ),
        )
        for client, group, each in found
    ]


def _filter(each: SubscriptionView) -> v2.FilterExpression:
    kind = v2.SQL if each.filter_type == "SQL" else v2.TAG
    return v2.FilterExpression(type=kind, expression=each.expression)


async def _inconsistent_pairs(call: AdminCall) -> set[tuple[str, str]]:
    """Return the pairs of a group and a topic with recent polls by different filters."""
    asked = pb.ListConflictsRequest(groups=[call.group] if call.group else [])
    found = conflicts_of(await call.brokers.call_all(calls.LIST_CONFLICTS, asked))
    return {(each.group, each.topic) for each in found if each.kind == "filter"}


async def _begun_pairs(call: AdminCall) -> list[tuple[str, str]]:
    """Return the pairs of a group and a topic of the request with a position of the group."""
    if call.group:
        progress = await call.brokers.call_all(
            calls.GET_GROUP_PROGRESS, pb.GetGroupProgressRequest(name=call.group)
        )
        queues = (queue for _, found in progress.answers for queue in found.queues)
        pairs = sorted({(call.group, queue.topic) for queue in queues})
    else:
        found = await read_configuration(call.brokers)
        # The begin of a topic has its id at the home.
        ids = {each.home_id or each.id for each in found.topics if each.name == call.topic}
        begun = (group.name for group in found.groups if ids & {b.topic_id for b in group.begun})
        pairs = [(group, call.topic) for group in begun]
    return [
        (group, topic)
        for group, topic in pairs
        if call.topic in {"", topic}
        and call.access.allows_group(READS, group)
        and call.access.allows_topic(READS, topic)
    ]
