"""Questions of operators to this proxy about its clients, and to its clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, final

import structlog
from google.protobuf.message import DecodeError

from tidemill.common.errors import (
    BadRequest,
    ClientCannot,
    ClientNotFound,
    Overloaded,
    ServiceError,
)
from tidemill.common.questions import ANSWER_TIMEOUT_MS_MAX
from tidemill.common.slices import run_slices
from tidemill.message import stored_message
from tidemill.message.client_key import NO_OWNER, ClientKey
from tidemill.message.resources import resource_name
from tidemill.proxy.clients.settings import resources_of
from tidemill.security.access_log import RecordFilter
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.aio.call import DisconnectError

if TYPE_CHECKING:
    from tidemill.proxy.clients.clients import ClientListing, Clients
    from tidemill.security.access_log import AccessLog
    from tidemill.transport.aio.process_service import ProcessService

log = structlog.get_logger()

CHECK_TIMEOUT_S: Final = 1.0  # for a producer to read the check of a half message
CLIENTS_MAX: Final = 1_000  # per page
AUDIT_RECORDS_MAX: Final = 1_000  # per page; each has at most 3 KB, mostly 400 bytes
PAGE_BYTES_MAX: Final = 1 << 20  # settings per page; a page ends with the client that exceeds it
TOPICS_SHOWN: Final = 10  # subscriptions in an error text

# Types with a listener that consumes the message.
_PUSH_CONSUMERS = frozenset({v2.PUSH_CONSUMER, v2.LITE_PUSH_CONSUMER})


@final
class Questions:
    """The answers to the questions of operators."""

    def __init__(
        self,
        clients: Clients,
        monotonic_ms: Callable[[], int],
        access_log: AccessLog,
        kick: Callable[[pb.KickClient], pb.KickedClient],
        security: Callable[[pb.GetSecurityState], pb.SecurityState],
        process: ProcessService,
    ) -> None:
        self._clients = clients
        self._process = process
        self._kick = kick
        self._security = security
        self._monotonic_ms = monotonic_ms
        self._access_log = access_log

    async def answer(self, question: pb.ProxyQuestion) -> pb.ProxyAnswer:
        """Return the answer or the error in it."""
        answer = pb.ProxyAnswer(id=question.id)
        try:
            match question.WhichOneof("question"):
                case "list_clients":
                    answer.clients.CopyFrom(await self._list(question.list_clients))
                case "command":
                    answer.client.CopyFrom(await self._command(question.command))
                case "find_audit":
                    answer.audit.CopyFrom(await self._find_audit(question.find_audit))
                case "kick":
                    answer.kicked.CopyFrom(self._kick(question.kick))
                case "get_security":
                    answer.security.CopyFrom(self._security(question.get_security))
                case "check":
                    result = await self._check(question.check)
                    answer.checked.CopyFrom(pb.CheckedTransaction(result=result))
                case "process":
                    answer.process.CopyFrom(self._process.answer(question.process))
                case _:
                    raise BadRequest("this proxy is older than the question; upgrade it")
        except ServiceError as error:
            answer.error, answer.message = type(error).__name__, error.message
        return answer

    async def _list(self, asked: pb.ListClientsRequest) -> pb.ClientList:
        if asked.client_id:
            found = self._clients.find_all(asked.client_id)
            own = [one for one in found if asked.owner in {NO_OWNER, one.key.owner}]
            return pb.ClientList(clients=map(self._state, own))
        slices = self._clients.list_slices(
            group=asked.group,
            topic=asked.topic,
            namespace=asked.namespace,
            after=asked.after,
            clients_max=min(asked.clients_max or CLIENTS_MAX, CLIENTS_MAX),
            owner=asked.owner,
        )
        page = await run_slices(slices)
        reply, size = pb.ClientList(has_more=page.has_more), 0
        for listed in page.clients:
            last_id = reply.clients[-1].client_id if reply.clients else ""
            # A page ends behind an id: the next one begins there.
            if size >= PAGE_BYTES_MAX and listed.key.client_id != last_id:
                reply.has_more = True
                break
            reply.clients.append(self._state(listed))
            size += len(listed.settings)
        return reply

    async def _find_audit(self, asked: pb.FindAuditRequest) -> pb.FindAuditReply:
        slices = self._access_log.find_page(
            RecordFilter.of(asked),
            before=asked.before_sequence,
            limit=min(asked.limit or AUDIT_RECORDS_MAX, AUDIT_RECORDS_MAX),
        )
        page = await run_slices(slices)
        return pb.FindAuditReply(
            records=[
                pb.AuditRecord(
                    sequence=one.sequence,
                    at_ms=one.fields["atMs"],
                    fields=json.dumps(one.fields).encode(),
                )
                for one in page.records
            ],
            has_more=page.has_more,
        )

    def _state(self, listed: ClientListing) -> pb.ClientState:
        now_ms, client = self._monotonic_ms(), listed.client
        return pb.ClientState(
            client_id=listed.key.client_id,
            client_type=client.client_type,
            group=client.group,
            language=client.language,
            version=client.version,
            # Only log lines show the kind of address.
            address=client.address.removeprefix("ipv4:").removeprefix("ipv6:"),
            connected_ms=now_ms - listed.since_ms,
            silent_ms=now_ms - client.seen_at_ms,
            has_stream=listed.key in self._clients.streams,
            settings=listed.settings,
            user=client.user,
        )

    async def _check(self, asked: pb.CheckTransaction) -> pb.CheckResult.ValueType:
        """Ask a producer for the decision about a half message."""
        key = ClientKey(asked.client_id, asked.owner)
        stream = self._clients.publishers.stream_of(key, asked.topic)
        if stream is None:
            return pb.CHECK_RESULT_GONE
        listed = self._clients.find(key)
        topic = (
            v2.Resource(name=asked.topic) if listed is None else _resource_of(listed, asked.topic)
        )
        message = _decode_stored(asked.blob, topic)
        message.system_properties.store_timestamp.FromMilliseconds(asked.stored_at_ms)
        message.system_properties.queue_id = asked.queue_id
        check = service.RecoverOrphanedTransactionCommand(
            message=message, transaction_id=asked.transaction_id
        )
        command = service.TelemetryCommand(recover_orphaned_transaction_command=check)
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                await self._clients.streams.write(stream, command.SerializeToString())
        except (TimeoutError, Overloaded):
            return pb.CHECK_RESULT_BUSY
        except DisconnectError:
            return pb.CHECK_RESULT_GONE
        return pb.CHECK_RESULT_WRITTEN

    async def _command(self, asked: pb.ClientCommand) -> pb.ClientAnswer:
        streams, found = self._clients.streams, self._clients.find_all(asked.client_id)
        client = next((one for one in found if one.key in streams), next(iter(found), None))
        if client is None:
            raise ClientNotFound(f"no client {asked.client_id!r} is connected to this proxy")
        match asked.WhichOneof("command"):
            case "print_stack":
                stack_trace = service.PrintThreadStackTraceCommand()
                command = service.TelemetryCommand(print_thread_stack_trace_command=stack_trace)
            case "verify":
                _check_verifier(client, asked.verify)
                topic = _resource_of(client, asked.verify.topic)
                verified = service.VerifyMessageCommand(message=_message(asked.verify, topic))
                command = service.TelemetryCommand(verify_message_command=verified)
            case _:
                raise BadRequest("this proxy is older than the command; upgrade it")
        log.info(
            "client asked",
            client=asked.client_id,
            command=asked.WhichOneof("command"),
            message=_message_id(command),
            by=asked.requested_by,
        )
        timeout_ms = max(1, min(asked.timeout_ms, ANSWER_TIMEOUT_MS_MAX))
        answer = await self._clients.streams.ask(client.key, command, timeout_ms=timeout_ms)
        return pb.ClientAnswer(code=answer.code, message=answer.message, stack=answer.stack)


def _check_verifier(listed: ClientListing, verified: pb.VerifiedMessage) -> None:
    """Raise if the client would not receive the message."""
    client = f"client {listed.key.client_id}"
    if listed.client.client_type not in _PUSH_CONSUMERS:
        raise ClientCannot(f"{client} is not a push consumer; only those can verify a message")
    if not listed.settings:
        if verified.is_forced:
            return
        raise BadRequest(f"the subscriptions of {client} are unknown; use force to skip this check")
    entries = v2.Settings.FromString(listed.settings).subscription.subscriptions
    topics = sorted({resource_name(entry.topic).full for entry in entries})
    if verified.topic not in topics:
        shown = ", ".join(topics[:TOPICS_SHOWN]) or "nothing"
        more = f" and {len(topics) - TOPICS_SHOWN} more" if len(topics) > TOPICS_SHOWN else ""
        raise BadRequest(f"{client} subscribes to {shown}{more}, not to {verified.topic}")


def _message_id(command: service.TelemetryCommand) -> str:
    return command.verify_message_command.message.system_properties.message_id


def _resource_of(listed: ClientListing, topic: str) -> v2.Resource:
    """Return a topic as the settings of a client name it."""
    settings = v2.Settings.FromString(listed.settings)
    for resource in resources_of(settings):
        if resource_name(resource).full == topic:
            return resource
    return v2.Resource(name=topic)


def _decode_stored(blob: bytes, topic: v2.Resource) -> v2.Message:
    """Return a stored message with the fields that do not depend on its place."""
    try:
        fields = stored_message.decode(blob)
        message = v2.Message.FromString(blob[fields.user_at :])
        system = message.system_properties
        system.MergeFromString(blob[fields.system_at : fields.user_at])
    except (DecodeError, ValueError) as error:
        raise BadRequest(f"failed to decode the stored message: {error}") from None
    message.topic.CopyFrom(topic)
    if fields.due_at_ms:
        system.delivery_timestamp.FromMilliseconds(fields.due_at_ms)
    return message


def _message(verified: pb.VerifiedMessage, topic: v2.Resource) -> v2.Message:
    """Return a stored message as consumers get it, without a receipt handle."""
    found = verified.message
    message = _decode_stored(found.blob, topic)
    system = message.system_properties
    system.store_timestamp.FromMilliseconds(found.stored_at_ms)
    system.queue_id, system.queue_offset = found.queue_id, found.queue_offset
    system.delivery_attempt = found.delivery_attempt
    return message
