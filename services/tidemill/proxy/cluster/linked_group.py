"""One broker group at the proxy: its link, its ids of topics and groups, its handles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, final

from tidemill.common.errors import (
    BadRequest,
    InvalidReceiptHandle,
    TransactionNotFound,
    VersionUnsupported,
)
from tidemill.message import limits, recall_handle, receipt_handle, transaction_id
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from tidemill.message.recall_handle import RecallFields, RecallSigner
    from tidemill.message.receipt_handle import HandleFields, HandleOpener, HandleSigner
    from tidemill.message.transaction_id import TransactionSigner
    from tidemill.proxy.link import BrokerLink


class LocalIds(NamedTuple):
    """The ids of a consumer group and a topic at one broker group."""

    group_id: int
    topic_id: int


@final
class LinkedGroup:
    """One broker group, with its link and its configuration."""

    __slots__ = ("is_draining", "is_member", "link")

    def __init__(self, link: BrokerLink) -> None:
        self.link = link
        # From the list of the home. A broker group outside the list gets no requests.
        self.is_member = False
        self.is_draining = False

    @property
    def name(self) -> str:
        """The name in routes; "" before its first configuration."""
        return self.link.configuration.broker_name

    @property
    def signer(self) -> HandleSigner:
        """The signer of its receipt handles."""
        return self.link.configuration.signer

    @property
    def recall_signer(self) -> RecallSigner:
        """The signer of its recall handles."""
        return self.link.configuration.recall_signer

    @property
    def transaction_signer(self) -> TransactionSigner:
        """The signer of its transaction ids."""
        return self.link.configuration.transaction_signer

    def check_serves_transactions(self) -> None:
        """Raise VersionUnsupported if the broker would not answer a half message."""
        if not self.link.configuration.serves_transactions:
            raise VersionUnsupported(
                f"the broker group {self.name} is older than this proxy and serves no"
                f" transactions; upgrade it"
            )

    def find_topic(self, topic: link_pb2.TopicConfig) -> link_pb2.TopicConfig | None:
        """Return its configuration of a topic of the home; None if it lacks this incarnation."""
        own = self.link.configuration.topics.get(topic.name)
        return own if own is not None and self.is_member and _is_same(own, topic) else None

    def find_group(self, group: link_pb2.GroupConfig) -> link_pb2.GroupConfig | None:
        """Return its configuration of a group of the home; None if it lacks this incarnation."""
        own = self.link.configuration.groups.get(group.name)
        return own if own is not None and self.is_member and _is_same(own, group) else None

    def find_ids(self, group: link_pb2.GroupConfig, topic: link_pb2.TopicConfig) -> LocalIds | None:
        """Return its ids of both; None if it lacks one of these incarnations."""
        configuration = self.link.configuration
        own_topic = configuration.topics.get(topic.name)
        own_group = configuration.groups.get(group.name)
        if own_topic is None or own_group is None or not self.is_member:
            return None
        # A fast path for the home, which gets most requests: the objects are the same.
        if own_topic is not topic and not _is_same(own_topic, topic):
            return None
        if own_group is not group and not _is_same(own_group, group):
            return None
        return LocalIds(own_group.id, own_topic.id)


def _is_same(
    own: link_pb2.TopicConfig | link_pb2.GroupConfig,
    homes: link_pb2.TopicConfig | link_pb2.GroupConfig,
) -> bool:
    """Whether a broker's topic or group is of the same incarnation as that of the home."""
    if isinstance(own, link_pb2.TopicConfig) and own.is_system:
        return True  # Each broker group creates its own system topics.
    # A home that was restored from a backup assigns the same ids again.
    is_of_time = own.created_at_ms == homes.created_at_ms
    return (own.home_id or own.id) == homes.id and is_of_time


@final
class HandleIssuers:
    """The broker groups by the mark with which their receipt handles begin."""

    def __init__(self, brokers: Sequence[LinkedGroup]) -> None:
        # A mark is short, so two broker groups may have the same.
        self._marked: dict[str, list[LinkedGroup]] = {}
        for broker in brokers:
            self._marked.setdefault(broker.signer.mark, []).append(broker)
        # If no mark matches, any broker group can state the error in a handle.
        self._default = brokers[:1]

    def find(self, handle: str) -> Sequence[LinkedGroup]:
        """Return the broker groups that may have issued a receipt handle."""
        return self._marked.get(handle[: receipt_handle.MARK_CHARS]) or self._default


@final
class ReceiptHandles:
    """An opener of the receipt handles of one request, which mostly name few deliveries."""

    def __init__(self, issuers: HandleIssuers, group: str, topic: str) -> None:
        self._issuers = issuers
        self._group = group
        self._topic = topic
        self._openers: dict[LinkedGroup, HandleOpener] = {}
        # The mark of the previous handle, if it has one issuer, and the opener of that handle.
        self._mark = ""
        self._previous: tuple[LinkedGroup, HandleOpener]

    def open(self, handle: str) -> tuple[LinkedGroup, HandleFields]:
        """Return the broker group and the delivery of a handle. Raises InvalidReceiptHandle."""
        if self._mark and handle.startswith(self._mark):
            issuer, known = self._previous
            return issuer, known.open(handle)
        limits.RECEIPT_HANDLE.check_text(handle)
        failure: InvalidReceiptHandle | None = None
        brokers = self._issuers.find(handle)
        for broker in brokers:
            opener = self._openers.get(broker)
            if opener is None:
                opener = broker.signer.opener(self._group, self._topic)
                self._openers[broker] = opener
            try:
                opened = opener.open(handle)
            except InvalidReceiptHandle as error:
                failure = error
                continue
            if len(brokers) == 1:
                self._mark, self._previous = handle[: receipt_handle.MARK_CHARS], (broker, opener)
            return broker, opened
        raise failure or InvalidReceiptHandle("no broker group of this cluster issued the handle")


def open_recall(
    brokers: Sequence[LinkedGroup], handle: str, topic: str
) -> tuple[LinkedGroup, RecallFields]:
    """Return the broker group and the timer of a recall handle. Raises BadRequest."""
    limits.RECALL_HANDLE.check_text(handle)
    failure = BadRequest("no broker group of this cluster issued the recall handle")
    mark = handle[: recall_handle.MARK_CHARS]
    # If no mark matches, any broker group can state the error in a handle.
    marked = [broker for broker in brokers if broker.recall_signer.mark == mark] or brokers[:1]
    for broker in marked:
        try:
            return broker, broker.recall_signer.open(handle, topic)
        except BadRequest as error:
            failure = error
    raise failure


def open_transaction(
    brokers: Sequence[LinkedGroup], text: str, topic: str, message_id: str
) -> tuple[LinkedGroup, int]:
    """Return the broker group and the half id of a transaction id. Raises TransactionNotFound."""
    failure = TransactionNotFound("no broker group of this cluster issued the transaction id")
    mark = text[: transaction_id.MARK_CHARS]
    for broker in brokers:
        if broker.transaction_signer.mark == mark:
            try:
                return broker, broker.transaction_signer.open(text, topic, message_id)
            except TransactionNotFound as error:
                failure = error
    raise failure
