"""What a gRPC server of ours tells at a scrape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tidemill.transport.http2.limits import Limit

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tidemill.transport.aio.server import RpcServer


# How connections fail by a client's fault. They begin at 0; others appear when they come.
USUAL_FAILURES = (
    "tls_handshake",
    "proxy_protocol",
    "protocol_error",
    "flow_control_error",
    "stream_closed",
    "frame_size_error",
    "compression_error",
)


def collect(server: RpcServer) -> Iterator[Metric]:
    """Yield connections, calls, and how often each limit was overstepped."""
    connections = GaugeMetricFamily("rocketmq_grpc_connections", "Open connections.")
    connections.add_metric((), len(server.connections))
    yield connections
    accepted = CounterMetricFamily(
        "rocketmq_grpc_connections_accepted_total",
        "Connections that were let in, after their handshake where there is TLS.",
    )
    accepted.add_metric((), server.accepted_count)
    yield accepted
    calls = GaugeMetricFamily("rocketmq_grpc_calls", "Calls under way, streams included.")
    calls.add_metric((), server.call_count)
    yield calls
    hits = CounterMetricFamily(
        "rocketmq_grpc_limit_hits_total",
        "Connections and calls that were ended or refused because a client overstepped a limit.",
        labels=("limit",),
    )
    for limit in Limit:
        hits.add_metric((limit,), server.notices.hits[limit])
    yield hits
    failures = CounterMetricFamily(
        "rocketmq_grpc_connections_failed_total",
        "Connections whose client broke the protocol, by the error, or failed its TLS handshake.",
        labels=("reason",),
    )
    counts = server.notices.failures
    for reason in dict.fromkeys((*USUAL_FAILURES, *counts)):
        failures.add_metric((reason,), counts[reason])
    yield failures
    unheard = CounterMetricFamily(
        "rocketmq_grpc_unheard_answers_total",
        "Answers to push consumers of which is not known that they were read, because of too many"
        " their clients had yet to say so: what they brought is redelivered after a minute.",
    )
    unheard.add_metric((), server.notices.unheard_answers)
    yield unheard
