"""One broker group, as the proxy's methods see it: its link, its ids, its handles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, final

from tidemill.common.errors import BadRequest, InvalidReceiptHandle
from tidemill.message import limits, recall_handle, receipt_handle
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from tidemill.message.recall_handle import RecallFields, RecallSigner
    from tidemill.message.receipt_handle import HandleFields, HandleOpener, HandleSigner
    from tidemill.proxy.link import BrokerLink


class LocalIds(NamedTuple):
    """Of a consumer group and a topic, at one broker."""

    group_id: int
    topic_id: int


@final
class LinkedGroup:
    """One broker group: its link, and what it has told of itself."""

    __slots__ = ("is_draining", "is_member", "link")

    def __init__(self, link: BrokerLink) -> None:
        self.link = link
        # As the home says. Of one that is no member, or not yet, nothing is asked.
        self.is_member = False
        self.is_draining = False

    @property
    def name(self) -> str:
        """The name under which routes show it; "" as long as it has not told."""
        return self.link.configuration.broker_name

    @property
    def signer(self) -> HandleSigner:
        """Signer of its receipt handles."""
        return self.link.configuration.signer

    @property
    def recall_signer(self) -> RecallSigner:
        """Signer of its recall handles."""
        return self.link.configuration.recall_signer

    def find_topic(self, topic: link_pb2.TopicConfig) -> link_pb2.TopicConfig | None:
        """Return what it has of a topic of the home's; None where it has not this incarnation."""
        own = self.link.configuration.topics.get(topic.name)
        return own if own is not None and self.is_member and _is_same(own, topic) else None

    def find_group(self, group: link_pb2.GroupConfig) -> link_pb2.GroupConfig | None:
        """Return what it has of a group of the home's; None where it has not this incarnation."""
        own = self.link.configuration.groups.get(group.name)
        return own if own is not None and self.is_member and _is_same(own, group) else None

    def find_ids(self, group: link_pb2.GroupConfig, topic: link_pb2.TopicConfig) -> LocalIds | None:
        """Return under which ids it has both; None where it has not these incarnations."""
        configuration = self.link.configuration
        own_topic = configuration.topics.get(topic.name)
        own_group = configuration.groups.get(group.name)
        if own_topic is None or own_group is None or not self.is_member:
            return None
        # The home has what the home has, and is asked most.
        if own_topic is not topic and not _is_same(own_topic, topic):
            return None
        if own_group is not group and not _is_same(own_group, group):
            return None
        return LocalIds(own_group.id, own_topic.id)


def _is_same(
    own: link_pb2.TopicConfig | link_pb2.GroupConfig,
    homes: link_pb2.TopicConfig | link_pb2.GroupConfig,
) -> bool:
    """Whether a broker's own topic or group is of the incarnation that the home has."""
    if isinstance(own, link_pb2.TopicConfig) and own.is_system:
        return True  # Each broker makes its own, and none knows of the others'.
    # A home that was restored from a backup gives out ids a second time.
    is_of_time = own.created_at_ms == homes.created_at_ms
    return (own.home_id or own.id) == homes.id and is_of_time


@final
class HandleIssuers:
    """Who has issued which handles: by what they begin with."""

    def __init__(self, brokers: Sequence[LinkedGroup]) -> None:
        # A mark is short, so two brokers may have the same.
        self._marked: dict[str, list[LinkedGroup]] = {}
        for broker in brokers:
            self._marked.setdefault(broker.signer.mark, []).append(broker)
        # Of a handle that is nobody's, anybody says what is wrong with it.
        self._anybody = brokers[:1]

    def find(self, handle: str) -> Sequence[LinkedGroup]:
        """Return who may have issued a receipt handle."""
        return self._marked.get(handle[: receipt_handle.MARK_CHARS]) or self._anybody


@final
class ReceiptHandles:
    """Opens the receipt handles of one request, mostly of few deliveries."""

    def __init__(self, issuers: HandleIssuers, group: str, topic: str) -> None:
        self._issuers = issuers
        self._group = group
        self._topic = topic
        self._openers: dict[LinkedGroup, HandleOpener] = {}
        # What the handle before began with, and who opened it, where nobody else has that mark.
        self._mark = ""
        self._before: tuple[LinkedGroup, HandleOpener]

    def open(self, handle: str) -> tuple[LinkedGroup, HandleFields]:
        """Return which delivery of whom `handle` names. Raises InvalidReceiptHandle."""
        if self._mark and handle.startswith(self._mark):
            issuer, known = self._before
            return issuer, known.open(handle)
        limits.RECEIPT_HANDLE.check_text(handle)
        refused: InvalidReceiptHandle | None = None
        brokers = self._issuers.find(handle)
        for broker in brokers:
            opener = self._openers.get(broker)
            if opener is None:
                opener = broker.signer.opener(self._group, self._topic)
                self._openers[broker] = opener
            try:
                opened = opener.open(handle)
            except InvalidReceiptHandle as error:
                refused = error
                continue
            if len(brokers) == 1:
                self._mark, self._before = handle[: receipt_handle.MARK_CHARS], (broker, opener)
            return broker, opened
        raise refused or InvalidReceiptHandle("no broker group that there is has issued the handle")


def open_recall(
    brokers: Sequence[LinkedGroup], handle: str, topic: str
) -> tuple[LinkedGroup, RecallFields]:
    """Return which timer of whom a recall handle names. Raises BadRequest."""
    limits.RECALL_HANDLE.check_text(handle)
    refused = BadRequest("no broker group that there is has issued the recall handle")
    mark = handle[: recall_handle.MARK_CHARS]
    # Of a handle that is nobody's, anybody says what is wrong with it.
    marked = [broker for broker in brokers if broker.recall_signer.mark == mark] or brokers[:1]
    for broker in marked:
        try:
            return broker, broker.recall_signer.open(handle, topic)
        except BadRequest as error:
            refused = error
    raise refused
