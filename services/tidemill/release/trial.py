"""A trial of a release with the calls of a client: send, delay, pop and ack."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Final

import grpc

from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.apache.rocketmq.v2 import service_pb2_grpc

TOPIC: Final = "tidemill-trial"
GROUP: Final = "tidemill-trial"
DELAY_MS: Final = 2_000  # long enough to notice an early delivery
CALL_S: Final = 10.0
POLL_MS: Final = 5_000  # the shortest long poll that a proxy does not extend
INVISIBLE_MS: Final = 60_000  # longer than the trial
TRIAL_S: Final = 60.0
METADATA: Final = (
    ("x-mq-client-id", "tidemill-trial"),
    ("x-mq-language", "PYTHON"),
    ("x-mq-client-version", "5.0.0"),
)


class TrialFailed(Exception):
    """The release broke a promise; the message says which."""


def run(channel: grpc.Channel, report: Callable[[str], None]) -> None:
    """Run the trial with TOPIC and GROUP, which must exist. Raises TrialFailed."""
    stub = service_pb2_grpc.MessagingServiceStub(channel)
    name = secrets.token_hex(8)
    due_at_ms = int(time.time() * 1000) + DELAY_MS
    _send(stub, f"{name}-now", 0)
    report("sent a message")
    _send(stub, f"{name}-delayed", due_at_ms)
    report(f"sent a message with a delay of {DELAY_MS} ms")
    expected = {f"{name}-now", f"{name}-delayed"}
    until_s = time.monotonic() + TRIAL_S
    while expected:
        if time.monotonic() >= until_s:
            missing = ", ".join(sorted(expected))
            raise TrialFailed(f"the messages {missing} were not received within {TRIAL_S} s")
        for message in receive(stub, TOPIC, GROUP):
            body = message.body.decode("utf-8", "replace")
            now_ms = int(time.time() * 1000)
            if body.endswith("-delayed") and body in expected and now_ms < due_at_ms:
                raise TrialFailed(f"the delayed message came {due_at_ms - now_ms} ms early")
            ack(stub, TOPIC, GROUP, message)
            # An interrupted trial leaves other messages.
            if body in expected:
                expected.remove(body)
                report(f"popped and acked {body}")
    report("the trial passed")


def _send(stub: service_pb2_grpc.MessagingServiceStub, body: str, due_at_ms: int) -> None:
    properties = v2.SystemProperties(message_id=secrets.token_hex(16).upper())
    if due_at_ms:
        properties.delivery_timestamp.FromMilliseconds(due_at_ms)
    message = v2.Message(
        topic=v2.Resource(name=TOPIC), body=body.encode(), system_properties=properties
    )
    response = stub.SendMessage(
        service.SendMessageRequest(messages=[message]), metadata=METADATA, timeout=CALL_S
    )
    _check("the send", response.status)


def receive(
    stub: service_pb2_grpc.MessagingServiceStub, topic: str, group: str
) -> list[v2.Message]:
    """Pop messages like a consumer of the group, or return an empty list after POLL_MS."""
    request = service.ReceiveMessageRequest(
        group=v2.Resource(name=group),
        message_queue=v2.MessageQueue(topic=v2.Resource(name=topic)),
        filter_expression=v2.FilterExpression(type=v2.TAG, expression="*"),
        batch_size=32,
    )
    request.invisible_duration.FromMilliseconds(INVISIBLE_MS)
    request.long_polling_timeout.FromMilliseconds(POLL_MS)
    answers = list(stub.ReceiveMessage(request, metadata=METADATA, timeout=POLL_MS / 1000 + CALL_S))
    for answer in answers:
        if answer.HasField("status") and answer.status.code != v2.MESSAGE_NOT_FOUND:
            _check("the receive", answer.status)
    return [answer.message for answer in answers if answer.HasField("message")]


def ack(
    stub: service_pb2_grpc.MessagingServiceStub, topic: str, group: str, message: v2.Message
) -> None:
    """Acknowledge a received message."""
    properties = message.system_properties
    entry = service.AckMessageEntry(
        message_id=properties.message_id, receipt_handle=properties.receipt_handle
    )
    request = service.AckMessageRequest(
        group=v2.Resource(name=group), topic=v2.Resource(name=topic), entries=[entry]
    )
    response = stub.AckMessage(request, metadata=METADATA, timeout=CALL_S)
    _check("the ack", response.status)


def _check(what: str, status: v2.Status) -> None:
    if status.code != v2.OK:
        raise TrialFailed(f"{what} failed with {v2.Code.Name(status.code)}: {status.message}")
