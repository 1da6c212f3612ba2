"""The calls of BrokerAdmin, BrokerReader and BrokerQuotas by the admin process, with their types.

`BrokerClient.call` takes one of them and its request. If the connection is lost, the change may
have been applied. So the client repeats a call at the next master only if a second execution
changes nothing more. Such calls are reads, dry runs, PutTopic, SpreadTopic, PutGroup and
RecordAudit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    import grpc

    from tidemill.stubs.tidemill.broker.v1.broker_pb2_grpc import (
        BrokerAdminAsyncStub,
        BrokerQuotasAsyncStub,
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
    quotas: BrokerQuotasAsyncStub


@dataclass(frozen=True, slots=True)
class BrokerCall(Generic[Q, A]):
    """One call: its method, and whether a second execution changes nothing more."""

    method: Callable[[BrokerStubs], UnaryMethod[Q, A]]
    is_idempotent: bool
    timeout_s: float | None = None  # None: that of the client

    def may_repeat(self, request: Q) -> bool:
        """Return whether the client repeats the request after a lost connection."""
        return self.is_idempotent or bool(getattr(request, "dry_run", False))


def _change(method: Callable[[BrokerStubs], UnaryMethod[Q, A]]) -> BrokerCall[Q, A]:
    return BrokerCall(method, is_idempotent=False)


def _put(method: Callable[[BrokerStubs], UnaryMethod[Q, A]]) -> BrokerCall[Q, A]:
    return BrokerCall(method, is_idempotent=True)


def _read(
    method: Callable[[BrokerStubs], UnaryMethod[Q, A]], *, timeout_s: float | None = None
) -> BrokerCall[Q, A]:
    return BrokerCall(method, is_idempotent=True, timeout_s=timeout_s)


# Topics and consumer groups.
PUT_TOPIC = _put(lambda stubs: stubs.admin.PutTopic)
DELETE_TOPIC = _change(lambda stubs: stubs.admin.DeleteTopic)
PURGE_TOPIC = _change(lambda stubs: stubs.admin.PurgeTopic)
SPREAD_TOPIC = _put(lambda stubs: stubs.admin.SpreadTopic)
GET_TOPIC_STATUS = _read(lambda stubs: stubs.admin.GetTopicStatus)
GET_STORAGE = _read(lambda stubs: stubs.admin.GetStorage)
GET_ACTIVITY = _read(lambda stubs: stubs.admin.GetActivity)
PUT_GROUP = _put(lambda stubs: stubs.admin.PutGroup)
PAUSE_GROUP = _put(lambda stubs: stubs.admin.PauseGroup)
DELETE_GROUP = _change(lambda stubs: stubs.admin.DeleteGroup)
GET_GROUP_PROGRESS = _read(lambda stubs: stubs.admin.GetGroupProgress)
LIST_CONFLICTS = _read(lambda stubs: stubs.admin.ListConflicts)
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
QUERY_OFFSET = _read(lambda stubs: stubs.reader.QueryOffset)
READ_EVENTS = _read(lambda stubs: stubs.reader.ReadEvents)

# Timers.
LIST_TIMERS = _read(lambda stubs: stubs.admin.ListTimers)
COUNT_TIMERS = _read(lambda stubs: stubs.admin.CountTimers)
GET_TIMER_HISTOGRAM = _read(lambda stubs: stubs.admin.GetTimerHistogram)
GET_TIMER = _read(lambda stubs: stubs.admin.GetTimer)
CANCEL_TIMER = _change(lambda stubs: stubs.admin.CancelTimer)
RESCHEDULE_TIMER = _change(lambda stubs: stubs.admin.RescheduleTimer)
FIRE_TIMER = _change(lambda stubs: stubs.admin.FireTimer)
CHANGE_TIMERS = _change(lambda stubs: stubs.admin.ChangeTimers)

# Transactions.
GET_DEDUP = _read(lambda stubs: stubs.admin.GetDedup)
GET_DEDUP_KEY = _read(lambda stubs: stubs.admin.GetDedupKey)
FREE_DEDUP_KEY = _change(lambda stubs: stubs.admin.FreeDedupKey)
LIST_TRANSACTIONS = _read(lambda stubs: stubs.admin.ListTransactions)
GET_TRANSACTION = _read(lambda stubs: stubs.admin.GetTransaction)
CHANGE_TRANSACTION = _change(lambda stubs: stubs.admin.ChangeTransaction)
RECOVER_TRANSACTIONS = _change(lambda stubs: stubs.admin.RecoverTransactions)

# Dead letters.
LIST_DEAD_LETTERS = _read(lambda stubs: stubs.admin.ListDeadLetters)
SUMMARIZE_DEAD_LETTERS = _read(lambda stubs: stubs.admin.SummarizeDeadLetters)
GET_DEAD_LETTER = _read(lambda stubs: stubs.admin.GetDeadLetter)
SETTLE_DEAD_LETTERS = _change(lambda stubs: stubs.admin.SettleDeadLetters)

# Operations.
BEGIN_OPERATION = _change(lambda stubs: stubs.admin.BeginOperation)
LIST_OPERATIONS = _read(lambda stubs: stubs.admin.ListOperations)
CANCEL_OPERATION = _change(lambda stubs: stubs.admin.CancelOperation)

# Users, roles and the security mode.
LIST_SECURITY = _read(lambda stubs: stubs.admin.ListSecurity)
CHANGE_SECURITY = _change(lambda stubs: stubs.admin.ChangeSecurity)

# The audit log.
FIND_AUDIT = _read(lambda stubs: stubs.admin.FindAudit)
RECORD_AUDIT = _put(lambda stubs: stubs.admin.RecordAudit)
LEASE_PERMITS = _change(lambda stubs: stubs.quotas.LeasePermits)

# Broker groups and proxies.
LIST_BROKER_GROUPS = _read(lambda stubs: stubs.admin.ListBrokerGroups)
GET_BROKER_STATUS = _read(lambda stubs: stubs.admin.GetBrokerStatus)
ADD_BROKER_GROUP = _change(lambda stubs: stubs.admin.AddBrokerGroup)
DRAIN_BROKER_GROUP = _change(lambda stubs: stubs.admin.DrainBrokerGroup)
REMOVE_BROKER_GROUP = _change(lambda stubs: stubs.admin.RemoveBrokerGroup)
# A healthy broker answers in milliseconds, and most proxies are at several brokers. A broker that
# hangs must not delay questions to proxies.
LIST_PROXIES = _read(lambda stubs: stubs.admin.ListProxies, timeout_s=1.0)
ASK_PROXY = _change(lambda stubs: stubs.admin.AskProxy)
