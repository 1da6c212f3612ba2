"""A trial of a release with the calls of a client: send, delay, pop and ack."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple

import grpc

from tidemill.security.job_users import TRIAL
from tidemill.security.signatures import signed_headers
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.apache.rocketmq.v2 import service_pb2_grpc

if TYPE_CHECKING:
    from tidemill.release.patient_rest import PatientRestClient

TOPIC: Final = TRIAL
GROUP: Final = TRIAL
DELAY_MS: Final = 2_000  # long enough to notice an early delivery
CALL_S: Final = 10.0
POLL_MS: Final = 5_000  # the shortest long poll that a proxy does not extend
INVISIBLE_MS: Final = 60_000  # longer than the trial
TRIAL_S: Final = 60.0
# A new user is known to all proxies within a second.
USER_KNOWN_S: Final = 10.0
USER_PAUSE_S: Final = 0.2
RIGHTS: Final = (
    {"resource": f"Topic:{TOPIC}", "actions": ["Pub", "Sub"]},
    {"resource": f"Group:{GROUP}", "actions": ["Sub"]},
)
METADATA: Final = (
    ("x-mq-client-id", "tidemill-trial"),
    ("x-mq-language", "PYTHON"),
    ("x-mq-client-version", "5.0.0"),
)


class TrialFailed(Exception):
    """The release broke a promise; the message says which."""


class UnknownTrialUser(TrialFailed):
    """A proxy refused the user of a call."""


class TrialUser(NamedTuple):
    """The user of the calls, or none."""

    name: str  # "": calls are not signed
    secret: str

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """The headers of a call."""
        if not self.name:
            return METADATA
        date_time = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        return (*METADATA, *signed_headers(self.name, self.secret, date_time).items())


ANYONE: Final = TrialUser("", "")


@contextlib.contextmanager
def own_user(rest: PatientRestClient) -> Iterator[TrialUser]:
    """Create a user with the rights of the trial, unless the mode is off; delete it at the end.

    Raises RestRejection, ForeignAnswer, WaitTimeout.
    """
    if rest.call("GET", "/security")["inForce"] == "off":
        yield ANYONE
        return
    name = f"tidemill-trial-{secrets.token_hex(4)}"
    made = rest.call("PUT", "/users", name, body={"entries": RIGHTS})
    try:
        yield TrialUser(name, made["secret"])
    finally:
        rest.call("DELETE", "/users", name)


def run(channel: grpc.Channel, user: TrialUser, report: Callable[[str], None]) -> None:
    """Run the trial with TOPIC and GROUP, which must exist. Raises TrialFailed."""
    stub = service_pb2_grpc.MessagingServiceStub(channel)
    name = secrets.token_hex(8)
    due_at_ms = int(time.time() * 1000) + DELAY_MS
    _send_first(stub, user, f"{name}-now")
    report("sent a message")
    _send(stub, user, f"{name}-delayed", due_at_ms)
    report(f"sent a message with a delay of {DELAY_MS} ms")
    expected = {f"{name}-now", f"{name}-delayed"}
    until_s = time.monotonic() + TRIAL_S
    while expected:
        if time.monotonic() >= until_s:
            missing = ", ".join(sorted(expected))
            raise TrialFailed(f"the messages {missing} were not received within {TRIAL_S} s")
        for message in receive(stub, user, TOPIC, GROUP):
            body = message.body.decode("utf-8", "replace")
            now_ms = int(time.time() * 1000)
            if body.endswith("-delayed") and body in expected and now_ms < due_at_ms:
                raise TrialFailed(f"the delayed message came {due_at_ms - now_ms} ms early")
            ack(stub, user, TOPIC, GROUP, message)
            # An interrupted trial leaves other messages.
            if body in expected:
                expected.remove(body)
                report(f"popped and acked {body}")
    report("the trial passed")


def _send_first(stub: service_pb2_grpc.MessagingServiceStub, user: TrialUser, body: str) -> None:
    """Send a message as soon as the proxy knows the user. Raises TrialFailed."""
    until_s = time.monotonic() + USER_KNOWN_S
    while True:
        try:
            return _send(stub, user, body, 0)
        except UnknownTrialUser:
            if not user.name or time.monotonic() >= until_s:
                raise
            time.sleep(USER_PAUSE_S)


def _send(
    stub: service_pb2_grpc.MessagingServiceStub, user: TrialUser, body: str, due_at_ms: int
) -> None:
    properties = v2.SystemProperties(message_id=secrets.token_hex(16).upper())
    if due_at_ms:
        properties.delivery_timestamp.FromMilliseconds(due_at_ms)
    message = v2.Message(
        topic=v2.Resource(name=TOPIC), body=body.encode(), system_properties=properties
    )
    response = stub.SendMessage(
        service.SendMessageRequest(messages=[message]), metadata=user.headers, timeout=CALL_S
    )
    _check("the send", response.status)


def receive(
    stub: service_pb2_grpc.MessagingServiceStub, user: TrialUser, topic: str, group: str
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
    timeout_s = POLL_MS / 1000 + CALL_S
    answers = list(stub.ReceiveMessage(request, metadata=user.headers, timeout=timeout_s))
    for answer in answers:
        if answer.HasField("status") and answer.status.code != v2.MESSAGE_NOT_FOUND:
            _check("the receive", answer.status)
    return [answer.message for answer in answers if answer.HasField("message")]


def ack(
    stub: service_pb2_grpc.MessagingServiceStub,
    user: TrialUser,
    topic: str,
    group: str,
    message: v2.Message,
) -> None:
    """Acknowledge a received message."""
    properties = message.system_properties
    entry = service.AckMessageEntry(
        message_id=properties.message_id, receipt_handle=properties.receipt_handle
    )
    request = service.AckMessageRequest(
        group=v2.Resource(name=group), topic=v2.Resource(name=topic), entries=[entry]
    )
    response = stub.AckMessage(request, metadata=user.headers, timeout=CALL_S)
    _check("the ack", response.status)


def _check(what: str, status: v2.Status) -> None:
    if status.code != v2.OK:
        error = UnknownTrialUser if status.code == v2.UNAUTHORIZED else TrialFailed
        raise error(f"{what} failed with {v2.Code.Name(status.code)}: {status.message}")
