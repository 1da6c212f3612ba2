"""The broker's gRPC server: links, admin calls, reads, members, replicas, health, reflection."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Final

from tidemill.broker.metrics.dead_letter_metrics import DeadLetterMetrics
from tidemill.broker.metrics.dedup_metrics import DedupMetrics
from tidemill.broker.metrics.transaction_metrics import TransactionMetrics
from tidemill.broker.server.admin.activity import ActivityAdmin
from tidemill.broker.server.admin.audit import AuditAdmin
from tidemill.broker.server.admin.broker_groups import BrokerGroupAdmin
from tidemill.broker.server.admin.consumer_groups import ConsumerGroupAdmin
from tidemill.broker.server.admin.dead_letters import DeadLetterAdmin
from tidemill.broker.server.admin.dedup_keys import DedupAdmin
from tidemill.broker.server.admin.deliveries import DeliveryAdmin
from tidemill.broker.server.admin.messages import MessageAdmin
from tidemill.broker.server.admin.operations import OperationAdmin
from tidemill.broker.server.admin.relay import Relay
from tidemill.broker.server.admin.security import SecurityAdmin
from tidemill.broker.server.admin.storage import StorageAdmin
from tidemill.broker.server.admin.timer_operations import TimerChangeAdmin
from tidemill.broker.server.admin.timers import TimerAdmin
from tidemill.broker.server.admin.topics import TopicAdmin
from tidemill.broker.server.admin.transactions import TransactionAdmin
from tidemill.broker.server.link.link_service import BrokerLinkService
from tidemill.broker.server.link.quotas import QuotaService
from tidemill.broker.server.members.home_service import BrokerHomeService
from tidemill.broker.server.reader.listings import BrokerReader
from tidemill.broker.server.reader.pulls import PullReader
from tidemill.broker.server.replicas.mending import FETCH_RANGE
from tidemill.broker.server.replicas.probes import PROBE
from tidemill.broker.server.replicas.streams import STREAM
from tidemill.broker.server.transactions.check_back import CheckBack
from tidemill.broker.server.transactions.producers import Producers
from tidemill.common.clock import SystemClock
from tidemill.common.metrics import Registry
from tidemill.stubs.tidemill.broker.v1 import broker_pb2
from tidemill.transport.aio import health, metrics
from tidemill.transport.aio.call import RpcMethod, bidirectional
from tidemill.transport.aio.listener import ListenSettings
from tidemill.transport.aio.reflection import reflection_methods
from tidemill.transport.aio.server import RpcServer
from tidemill.transport.aio.services import unary_methods
from tidemill.transport.http2.limits import Limits

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tidemill.broker.metrics.traffic import Traffic
    from tidemill.broker.server.members.cluster_members import ClusterMembers
    from tidemill.broker.server.replicas.replica_shell import ReplicaShell
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.scrape.lag import LagReader
    from tidemill.broker.settings import BrokerSettings
    from tidemill.transport.aio.process_service import ProcessService

REQUEST_BYTES_MAX: Final = 64 << 20  # a frame may carry many messages of 4 MiB
LINK: Final = broker_pb2.DESCRIPTOR.services_by_name["BrokerLink"]
ADMIN: Final = broker_pb2.DESCRIPTOR.services_by_name["BrokerAdmin"]
HOME: Final = broker_pb2.DESCRIPTOR.services_by_name["BrokerHome"]
READER: Final = broker_pb2.DESCRIPTOR.services_by_name["BrokerReader"]
QUOTAS: Final = broker_pb2.DESCRIPTOR.services_by_name["BrokerQuotas"]
RELAY: Final = broker_pb2.DESCRIPTOR.services_by_name["ClientRelay"]
SERVICES: Final = (
    LINK.full_name,
    ADMIN.full_name,
    HOME.full_name,
    RELAY.full_name,
    READER.full_name,
    QUOTAS.full_name,
)

# For proxies: few connections, with many requests in each frame.
LIMITS: Final = Limits(
    stream_window_bytes=16 << 20,
    frame_bytes=1 << 20,
    # The proxy and the rounds limit the frames of a link.
    large_messages_bytes=72 << 20,
    held_bytes_max=256 << 20,
    # A link limits itself (link/proxy_link.py), and may have more unread bytes than a client.
    unread_bytes_max=1 << 30,
    # Both ends notice a vanished machine without waiting for TCP. The broker notices it about as
    # soon as a proxy, because parked polls of a vanished proxy take messages.
    keepalive_period_s=5.0,
    keepalive_timeout_s=15.0,
    idle_timeout_s=3_600.0,  # the admin process keeps its connection for the next click
)


class BrokerServer:
    """The running server."""

    def __init__(
        self,
        server: RpcServer,
        serving: health.HealthService,
        quotas: QuotaService,
        checks: CheckBack,
    ) -> None:
        self._checks = checks
        self._quotas = quotas
        self._server = server
        self._health = serving

    @property
    def address(self) -> str:
        """The address of the server."""
        return self._server.address

    def register(self, registry: Registry, rounds: Rounds) -> None:
        """Export the metrics of the transport, quotas, transactions and dedup keys."""
        registry.register(self._collect)
        DedupMetrics(registry, rounds)
        TransactionMetrics(registry, rounds, self._checks)
        DeadLetterMetrics(registry, rounds)

    def _collect(self) -> Iterator[Metric]:
        yield from metrics.collect(self._server)
        yield from self._quotas.collect()

    async def drain(self, timeout_ms: int) -> None:
        """Accept no new calls, and answer those in flight, for at most `timeout_ms`."""
        self._health.drain()
        await self._server.drain(timeout_ms / 1000)


def replica_methods(replicas: ReplicaShell) -> dict[str, RpcMethod]:
    """Return the methods for the other replicas of the broker group."""
    return {
        STREAM: bidirectional(replicas.stream),
        FETCH_RANGE: bidirectional(replicas.fetch_range),
        PROBE: bidirectional(replicas.probe),
    }


@contextlib.asynccontextmanager
async def broker_server(
    rounds: Rounds,
    traffic: Traffic,
    lag: LagReader,
    members: ClusterMembers,
    settings: BrokerSettings,
    process: ProcessService,
    tls: ssl.SSLContext | None = None,
    replicas: ReplicaShell | None = None,
) -> AsyncIterator[BrokerServer]:
    """Serve until the block ends; raise StartError when the port is taken."""
    links = BrokerLinkService(
        rounds, traffic, view=lambda: None if replicas is None else replicas.view
    )
    producers = Producers()
    relay = Relay(producers)
    checks = CheckBack(
        rounds,
        producers,
        per_s=settings.transaction_checks_per_second,
        monotonic_ms=SystemClock().monotonic_ms,
    )
    quotas = QuotaService(rounds, relay.count_proxies, SystemClock().monotonic_ms)
    members.on_stocks = quotas.note_stocks
    serving = health.HealthService(SERVICES)
    methods = {
        f"/{LINK.full_name}/Exchange": bidirectional(links.exchange),
        f"/{HOME.full_name}/Follow": bidirectional(BrokerHomeService(rounds).follow),
        f"/{RELAY.full_name}/Attach": bidirectional(relay.attach),
        **({} if replicas is None else replica_methods(replicas)),
        **unary_methods(
            ADMIN,
            TopicAdmin(rounds),
            StorageAdmin(rounds),
            ActivityAdmin(rounds, traffic, lag),
            ConsumerGroupAdmin(rounds),
            MessageAdmin(rounds, traffic),
            TimerAdmin(rounds),
            TimerChangeAdmin(rounds),
            TransactionAdmin(rounds, producers),
            DedupAdmin(rounds),
            DeadLetterAdmin(rounds),
            OperationAdmin(rounds),
            DeliveryAdmin(rounds),
            BrokerGroupAdmin(rounds, members, replica_name=settings.replica_name),
            SecurityAdmin(rounds),
            AuditAdmin(rounds),
            relay,
        ),
        **unary_methods(QUOTAS, quotas),
        **process.methods(),
        **unary_methods(READER, BrokerReader(rounds), PullReader(rounds, traffic)),
        **serving.methods(),
        **reflection_methods((*SERVICES, health.SERVICE)),
    }
    listen = ListenSettings(
        host=settings.grpc_host,
        port=settings.grpc_port,
        reuse_port=settings.grpc_reuse_port,
        tls="required" if tls else "off",
        tls_context=tls,
    )
    server = RpcServer(methods, LIMITS, listen, message_bytes_max=REQUEST_BYTES_MAX)
    async with server.serving(), quotas.running(), checks.running():
        yield BrokerServer(server, serving, quotas, checks)
