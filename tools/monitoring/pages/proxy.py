"""Proxy: what clients ask, what they are answered, and how the proxies share it."""

from __future__ import annotations

from typing import Final

from tools.monitoring.vocabulary import Look, Page, Query, Row, heatmap, panel, quantiles, ratio

_CALLS = Row(
    "Calls of clients",
    (
        panel(
            "Calls",
            "Calls a second, by method.",
            Query(
                "sum by (request_code) "
                '(rate(rocketmq_rpc_latency_count{HERE, node_type="proxy"}[RATE]))',
                "{{request_code}}",
            ),
            unit="cps",
            look=Look.STACKED,
        ),
        panel(
            "Answers",
            "Answers a second that were not OK (20000), by status. 40401 is an empty receive.",
            Query(
                "sum by (response_code) (rate(rocketmq_rpc_latency_count{HERE, "
                'node_type="proxy", response_code!="20000"}[RATE])) or vector(0)',
                "{{response_code}}",
            ),
            unit="cps",
            alerts=("SendErrors",),
        ),
        panel(
            "Latency",
            "Milliseconds of all calls; a receive that waits is one of them.",
            heatmap("rocketmq_rpc_latency", 'HERE, node_type="proxy"'),
            unit="ms",
            look=Look.HEATMAP,
        ),
        panel(
            "Send P99 by proxy",
            "Milliseconds of SendMessage, by proxy.",
            *quantiles(
                "rocketmq_rpc_latency",
                'HERE, node_type="proxy", request_code="send_message"',
                by="node_id",
                legend="{{node_id}}",
                of=(0.99,),
            ),
            unit="ms",
        ),
        panel(
            "Refused by a limit",
            "Calls a second that a proxy refused because of a limit of its own, by reason.",
            Query(
                "sum by (reason) (rate(rocketmq_proxy_throttled_total{HERE}[RATE]))", "{{reason}}"
            ),
            unit="cps",
            alerts=("Throttling",),
        ),
        panel(
            "Limits overstepped",
            "Connections and calls a second that were ended or refused because a client overstepped a limit of "
            "the transport.",
            Query(
                'sum by (limit) (rate(rocketmq_grpc_limit_hits_total{HERE, node_type="proxy"}[RATE]))',
                "{{limit}}",
            ),
            unit="cps",
            alerts=("Throttling",),
        ),
    ),
)

_BROKERS = Row(
    "Brokers",
    (
        panel(
            "Broker latency P99",
            "Milliseconds from a proxy to a broker and back, by broker.",
            *quantiles(
                "rocketmq_proxy_backend_latency", by="broker", legend="{{broker}}", of=(0.99,)
            ),
            unit="ms",
        ),
        panel(
            "Failed at a broker",
            "Requests a second to a broker that failed, by broker.",
            Query(
                "sum by (broker) "
                '(rate(rocketmq_proxy_backend_latency_count{HERE, result!="success"}[RATE])) or vector(0)',
                "{{broker}}",
            ),
            unit="cps",
        ),
        panel(
            "Brokers reachable",
            "1 while a process reaches a broker.",
            Query(
                "min by (node_id, broker) (rocketmq_broker_reachable{HERE})",
                "{{node_id}} to {{broker}}",
            ),
            look=Look.STATES,
            alerts=("BrokerDown",),
        ),
        panel(
            "Given back",
            "Messages a second that were popped for a consumer that had gone, and were given back.",
            "sum(rate(rocketmq_proxy_late_pop_returned_total{HERE}[RATE]))",
            unit="cps",
        ),
    ),
)

_CONNECTIONS = Row(
    "Connections",
    (
        panel(
            "Connections",
            "Connections of clients, by proxy: they spread as their age ends.",
            Query(
                'sum by (node_id) (rocketmq_grpc_connections{HERE, node_type="proxy"})',
                "{{node_id}}",
            ),
            look=Look.STACKED,
        ),
        panel(
            "Restarts",
            "Proxies that died and were started again in their container, since it started.",
            Query("sum by (node_id) (rocketmq_proxy_restarts_total{HERE})", "{{node_id}}"),
            alerts=("ProxyRestarts",),
        ),
        panel(
            "Streams",
            "Streams that are open, by kind.",
            Query("sum by (kind) (rocketmq_proxy_streams{HERE})", "{{kind}}"),
        ),
        panel(
            "Producers",
            "Producers that are connected, by language and version of their client.",
            Query(
                "sum by (language, version) (rocketmq_producer_connections{HERE}) or vector(0)",
                "{{language}} {{version}}",
            ),
            look=Look.BARS,
        ),
        panel(
            "Consumers",
            "Consumers that are connected, by language and version of their client.",
            Query(
                "sum by (language, version) (rocketmq_consumer_connections{HERE}) or vector(0)",
                "{{language}} {{version}}",
            ),
            look=Look.BARS,
        ),
        panel(
            "Broken connections",
            "Connections a second whose client broke the protocol, or failed its TLS handshake.",
            Query(
                "sum by (reason) (rate(rocketmq_grpc_connections_failed_total{HERE, "
                'node_type="proxy"}[RATE])) or vector(0)',
                "{{reason}}",
            ),
            unit="cps",
        ),
        panel(
            "Share of the busiest proxy",
            "Part of all calls that the busiest proxy has: 1 divided by the number of proxies is even.",
            ratio(
                'max(sum by (node_id) (rate(rocketmq_rpc_latency_count{HERE, node_type="proxy"}[RATE])))',
                'sum(rate(rocketmq_rpc_latency_count{HERE, node_type="proxy"}[RATE]))',
            ),
            unit="percentunit",
        ),
    ),
)

_PROCESS = Row(
    "The process",
    (
        panel(
            "CPU",
            "Cores that a proxy uses. It is one process of one thread: 1 is all it can.",
            Query(
                'sum by (node_id) (rate(process_cpu_seconds_total{HERE, node_type="proxy"}[RATE]))',
                "{{node_id}}",
            ),
        ),
        panel(
            "Memory",
            "Resident memory.",
            Query(
                'max by (node_id) (process_resident_memory_bytes{HERE, node_type="proxy"})',
                "{{node_id}}",
            ),
            unit="bytes",
        ),
    ),
)

PAGE: Final = Page(
    name="proxy",
    title="Tidemill / Proxy",
    description="What clients ask, what they are answered, and how the proxies share it.",
    rows=(_CALLS, _BROKERS, _CONNECTIONS, _PROCESS),
)
