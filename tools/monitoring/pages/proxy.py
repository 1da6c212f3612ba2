"""Proxy: calls of clients, replies, and the load of each proxy."""

from __future__ import annotations

from typing import Final

from tools.monitoring.vocabulary import Look, Page, Query, Row, heatmap, panel, quantiles, ratio

_CALLS = Row(
    "Calls of clients",
    (
        panel(
            "Calls",
            "Calls per second, by method.",
            Query(
                "sum by (request_code) "
                '(rate(rocketmq_rpc_latency_count{HERE, node_type="proxy"}[RATE]))',
                "{{request_code}}",
            ),
            unit="cps",
            look=Look.STACKED,
        ),
        panel(
            "Replies without OK",
            "Replies per second without the status OK (20000), by status. 40401 is an empty receive.",
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
            "Milliseconds of all calls, waiting receives included.",
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
            "Rejected by a limit",
            "Calls per second that the proxy rejected because of one of its limits, by reason.",
            Query(
                "sum by (reason) (rate(rocketmq_proxy_throttled_total{HERE}[RATE]))", "{{reason}}"
            ),
            unit="cps",
            alerts=("Throttling",),
        ),
        panel(
            "Limits exceeded",
            "Connections and calls per second that the proxy ended or rejected because the client exceeded a limit of the transport.",
            Query(
                'sum by (limit) (rate(rocketmq_grpc_limit_hits_total{HERE, node_type="proxy"}[RATE]))',
                "{{limit}}",
            ),
            unit="cps",
            alerts=("Throttling",),
        ),
    ),
)

_ACCESS = Row(
    "Users and rights",
    (
        panel(
            "Refused calls",
            "Calls per second without credentials or without a right, by result. would_refuse: the mode permissive lets them pass.",
            Query(
                'sum by (result) (rate(rocketmq_access_total{HERE, result!="allowed"}[RATE]))',
                "{{result}}",
            ),
            unit="cps",
            alerts=("RefusalsGrowing",),
        ),
        panel(
            "Secrets not decrypted",
            "Secrets of users that no key of the proxy's key file decrypts.",
            Query("max by (node_id) (rocketmq_auth_undecryptable_secrets{HERE})", "{{node_id}}"),
            alerts=("SecretsUndecryptable",),
        ),
        panel(
            "Age of users and rights",
            "Time without an answer of the home, which stores users and roles.",
            Query("max by (node_id) (rocketmq_security_stale_seconds{HERE})", "{{node_id}}"),
            unit="s",
            alerts=("SecurityTablesStale",),
        ),
        panel(
            "Issuer keys not read",
            "Time since the first failed read of the keys that verify Kubernetes tokens.",
            Query(
                "max by (node_id) (rocketmq_auth_issuer_keys_stale_seconds{HERE})", "{{node_id}}"
            ),
            unit="s",
            alerts=("IssuerKeysUnreadable",),
        ),
        panel(
            "Security mode",
            "The mode in force: 0 off, 1 permissive, 2 on.",
            Query("max by (node_id) (rocketmq_security_mode{HERE})", "{{node_id}}"),
        ),
        panel(
            "Refusals and accesses in the log",
            "Log lines per second about refused calls and calls of super users, by kind.",
            Query("sum by (kind) (rate(rocketmq_audit_log_records_total{HERE}[RATE]))", "{{kind}}"),
            unit="cps",
        ),
    ),
)

_BROKERS = Row(
    "Brokers",
    (
        panel(
            "Broker latency P99",
            "Milliseconds from the proxy to the broker and back, by broker.",
            *quantiles(
                "rocketmq_proxy_backend_latency", by="broker", legend="{{broker}}", of=(0.99,)
            ),
            unit="ms",
        ),
        panel(
            "Failed at a broker",
            "Failed requests to a broker per second, by broker.",
            Query(
                "sum by (broker) "
                '(rate(rocketmq_proxy_backend_latency_count{HERE, result!="success"}[RATE])) or vector(0)',
                "{{broker}}",
            ),
            unit="cps",
        ),
        panel(
            "Brokers reachable",
            "1 while the process reaches the broker.",
            Query(
                "min by (node_id, broker) (rocketmq_broker_reachable{HERE})",
                "{{node_id}} to {{broker}}",
            ),
            look=Look.STATES,
            alerts=("BrokerDown",),
        ),
        panel(
            "Given back",
            "Messages per second that were popped for a disconnected consumer and given back.",
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
            "Client connections, by proxy. They spread again when their maximum age ends.",
            Query(
                'sum by (node_id) (rocketmq_grpc_connections{HERE, node_type="proxy"})',
                "{{node_id}}",
            ),
            look=Look.STACKED,
        ),
        panel(
            "Restarts",
            "Restarts of a proxy inside its container, since the container started.",
            Query("sum by (node_id) (rocketmq_proxy_restarts_total{HERE})", "{{node_id}}"),
            alerts=("ProxyRestarts",),
        ),
        panel(
            "Streams",
            "Open streams, by kind.",
            Query("sum by (kind) (rocketmq_proxy_streams{HERE})", "{{kind}}"),
        ),
        panel(
            "Producers",
            "Connected producers, by language and version of the client.",
            Query(
                "sum by (language, version) (rocketmq_producer_connections{HERE}) or vector(0)",
                "{{language}} {{version}}",
            ),
            look=Look.BARS,
        ),
        panel(
            "Consumers",
            "Connected consumers, by language and version of the client.",
            Query(
                "sum by (language, version) (rocketmq_consumer_connections{HERE}) or vector(0)",
                "{{language}} {{version}}",
            ),
            look=Look.BARS,
        ),
        panel(
            "Broken connections",
            "Connections per second that ended because the client broke the protocol or failed the TLS handshake.",
            Query(
                "sum by (reason) (rate(rocketmq_grpc_connections_failed_total{HERE, "
                'node_type="proxy"}[RATE])) or vector(0)',
                "{{reason}}",
            ),
            unit="cps",
        ),
        panel(
            "Share of the busiest proxy",
            "Share of all calls that the busiest proxy handles. Even load is 1 divided by the number of proxies.",
            ratio(
                'max(sum by (node_id) (rate(rocketmq_rpc_latency_count{HERE, node_type="proxy"}[RATE])))',
                'sum(rate(rocketmq_rpc_latency_count{HERE, node_type="proxy"}[RATE]))',
            ),
            unit="percentunit",
        ),
    ),
)

_PROCESS = Row(
    "Process",
    (
        panel(
            "CPU",
            "Cores that a proxy uses. A proxy has one thread, so 1 is its maximum.",
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
    description="Calls of clients, replies, and the load of each proxy.",
    rows=(_CALLS, _ACCESS, _BROKERS, _CONNECTIONS, _PROCESS),
)
