"""The metrics endpoint, and the guard against too many label sets."""

from __future__ import annotations

import asyncio

from prometheus_client.core import CounterMetricFamily

from tidemill.common.metrics import OVERFLOW, MetricsServer, Registry


def registry() -> Registry:
    return Registry(cluster="c", node_type="broker", node_id="b-0")


async def fetch(server: MetricsServer, path: str, **headers: str) -> tuple[str, str]:
    host, _, port = server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = [f"GET {path} HTTP/1.1", "Host: test", *(f"{k}: {v}" for k, v in headers.items())]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return head, body


def test_names_and_labels_appear_as_declared() -> None:
    metrics = registry()

    def collect() -> list[CounterMetricFamily]:
        counter = CounterMetricFamily("rocketmq_messages_in_total", "In.", labels=("topic",))
        counter.add_metric(("t",), 3)
        return [counter]

    metrics.register(collect)

    async def scenario() -> None:
        async with MetricsServer(metrics).serving("127.0.0.1", 0) as server:
            head, body = await fetch(server, "/metrics")
            assert "text/plain" in head
            labels = 'cluster="c",node_id="b-0",node_type="broker",topic="t"'
            assert f"rocketmq_messages_in_total{{{labels}}} 3.0\n" in body
            assert "_created" not in body
            assert "rocketmq_build_info{" in body
            head, body = await fetch(server, "/metrics", Accept="application/openmetrics-text")
            assert "openmetrics" in head
            assert body.endswith("# EOF\n")

    asyncio.run(scenario())


def test_readiness_is_what_the_process_says() -> None:
    async def scenario() -> None:
        async with MetricsServer(registry()).serving("127.0.0.1", 0) as server:
            assert (await fetch(server, "/livez"))[0].startswith("HTTP/1.1 200 ")
            assert (await fetch(server, "/readyz"))[0].startswith("HTTP/1.1 503 ")
            server.is_ready = True
            assert (await fetch(server, "/readyz"))[0].startswith("HTTP/1.1 200 ")
            assert (await fetch(server, "/other"))[0].startswith("HTTP/1.1 404 ")

    asyncio.run(scenario())


def test_label_sets_beyond_the_limit_are_folded_and_counted() -> None:
    metrics = registry()
    sets = metrics.bounded("m", ("consumer_group", "topic"), limit=1)
    assert sets.admit(("g", "first")) == ("g", "first")
    assert sets.admit(("g", "second")) == ("g", OVERFLOW)
    assert sets.admit(("g", "first")) == ("g", "first")
    sets.forget(("g", "first"))
    assert sets.admit(("g", "second")) == ("g", "second")
    (overflow,) = (m for m in metrics.collect() if m.name == "rocketmq_metrics_overflow")
    assert [sample.value for sample in overflow.samples] == [1]
