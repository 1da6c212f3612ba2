"""The methods of the public service by name, and those that are not served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from tidemill.common.errors import NotBuilt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidemill.proxy.server.call import (
        BidirectionalMethod,
        Call,
        PlainMethod,
        StreamingMethod,
        UnaryMethod,
    )
    from tidemill.proxy.server.client_lifecycle import ClientLifecycle
    from tidemill.proxy.server.producer import Producer
    from tidemill.proxy.server.puller import Puller
    from tidemill.proxy.server.receive import Receiver
    from tidemill.proxy.server.routes import Routes
    from tidemill.proxy.server.settle import Settler
    from tidemill.proxy.server.telemetry import Telemetry

SERVICE = "apache.rocketmq.v2.MessagingService"

# Method -> error message. They end with a status in the response, which clients handle.
UNSERVED_UNARY = {"SyncLiteSubscription": "lite topics are not served yet"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Methods:
    """All served methods by name."""

    unary: Mapping[str, UnaryMethod]
    plain: Mapping[str, PlainMethod]
    streaming: Mapping[str, StreamingMethod]
    bidirectional: Mapping[str, BidirectionalMethod]


def methods(
    *,
    producer: Producer,
    receiver: Receiver,
    settler: Settler,
    routes: Routes,
    telemetry: Telemetry,
    client_life: ClientLifecycle,
    puller: Puller,
) -> Methods:
    """Return the table of methods."""
    return Methods(
        unary={
            "QueryRoute": routes.query_route,
            "Heartbeat": client_life.heartbeat,
            "RecallMessage": producer.recall_message,
            "EndTransaction": producer.transactions.end_transaction,
            "QueryAssignment": routes.query_assignment,
            "ForwardMessageToDeadLetterQueue": settler.forward_to_dead_letter_queue,
            "NotifyClientTermination": client_life.notify_client_termination,
            "QueryOffset": puller.query_offset,
            "GetOffset": puller.get_offset,
            "UpdateOffset": puller.update_offset,
            **{name: _unserved(reason) for name, reason in UNSERVED_UNARY.items()},
        },
        plain={
            "SendMessage": producer.send_message,
            "AckMessage": settler.ack_message,
            "ChangeInvisibleDuration": settler.change_invisible_duration,
        },
        streaming={"ReceiveMessage": receiver.receive_message, "PullMessage": puller.pull_message},
        bidirectional={"Telemetry": telemetry.telemetry},
    )


def _unserved(reason: str) -> UnaryMethod:
    async def reject(_call: Call, _request: bytes) -> NoReturn:
        raise NotBuilt(reason)

    return reject
