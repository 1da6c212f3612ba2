"""The calls about messages: search, time ranges, sends."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Final

from fastapi import Response
from pydantic import ValidationError

from tidemill.admin.audit.access_reports import note_access
from tidemill.admin.cluster import calls
from tidemill.admin.grpc.calls import (
    NO_LITE_TOPICS,
    AdminCall,
    millis_of,
    missing_note,
    ok,
    refuse_lite_topic,
)
from tidemill.admin.grpc.message_pages import MessagePage
from tidemill.admin.grpc.time_range import TimeRange, TimeRangeReader
from tidemill.admin.http.request_access import READS
from tidemill.admin.json.messages import NewMessage
from tidemill.admin.routes import messages
from tidemill.common.errors import BadRequest, BrokerGroupUnreachable, MessageNotFound, NotBuilt
from tidemill.message.rules import message_type
from tidemill.security.acl import Action
from tidemill.stubs.apache.rocketmq.v2 import admin_pb2 as admin
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.admin.cluster.brokers import BrokerAnswers

MESSAGES_MAX: Final = 256  # of one page, as of one answer of a broker
MESSAGES_DEFAULT: Final = 32
HIDDEN_NOTE: Final = "bodies, keys and properties are hidden, because they need Sub on the topic"


async def query_message(
    call: AdminCall, request: admin.ListMessageRequest
) -> admin.ListMessageResponse:
    """Find messages by id or key, or read those of a time range in the order of the queues."""
    refuse_lite_topic(request)
    may_read = call.access.allows_topic(Action.SUB, call.topic)
    if may_read:
        note_access(
            call.parts.access_log,
            call.author.actor,
            call.author.call,
            resource=f"Topic:{call.topic}",
            action="Sub",
        )
    range_ = TimeRange.of(request)
    limit = _limit_of(request)
    page = MessagePage(call, limit)
    async with call.brokers.large_read():
        if request.WhichOneof("search_key") in {"message_id", "message_key"}:
            unreachable, scroll_id = await _search(call, request, range_, page)
        else:
            reader = TimeRangeReader(call, request, range_, page)
            unreachable, scroll_id = await reader.read()
    hidden = "" if may_read else HIDDEN_NOTE
    return admin.ListMessageResponse(
        status=ok(hidden, missing_note(unreachable)), messages=page.messages, scroll_id=scroll_id
    )


async def admin_send_message(
    call: AdminCall, request: admin.AdminSendMessageRequest
) -> admin.AdminSendMessageResponse:
    """Send a message as REST does. `ext_info` is ignored."""
    sent = await messages.send_message(
        call.topic,
        _new_message(request),
        call.brokers,
        call.access,
        call.parts.composer,
        call.author,
        call.parts.quotas,
        None,
        Response(),
    )
    return admin.AdminSendMessageResponse(status=ok(), message_id=sent.message_id)


# ---------------------------------------------------------------- search


def _limit_of(request: admin.ListMessageRequest) -> int:
    """Return the maximum number of messages of the answer."""
    for name in ("max_message_nums", "page_num", "page_size"):
        if getattr(request, name) < 0:
            raise BadRequest(f"{name} is {getattr(request, name)}; it must be 0 or higher")
    wanted = [each for each in (request.max_message_nums, request.page_size) if each]
    return min([*wanted, MESSAGES_MAX]) if wanted else MESSAGES_DEFAULT


async def _search(
    call: AdminCall, request: admin.ListMessageRequest, range_: TimeRange, page: MessagePage
) -> tuple[list[str], str]:
    """Fill a page of the found messages, newest first. Return where the next page begins.

    A broker returns the newest messages with a key, at most MESSAGES_MAX.
    """
    if request.HasField("broker_name") or request.HasField("queue_id"):
        raise BadRequest("a search has no broker_name and no queue_id; remove them")
    by_id = request.message_id if request.WhichOneof("search_key") == "message_id" else ""
    if not (by_id or request.message_key):
        raise BadRequest("the search key is empty")
    found = await call.brokers.call_all(
        calls.FIND_MESSAGES,
        pb.FindMessagesRequest(
            topic=call.topic,
            message_id=by_id,
            key="" if by_id else request.message_key,
            max_messages=messages.COPIES_MAX if by_id else MESSAGES_MAX,
        ),
    )
    matching = _readable(call, found, range_)
    if by_id and not matching:
        if found.unreachable:
            raise BrokerGroupUnreachable(
                f"{', '.join(found.unreachable)} cannot be reached, and no other broker group has"
                f" message {by_id}; retry later"
            )
        raise MessageNotFound(f"topic {call.topic} has no message {by_id}")
    first = _first_of(request, page.limit)
    for at, message in enumerate(matching[first:], first):
        if not page.add(message):
            return found.unreachable, str(at)
    return found.unreachable, ""


def _readable(
    call: AdminCall, found: BrokerAnswers[pb.FindMessagesReply], range_: TimeRange
) -> list[pb.FoundMessage]:
    readable = [
        message
        for _, reply in found.answers
        for message in reply.messages
        if range_.has(message.stored_at_ms)
        # A retry or a dead letter belongs to its consumer group.
        and call.access.allows_topic(READS, message.stored_topic or call.topic)
    ]
    return sorted(readable, key=lambda each: -each.stored_at_ms)


def _first_of(request: admin.ListMessageRequest, limit: int) -> int:
    """Return the number of found messages before the page."""
    text = request.scroll_id
    if not text:
        return max(request.page_num - 1, 0) * limit
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(MESSAGES_MAX * 64))):
        raise BadRequest("scroll_id is not one of a previous answer to this search")
    return int(text)


# ---------------------------------------------------------------- sends


def _new_message(request: admin.AdminSendMessageRequest) -> NewMessage:
    """Return the message of a request. The fields of the request come before `system_properties`.

    Raises BadRequest, MessageTypeConflict, NotBuilt.
    """
    system = request.system_properties
    if system.HasField("lite_topic"):
        raise NotBuilt(NO_LITE_TOPICS)
    if system.message_id:
        raise BadRequest(
            "the server chooses the id of the message; remove message_id. To make repeats safe, set"
            " the property dedup-key on a topic with deduplication"
        )
    if system.body_encoding not in {v2.ENCODING_UNSPECIFIED, v2.IDENTITY}:
        raise BadRequest("the body must have the encoding IDENTITY")
    message_type(system)  # Raises for properties that contradict each other.
    if system.message_type == v2.TRANSACTION:
        raise BadRequest("a message of type TRANSACTION needs a producer that decides about it")
    fields: dict[str, object] = {
        "bodyBase64": base64.b64encode(request.body).decode(),
        "keys": [*system.keys, *([request.key] if request.HasField("key") else [])],
        "properties": dict(request.user_properties),
    }
    if request.HasField("tag") or system.HasField("tag"):
        fields["tag"] = request.tag if request.HasField("tag") else system.tag
    if system.HasField("message_group"):
        fields["messageGroup"] = system.message_group
    if system.HasField("priority"):
        fields["priority"] = system.priority
    if system.HasField("delivery_timestamp"):
        due = system.delivery_timestamp
        rounded_up = bool(due.nanos % 1_000_000)
        fields["deliverAtMs"] = millis_of(due, "delivery_timestamp") + rounded_up
    try:
        return NewMessage.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BadRequest(f"{where}: {first['msg']}") from None
