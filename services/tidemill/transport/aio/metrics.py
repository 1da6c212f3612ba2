"""The metrics of a gRPC server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tidemill.transport.http2.limits import Limit

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tidemill.transport.aio.server import RpcServer


# Failures of connections that clients cause. They start at 0; other kinds appear when they happen.
USUAL_FAILURES = (
    "tls_handshake",
    "proxy_protocol",
    "protocol_error",
    "flow_control_error",
    "stream_closed",
    "frame_size_error",
    "compression_error",
)


def collect(*servers: RpcServer) -> Iterator[Metric]:
    """Yield connections, calls, and exceeded limits of all servers of a process together."""
    connections = GaugeMetricFamily("rocketmq_grpc_connections", "Open connections.")
    connections.add_metric((), sum(len(server.connections) for server in servers))
    yield connections
    accepted = CounterMetricFamily(
        "rocketmq_grpc_connections_accepted_total",
        "Accepted connections, after the TLS handshake if there is one.",
    )
    accepted.add_metric((), sum(server.accepted_count for server in servers))
    yield accepted
    calls = GaugeMetricFamily("rocketmq_grpc_calls", "Calls in progress, including streams.")
    calls.add_metric((), sum(server.call_count for server in servers))
    yield calls
    hits = CounterMetricFamily(
        "rocketmq_grpc_limit_hits_total",
        "Connections and calls that ended or were rejected because a client exceeded a limit.",
        labels=("limit",),
    )
    for limit in Limit:
        hits.add_metric((limit,), sum(server.misuse.hits[limit] for server in servers))
    yield hits
    failures = CounterMetricFamily(
        "rocketmq_grpc_connections_failed_total",
        "Connections whose client broke the protocol or failed its TLS handshake, by error.",
        labels=("reason",),
    )
    counts = sum((server.misuse.failures for server in servers), Counter[str]())
    for reason in dict.fromkeys((*USUAL_FAILURES, *counts)):
        failures.add_metric((reason,), counts[reason])
    yield failures
    unconfirmed = CounterMetricFamily(
        "rocketmq_grpc_unheard_answers_total",
        "Responses to push consumers without a read confirmation, because too many waited for one."
        " Their messages are redelivered after a minute.",
    )
    unconfirmed.add_metric((), sum(server.misuse.unconfirmed_count for server in servers))
    yield unconfirmed
