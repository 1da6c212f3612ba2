"""The calls of BrokerAdmin and BrokerReader that the admin process makes, with their types.

`BrokerClient.call` takes one of them and its request. A call that only reads may be repeated at
another replica. A change may have been applied already, so it is not repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    import grpc

    from tidemill.stubs.tidemill.broker.v1.broker_pb2_grpc import (
        BrokerAdminAsyncStub,
        BrokerReaderAsyncStub,
    )

Q = TypeVar("Q")
A = TypeVar("A")
UnaryMethod: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[Q, A]"


@dataclass(frozen=True, slots=True)
class BrokerStubs:
    """The stubs of one channel."""

    admin: BrokerAdminAsyncStub
    reader: BrokerReaderAsyncStub


@dataclass(frozen=True, slots=True)
class BrokerCall(Generic[Q, A]):
    """One call: its method, and whether it only reads."""

    method: Callable[[BrokerStubs], UnaryMethod[Q, A]]
    is_read: bool


def _change(method: Callable[[BrokerStubs], UnaryMethod[Q, A]]) -> BrokerCall[Q, A]:
    return BrokerCall(method, is_read=False)


def _read(method: Callable[[BrokerStubs], UnaryMethod[Q, A]]) -> BrokerCall[Q, A]:
    return BrokerCall(method, is_read=True)


# Topics and consumer groups.
PUT_TOPIC = _change(lambda stubs: stubs.admin.PutTopic)
DELETE_TOPIC = _change(lambda stubs: stubs.admin.DeleteTopic)
GET_TOPIC_STATUS = _read(lambda stubs: stubs.admin.GetTopicStatus)
PUT_GROUP = _change(lambda stubs: stubs.admin.PutGroup)
DELETE_GROUP = _change(lambda stubs: stubs.admin.DeleteGroup)
GET_GROUP_PROGRESS = _read(lambda stubs: stubs.admin.GetGroupProgress)
GET_CONFIG = _read(lambda stubs: stubs.admin.GetConfig)
RESET_OFFSET = _change(lambda stubs: stubs.admin.ResetOffset)
FORGET_PULL_OFFSETS = _change(lambda stubs: stubs.admin.ForgetPullOffsets)

# Deliveries in flight.
RELEASE_LOCK = _change(lambda stubs: stubs.admin.ReleaseLock)
GET_DELIVERIES = _read(lambda stubs: stubs.admin.GetDeliveries)
RELEASE_DELIVERIES = _change(lambda stubs: stubs.admin.ReleaseDeliveries)
GET_HELD = _read(lambda stubs: stubs.admin.GetHeld)

# Messages and lifecycle events.
STORE_MESSAGE = _change(lambda stubs: stubs.admin.StoreMessage)
FIND_MESSAGES = _read(lambda stubs: stubs.admin.FindMessages)
READ_MESSAGES = _read(lambda stubs: stubs.admin.ReadMessages)
READ_EVENTS = _read(lambda stubs: stubs.reader.ReadEvents)

# Timers.
LIST_TIMERS = _read(lambda stubs: stubs.admin.ListTimers)
COUNT_TIMERS = _read(lambda stubs: stubs.admin.CountTimers)
GET_TIMER = _read(lambda stubs: stubs.admin.GetTimer)
CANCEL_TIMER = _change(lambda stubs: stubs.admin.CancelTimer)
RESCHEDULE_TIMER = _change(lambda stubs: stubs.admin.RescheduleTimer)
FIRE_TIMER = _change(lambda stubs: stubs.admin.FireTimer)

# Broker groups and proxies.
LIST_BROKER_GROUPS = _read(lambda stubs: stubs.admin.ListBrokerGroups)
GET_BROKER_STATUS = _read(lambda stubs: stubs.admin.GetBrokerStatus)
ADD_BROKER_GROUP = _change(lambda stubs: stubs.admin.AddBrokerGroup)
DRAIN_BROKER_GROUP = _change(lambda stubs: stubs.admin.DrainBrokerGroup)
REMOVE_BROKER_GROUP = _change(lambda stubs: stubs.admin.RemoveBrokerGroup)
LIST_PROXIES = _read(lambda stubs: stubs.admin.ListProxies)
ASK_PROXY = _change(lambda stubs: stubs.admin.AskProxy)
