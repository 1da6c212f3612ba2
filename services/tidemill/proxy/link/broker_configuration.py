"""The topics and groups of a broker: the fold of its configuration updates."""

from __future__ import annotations

from tidemill.message.recall_handle import RecallSigner
from tidemill.message.receipt_handle import HandleSigner
from tidemill.message.transaction_id import TransactionSigner
from tidemill.proxy.link.security_copy import SecurityCopy
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2


class BrokerConfiguration:
    """Topics and groups by name, as of the last update; the link is its only writer."""

    def __init__(self) -> None:
        self.topics: dict[str, link_pb2.TopicConfig] = {}
        self.groups: dict[str, link_pb2.GroupConfig] = {}
        self.broker_name = ""
        self.membership = link_pb2.Membership()  # without an id: of no cluster
        self.auto_create_topics = False
        self.auto_create_groups = False
        self.serves_sql_filters = False
        self.serves_transactions = False
        self.serves_key_lookups = False
        self.handle_secret = b""  # created once per store
        self.security = SecurityCopy()
        self._signer: HandleSigner | None = None
        self._recall_signer: RecallSigner | None = None
        self._transaction_signer: TransactionSigner | None = None

    @property
    def signer(self) -> HandleSigner:
        """Signer of this broker's receipt handles."""
        assert self._signer is not None, "nothing is served before the first configuration"
        return self._signer

    @property
    def recall_signer(self) -> RecallSigner:
        """Signer of this broker's recall handles."""
        assert self._recall_signer is not None, "nothing is served before the first configuration"
        return self._recall_signer

    @property
    def transaction_signer(self) -> TransactionSigner:
        """Signer of this broker's transaction ids."""
        assert self._transaction_signer is not None, "as above"
        return self._transaction_signer

    def apply(self, update: link_pb2.ConfigUpdate) -> None:
        """Fold one update."""
        if update.is_complete:
            if self.handle_secret not in {b"", update.handle_secret}:
                self.security.expect_table()
            self.topics, self.groups = {}, {}
            self.broker_name = update.broker_name
            self.membership = link_pb2.Membership()
            self.auto_create_topics = update.auto_create_topics
            self.auto_create_groups = update.auto_create_groups
            self.serves_sql_filters = update.serves_sql_filters
            self.serves_transactions = update.serves_transactions
            self.serves_key_lookups = update.serves_key_lookups
            self.handle_secret = update.handle_secret
            self._signer = HandleSigner(update.handle_secret, update.broker_name)
            self._recall_signer = RecallSigner(update.handle_secret, update.broker_name)
            self._transaction_signer = TransactionSigner(update.handle_secret, update.broker_name)
        # Copies: a part of a frame keeps the whole frame in memory, with megabytes of replies.
        if update.HasField("membership"):
            self.membership = link_pb2.Membership()
            self.membership.CopyFrom(update.membership)
        self.security.apply(update)
        # Deletions first: the same update may have the next incarnation of a deleted name.
        for topic_id in update.deleted_topic_ids:
            self._forget_topic(topic_id)
        for group_id in update.deleted_group_ids:
            self._forget_group(group_id)
        for updated_topic in update.topics:
            topic = self.topics[updated_topic.name] = link_pb2.TopicConfig()
            topic.CopyFrom(updated_topic)
        for updated_group in update.groups:
            group = self.groups[updated_group.name] = link_pb2.GroupConfig()
            group.CopyFrom(updated_group)

    def _forget_topic(self, topic_id: int) -> None:
        for name, topic in self.topics.items():
            if topic.id == topic_id:
                del self.topics[name]
                return

    def _forget_group(self, group_id: int) -> None:
        for name, group in self.groups.items():
            if group.id == group_id:
                del self.groups[name]
                return
