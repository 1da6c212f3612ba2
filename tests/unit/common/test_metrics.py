"""The metrics endpoint, and the limit of label sets."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from prometheus_client import exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families

from tests.support.worlds.proxy_world import eventually
from tidemill.common.histogram import Histogram
from tidemill.common.metrics import (
    OVERFLOW,
    SAMPLES_PER_PART,
    Registry,
    full_parts,
    histogram_parts,
)
from tidemill.common.metrics_server import (
    CONNECTIONS_MAX,
    COSTLY_S,
    REUSE_PER_COST,
    SCRAPES_MAX,
    MetricsServer,
    SharedScrapes,
)
from tidemill.common.readiness import ProcessReadiness
from tidemill.common.scrape_access import ScrapeAccess

OPEN = ScrapeAccess()
WAIT_S = 30.0  # much more than any test needs


def registry() -> Registry:
    return Registry(cluster="c", node_type="broker", node_id="b-0")


async def fetch(
    server: MetricsServer, path: str, method: str = "GET", **headers: str
) -> tuple[str, str]:
    host, _, port = server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: localhost",
        *(f"{k}: {v}" for k, v in headers.items()),
    ]
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
        async with MetricsServer(metrics, ProcessReadiness(), access=OPEN).serving(
            "127.0.0.1", 0
        ) as server:
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


def test_readyz_reports_the_state_of_the_process() -> None:
    async def scenario() -> None:
        readiness = ProcessReadiness()
        async with MetricsServer(registry(), readiness, access=OPEN).serving(
            "127.0.0.1", 0
        ) as server:
            assert (await fetch(server, "/livez"))[0].startswith("HTTP/1.1 200 ")
            head, body = await fetch(server, "/readyz")
            assert (head[:13], body) == ("HTTP/1.1 503 ", "not ready: starting\n")
            readiness.phase = "serving"
            head, body = await fetch(server, "/readyz")
            assert (head[:13], body) == ("HTTP/1.1 200 ", "ready\n")
            readiness.phase = "draining"
            head, body = await fetch(server, "/readyz")
            assert (head[:13], body) == ("HTTP/1.1 503 ", "not ready: draining\n")
            assert (await fetch(server, "/other"))[0].startswith("HTTP/1.1 404 ")

    asyncio.run(scenario())


def test_label_sets_beyond_the_limit_are_folded_and_counted() -> None:
    metrics = registry()
    sets = metrics.label_sets("m", ("consumer_group", "topic"), limit=1)
    (overflow,) = (m for m in metrics.collect() if m.name == "rocketmq_metrics_overflow")
    assert [sample.value for sample in overflow.samples] == [0]
    assert sets.admit(("g", "first")) == ("g", "first")
    assert sets.admit(("g", "second")) == ("g", OVERFLOW)
    assert sets.admit(("g", "first")) == ("g", "first")
    sets.forget(("g", "first"))
    assert sets.admit(("g", "second")) == ("g", "second")
    (overflow,) = (m for m in metrics.collect() if m.name == "rocketmq_metrics_overflow")
    assert [sample.value for sample in overflow.samples] == [1]


@pytest.mark.parametrize(
    ("accept", "families"),
    [("", text_string_to_metric_families), ("application/openmetrics-text", open_families)],
)
def test_a_scrape_of_many_samples_is_written_in_slices(accept: str, families: Any) -> None:
    """Twenty thousand topics take seconds, in the event loop of all other work."""
    metrics, count = registry(), 10 * SAMPLES_PER_PART
    observed: Histogram[int] = Histogram((1, 10))
    for n in range(count):
        observed.observe(n, 5)
    encode, _ = exposition.choose_encoder(accept)
    sizes = []

    def counting(part: Any) -> bytes:
        sizes.append(sum(len(metric.samples) for metric in part.collect()))
        return encode(part)

    def collect() -> Iterator[Metric]:
        one = CounterMetricFamily("one_total", "One.", labels=("topic",))
        other = GaugeMetricFamily("other", "Other.", labels=("topic",))
        for n in range(count):
            one.add_metric((str(n),), n)
            other.add_metric((str(n),), -n)
            yield from full_parts(one, other)
        yield from (one, other)
        yield from histogram_parts("third", "Third.", ("topic",), observed, lambda n: (str(n),))
        whole = GaugeMetricFamily("whole", "In one piece.", labels=("topic",))
        for n in range(count):
            whole.add_metric((str(n),), n)
        yield whole

    metrics.register(collect)
    slices, step_count = metrics.text(counting), 0
    while True:
        before = len(sizes)
        try:
            next(slices)
        except StopIteration as ended:
            text = b"".join(ended.value).decode()
            break
        step_count += 1
        assert len(sizes) == before + 1
        assert sizes[-1] <= SAMPLES_PER_PART
    assert step_count >= 4 * count // SAMPLES_PER_PART
    found = {family.name: family.samples for family in families(text)}
    assert [sample.value for sample in found["one"]] == list(range(count))
    assert [sample.value for sample in found["other"]] == [-n for n in range(count)]
    assert [sample.value for sample in found["whole"]] == list(range(count))
    assert sum(sample.name == "third_count" for sample in found["third"]) == count
    for name in ("other", "third", "whole"):
        assert text.count(f"# TYPE {name} ") == 1
    assert text.count("# EOF") == (accept != "")


def test_other_methods_get_the_list_of_methods() -> None:
    async def scenario() -> None:
        async with MetricsServer(registry(), ProcessReadiness(), access=OPEN).serving(
            "127.0.0.1", 0
        ) as server:
            head, _ = await fetch(server, "/livez", "POST")
            assert head.startswith("HTTP/1.1 405 ")
            assert "\r\nAllow: GET, HEAD\r\n" in head
            assert await fetch(server, "/livez", "HEAD") == ((await fetch(server, "/livez"))[0], "")

    asyncio.run(scenario())


def test_a_client_that_does_not_read_the_response_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidemill.common.metrics_server.WRITE_TIMEOUT_S", 0.01)
    metrics, count = registry(), 2_000
    # More than the buffers of both ends.
    labels = [(f"{n}{'x' * 10_000}",) for n in range(count)]

    def collect() -> list[CounterMetricFamily]:
        counter = CounterMetricFamily("large_total", "Large.", labels=("topic",))
        for each in labels:
            counter.add_metric(each, 1)
        return [counter]

    metrics.register(collect)
    is_let_go, connected = asyncio.Event(), MetricsServer._serve_connection

    async def note(
        server: MetricsServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await connected(server, reader, writer)
        is_let_go.set()

    monkeypatch.setattr(MetricsServer, "_serve_connection", note)

    async def scenario() -> None:
        async with MetricsServer(metrics, ProcessReadiness(), access=OPEN).serving(
            "127.0.0.1", 0
        ) as server:
            host, _, port = server.address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port), limit=1)
            writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
            async with asyncio.timeout(WAIT_S):
                await reader.readuntil(b"H")  # The response is being written.
                await is_let_go.wait()
            writer.transport.abort()

    asyncio.run(scenario())


def gated_registry() -> tuple[Registry, list[int]]:
    """Return a registry whose scrapes are counted."""
    metrics, scrapes = registry(), []

    def collect() -> list[GaugeMetricFamily]:
        scrapes.append(1)
        return [GaugeMetricFamily("some", "Some.", value=1)]

    metrics.register(collect)
    return metrics, scrapes


def test_waiting_scrapers_share_one_scrape_and_further_ones_are_rejected() -> None:
    async def scenario() -> None:
        metrics, scrapes = gated_registry()
        gate = asyncio.Event()

        async def wait() -> None:
            await gate.wait()

        endpoint = MetricsServer(metrics, ProcessReadiness(), wait, access=OPEN)
        async with asyncio.timeout(WAIT_S), endpoint.serving("127.0.0.1", 0) as server:
            waiting = [asyncio.create_task(fetch(server, "/metrics")) for _ in range(SCRAPES_MAX)]
            await eventually(lambda: server._scrape_count == SCRAPES_MAX)
            rejected, _ = await fetch(server, "/metrics")
            assert rejected.startswith("HTTP/1.1 503 ")
            assert (await fetch(server, "/livez"))[0].startswith("HTTP/1.1 200 ")
            gate.set()
            answers = await asyncio.gather(*waiting)
            assert {head[:13] for head, _ in answers} == {"HTTP/1.1 200 "}
            assert len({body for _, body in answers}) == 1
            assert len(scrapes) == 1

    asyncio.run(scenario())


def test_a_costly_text_serves_scrapes_until_it_has_cost_a_twentieth_of_a_core() -> None:
    async def scenario() -> None:
        now_s = [1000.0]
        cost_s = [COSTLY_S]
        metrics, scrapes = registry(), []

        def collect() -> list[GaugeMetricFamily]:
            scrapes.append(now_s[0])
            now_s[0] += cost_s[0]
            return [GaugeMetricFamily("some", "Some.", value=len(scrapes))]

        metrics.register(collect)
        texts = SharedScrapes(metrics, (), lambda: now_s[0])
        first = await texts.text("", is_gzip=False)
        assert await texts.text("", is_gzip=False) == first
        assert len(scrapes) == 1
        # Another form has a text of its own.
        now_s[0] += 3.0
        await texts.text("", is_gzip=True)
        assert len(scrapes) == 2
        now_s[0] = scrapes[0] + REUSE_PER_COST * COSTLY_S
        cost_s[0] = 0.0
        assert await texts.text("", is_gzip=False) != first
        now_s[0] += 1.0
        await texts.text("", is_gzip=False)
        assert len(scrapes) == 4

    asyncio.run(scenario())


def test_a_stop_during_a_scrape_is_no_error_of_the_event_loop() -> None:
    async def scenario() -> None:
        errors: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, each: errors.append(each))
        has_begun = asyncio.Event()

        async def stand_still() -> None:
            has_begun.set()
            await asyncio.Event().wait()

        endpoint = MetricsServer(registry(), ProcessReadiness(), stand_still, access=OPEN)
        async with asyncio.timeout(WAIT_S):
            async with endpoint.serving("127.0.0.1", 0) as server:
                scrape = asyncio.create_task(fetch(server, "/metrics"))
                await has_begun.wait()
            with suppress(ConnectionError):
                await scrape
        assert not errors

    asyncio.run(scenario())


def test_an_expired_text_is_not_kept() -> None:
    async def scenario() -> None:
        now_s, cost_s = [1000.0], [COSTLY_S]
        metrics = registry()

        def collect() -> list[GaugeMetricFamily]:
            now_s[0] += cost_s[0]
            return [GaugeMetricFamily("some", "Some.", value=1)]

        metrics.register(collect)
        texts = SharedScrapes(metrics, (), lambda: now_s[0])
        await texts.text("", is_gzip=True)
        now_s[0] += REUSE_PER_COST * cost_s[0]
        await texts.text("", is_gzip=False)
        assert [form.is_gzip for form in texts._reused] == [False]

    asyncio.run(scenario())


def test_head_requests_compute_no_scrape() -> None:
    async def scenario() -> None:
        metrics, scrapes = gated_registry()
        async with MetricsServer(metrics, ProcessReadiness(), access=OPEN).serving(
            "127.0.0.1", 0
        ) as server:
            for _ in range(100):
                head, body = await fetch(server, "/metrics", "HEAD")
                assert "text/plain" in head
                assert not body
        assert not scrapes

    asyncio.run(scenario())


def test_idle_connections_make_room_for_probes() -> None:
    async def scenario() -> None:
        endpoint = MetricsServer(registry(), ProcessReadiness(), access=OPEN)
        async with asyncio.timeout(WAIT_S), endpoint.serving("127.0.0.1", 0) as server:
            host, _, port = server.address.rpartition(":")
            idle = [
                await asyncio.open_connection(host, int(port)) for _ in range(2 * CONNECTIONS_MAX)
            ]
            assert (await fetch(server, "/livez"))[0].startswith("HTTP/1.1 200 ")
            assert len(server._connections) <= CONNECTIONS_MAX
            for _, writer in idle:
                writer.transport.abort()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("accepted", "is_gzip"), [("gzip", True), ("br, gzip;q=0.5", True), ("gzip;q=0", False)]
)
def test_a_scrape_is_compressed_for_scrapers_that_accept_it(accepted: str, is_gzip: bool) -> None:
    async def scenario() -> None:
        async with MetricsServer(registry(), ProcessReadiness(), access=OPEN).serving(
            "127.0.0.1", 0
        ) as server:
            host, _, port = server.address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"GET /metrics HTTP/1.1\r\nAccept-Encoding: {accepted}\r\n\r\n".encode())
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            assert (b"Content-Encoding: gzip" in head) == is_gzip
            text = gzip.decompress(body) if is_gzip else body
            assert b"rocketmq_build_info{" in text

    asyncio.run(scenario())


def test_a_failed_scrape_is_an_error_of_that_scrape() -> None:
    async def scenario() -> None:
        metrics, failures = registry(), [ValueError("broken")]

        def collect() -> list[Metric]:
            if failures:
                raise failures.pop()
            return []

        metrics.register(collect)
        async with MetricsServer(metrics, ProcessReadiness(), access=OPEN).serving(
            "127.0.0.1", 0
        ) as server:
            assert (await fetch(server, "/metrics"))[0].startswith("HTTP/1.1 500 ")
            assert (await fetch(server, "/metrics"))[0].startswith("HTTP/1.1 200 ")

    asyncio.run(scenario())
