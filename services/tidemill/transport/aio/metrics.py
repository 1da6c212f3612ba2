"""The metrics of a gRPC server."""

from __future__ import annotations

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


def collect(server: RpcServer) -> Iterator[Metric]:
    """Yield connections, calls, and exceeded limits."""
    connections = GaugeMetricFamily("rocketmq_grpc_connections", "Open connections.")
    connections.add_metric((), len(server.connections))
    yield connections
    accepted = CounterMetricFamily(
        "rocketmq_grpc_connections_accepted_total",
        "Accepted connections, after the TLS handshake if there is one.",
    )
    accepted.add_metric((), server.accepted_count)
    yield accepted
    calls = GaugeMetricFamily("rocketmq_grpc_calls", "Calls in progress, including streams.")
    calls.add_metric((), server.call_count)
    yield calls
    hits = CounterMetricFamily(
        "rocketmq_grpc_limit_hits_total",
        "Connections and calls that ended or were rejected because a client exceeded a limit.",
        labels=("limit",),
    )
    for limit in Limit:
        hits.add_metric((limit,), server.misuse.hits[limit])
    yield hits
    failures = CounterMetricFamily(
        "rocketmq_grpc_connections_failed_total",
        "Connections whose client broke the protocol or failed its TLS handshake, by error.",
        labels=("reason",),
    )
    counts = server.misuse.failures
    for reason in dict.fromkeys((*USUAL_FAILURES, *counts)):
        failures.add_metric((reason,), counts[reason])
    yield failures
    unconfirmed = CounterMetricFamily(
        "rocketmq_grpc_unheard_answers_total",
        "Responses to push consumers without a read confirmation, because too many waited for one."
        " Their messages are redelivered after a minute.",
    )
    unconfirmed.add_metric((), server.misuse.unconfirmed_count)
    yield unconfirmed
