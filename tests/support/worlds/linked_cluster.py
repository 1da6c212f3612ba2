"""A proxy's cluster on links whose broker messages come from the test."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.proxy.cluster.cluster import BrokerCluster
from tidemill.proxy.link import BrokerLink, LinkLimits
from tidemill.proxy.metrics import ProxyMetrics
from tidemill.proxy.settings import ProxySettings
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

SECRETS = {f"broker-{n}": bytes([n]) * 32 for n in range(10)}


class LinkedCluster:
    """Brokers named broker-0, ... at h0:1, ...; the first one is the home broker."""

    def __init__(self, seeds: Sequence[str]) -> None:
        self.links: dict[str, BrokerLink] = {}
        self.cluster = BrokerCluster(self._open, ProxySettings(brokers=list(seeds)))
        self.members = [("broker-0", "h0:1"), ("broker-1", "h1:1"), ("broker-2", "h2:1")]
        self.draining: set[str] = set()
        self.placements = [("broker-0", 2), ("broker-1", 2), ("broker-2", 2)]
        self.topic_type = pb.TOPIC_TYPE_MIXED
        self.topic_version = 1
        self.dedup: pb.DedupPolicy | None = None
        self.key_placement = pb.KeyPlacement()
        self.serves_key_lookups = True

    def _open(self, address: str) -> BrokerLink:
        link = self.links[address] = BrokerLink(
            address,
            ProxyMetrics(),
            LinkLimits(
                pending_max=10, pending_bytes_max=1 << 20, patience_ms=1_000, clients_max=10
            ),
        )
        return link

    @property
    def topic(self) -> pb.TopicConfig:
        return self.cluster.find_topic("topic")

    def send_all_configs(self) -> None:
        """Let every member send its configuration."""
        for n in range(len(self.members)):
            self.send_config(n)

    def send_config(
        self, n: int, *, at: str = "", home_id: int = 7, has_topic: bool = True, cluster: str = "c"
    ) -> None:
        """Let broker `n` send its configuration. Ids at broker n begin with n."""
        name, address = self.members[n]
        membership = pb.Membership(
            cluster_id=cluster, home_name="broker-0", home_address=self.members[0][1]
        )
        if n == 0:
            for member_name, member_address in self.members:
                state = (
                    pb.MEMBER_STATE_DRAINING
                    if member_name in self.draining
                    else pb.MEMBER_STATE_ACTIVE
                )
                membership.members.add(name=member_name, address=member_address, state=state)
        topic = pb.TopicConfig(
            id=home_id if n == 0 else 100 * n + home_id,
            home_id=0 if n == 0 else home_id,
            name="topic",
            version=self.topic_version,
            type=self.topic_type,
            queues=2,
            placements=[pb.Placement(broker_group=g, queues=q) for g, q in self.placements],
            dedup=self.dedup,
            placement=self.key_placement,
        )
        group = pb.GroupConfig(
            id=8 if n == 0 else 100 * n + 8, home_id=0 if n == 0 else 8, name="group"
        )
        self.apply_config(
            at or address,
            pb.ConfigUpdate(
                is_complete=True,
                broker_name=name,
                handle_secret=SECRETS[name],
                membership=membership,
                topics=[topic] if has_topic else [],
                groups=[group],
                serves_sql_filters=True,
                serves_key_lookups=self.serves_key_lookups,
            ),
        )

    def apply_config(self, address: str, update: pb.ConfigUpdate) -> None:
        link = self.links[address]
        update.handle_secret = update.handle_secret or bytes(32)
        link.configuration.apply(update)
        link.configured.set()
        link.pending.open()
        link.on_change()

    def lose(self, n: int) -> None:
        """Let the stream to broker `n` break."""
        self.links[self.members[n][1]].pending.close(set(), silent_since_s=0.0)
