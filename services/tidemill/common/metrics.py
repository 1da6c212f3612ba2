"""What every process exports: the HTTP endpoint, the common collectors, the cardinality guard.

    GET /metrics   Prometheus text, or OpenMetrics where the scraper asks for it
    GET /livez     200 while the event loop runs
    GET /readyz    200 while the process is ready, else 503; the body says why, and of each broker
                   whether it can be reached

The endpoint lives in the process's own event loop: a scrape that hangs shows a process that hangs.
Hot paths count in plain dictionaries; collectors turn those into samples when somebody scrapes.

Twenty thousand topics make half a million samples, and seconds of work. So a collector of many may
yield a metric in parts, and in any order; the text is put together of them, and between two parts
the loop serves others.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import platform
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator
from itertools import accumulate, chain
from typing import Any, Final, TypeVar

import prometheus_client
from prometheus_client import exposition
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector, CollectorRegistry

from tidemill.common.histogram import Histogram
from tidemill.common.lifecycle import cannot_listen
from tidemill.common.readiness import ProcessReadiness
from tidemill.common.slices import run_slices
from tidemill.common.version import commit, version

LABEL_SETS_MAX: Final = 50_000  # of one metric; beyond it a topic is counted as the one below
OVERFLOW: Final = "__overflow__"
SAMPLES_A_PART: Final = 64  # made, and written as text, in about a millisecond
_END_OF_OPENMETRICS = b"# EOF\n"
_REQUEST_BYTES_MAX = 16_384  # of a request's head; scrapers send a few hundred
_REQUEST_TIMEOUT_S = 10.0  # for a request's head to arrive, so that idle connections end
_WRITE_TIMEOUT_S = 60.0  # for the whole answer to be read; scrapers give up after ten seconds
_METHODS = "GET, HEAD"

Labels = tuple[str, ...]
Label = TypeVar("Label")


def histogram_family(
    name: str,
    documentation: str,
    label_names: Labels,
    histogram: Histogram[Label],
    labels_of: Callable[[Label], Labels | None],
    *,
    divisor: int = 1,
) -> HistogramMetricFamily:
    """Return a histogram as a metric, its values divided by `divisor`.

    `labels_of` names the labels of one of its own; None leaves it out.
    """
    family = HistogramMetricFamily(name, documentation, labels=label_names)
    add = _adder(family, histogram, labels_of, divisor)
    for label in histogram.labels:
        add(label)
    return family


def histogram_parts(
    name: str,
    documentation: str,
    label_names: Labels,
    histogram: Histogram[Label],
    labels_of: Callable[[Label], Labels | None],
    *,
    divisor: int = 1,
) -> Iterator[Metric]:
    """Yield what `histogram_family` returns in parts, for one with many labels."""
    family = HistogramMetricFamily(name, documentation, labels=label_names)
    add = _adder(family, histogram, labels_of, divisor)
    for label in histogram.labels:
        add(label)
        yield from full_parts(family)
    yield family


def _adder(
    family: HistogramMetricFamily,
    histogram: Histogram[Label],
    labels_of: Callable[[Label], Labels | None],
    divisor: int,
) -> Callable[[Label], None]:
    bounds = [*(str(bound / divisor) for bound in histogram.bounds), "+Inf"]

    def add(label: Label) -> None:
        labels = labels_of(label)
        if labels is not None and label in histogram:
            counts, total = histogram.buckets(label)
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric(labels, buckets=buckets, sum_value=total / divisor)

    return add


def full_parts(*families: Metric) -> Iterator[Metric]:
    """Yield what has gathered in `families`, and empty them, when it is enough for a part.

    For a collector of many samples: after each item that it has added.
    """
    if sum(len(family.samples) for family in families) < SAMPLES_A_PART:
        return
    for family in families:
        part = copy.copy(family)
        family.samples = []
        yield part


class Registry:
    """The metrics of this process, every sample with the process's common labels."""

    def __init__(self, *, cluster: str, node_type: str, node_id: str, **extra: str) -> None:
        self.common: Final = {
            "cluster": cluster,
            "node_type": node_type,
            "node_id": node_id,
            **extra,
        }
        self._collectors = CollectorRegistry(auto_describe=False)
        self._overflows: dict[str, int] = {}
        # Names appear exactly as declared; creation times would add a series to each.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # theirs
        prometheus_client.ProcessCollector(registry=self._collectors)
        prometheus_client.GCCollector(registry=self._collectors)
        self._collectors.register(_FunctionCollector(self._collect_own))

    def register(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Ask `collect` for its metrics at every scrape."""
        self._collectors.register(_FunctionCollector(collect))

    def bounded(self, metric: str, label_names: Labels, limit: int = LABEL_SETS_MAX) -> LabelSets:
        """Return the guard of one metric's label sets."""
        self._overflows.setdefault(metric, 0)
        return LabelSets(metric, label_names, limit, self._overflows)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with the common labels on each sample."""
        for metric in self._collectors.collect():
            metric.samples = [
                sample._replace(labels={**self.common, **sample.labels})
                for sample in metric.samples
            ]
            yield metric

    def text(self, encode: Callable[[Any], bytes]) -> Generator[None, None, list[bytes]]:
        """Return all metrics as `encode` writes them, made in slices: of some samples each."""
        texts: dict[str, list[bytes]] = {}
        for metric in self.collect():
            part, samples = copy.copy(metric), metric.samples
            for first in range(0, len(samples) or 1, SAMPLES_A_PART):
                part.samples = samples[first : first + SAMPLES_A_PART]
                of_part = _FunctionCollector(functools.partial(list, [part]))
                written = encode(of_part).removesuffix(_END_OF_OPENMETRICS)
                known = texts.setdefault(metric.name, [])
                known.append(_without_head(written) if known else written)
                yield
        end = [_END_OF_OPENMETRICS] if encode(_FunctionCollector(list)) else []
        return [*chain.from_iterable(texts.values()), *end]

    def _collect_own(self) -> Iterator[Metric]:
        build = GaugeMetricFamily(
            "rocketmq_build_info", "What runs here.", labels=("version", "commit", "python")
        )
        build.add_metric((version(), commit(), platform.python_version()), 1)
        yield build
        overflow = CounterMetricFamily(
            "rocketmq_metrics_overflow_total",
            "Label sets folded into the overflow topic, by metric.",
            labels=("metric",),
        )
        for metric, count in self._overflows.items():
            overflow.add_metric((metric,), count)
        yield overflow


class LabelSets:
    """Which label sets one metric has; at most `limit`, so that topics cannot exhaust memory."""

    def __init__(
        self, metric: str, label_names: Labels, limit: int, overflows: dict[str, int]
    ) -> None:
        self._metric = metric
        self._topic_at = label_names.index("topic") if "topic" in label_names else 0
        self._limit = limit
        self._overflows = overflows
        self._known: set[Labels] = set()

    def admit(self, labels: Labels) -> Labels:
        """Return `labels`, or, when the metric is full and does not know them, the overflow set."""
        if labels in self._known:
            return labels
        if len(self._known) < self._limit:
            self._known.add(labels)
            return labels
        self._overflows[self._metric] = self._overflows.get(self._metric, 0) + 1
        at = self._topic_at
        return (*labels[:at], OVERFLOW, *labels[at + 1 :])

    def forget(self, labels: Labels) -> None:
        """Make room: the resource is gone."""
        self._known.discard(labels)


def _without_head(text: bytes) -> bytes:
    """Return the samples of a metric without the lines in front that say what it is."""
    while text.startswith(b"# "):
        text = text.partition(b"\n")[2]
    return text


class _FunctionCollector(Collector):
    """A function as a collector."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


class MetricsServer:
    """The small HTTP server of `/metrics`, `/livez` and `/readyz`.

    What is too expensive to compute all the time `before_scrape` brings up to date, one by one.
    """

    def __init__(
        self,
        registry: Registry,
        readiness: ProcessReadiness,
        *before_scrape: Callable[[], Awaitable[None]],
    ) -> None:
        self._registry = registry
        self._readiness = readiness
        registry.register(readiness.collect)
        self._before_scrape = before_scrape
        self._connections: set[asyncio.StreamWriter] = set()
        self.address = ""

    @property
    def url(self) -> str:
        """Where the metrics are."""
        return f"http://{self.address}/metrics"

    @contextlib.asynccontextmanager
    async def serving(self, host: str, port: int) -> AsyncIterator[MetricsServer]:
        """Serve until the block ends; port 0 picks a free one, then told by `address`.

        Raises StartError when the port is taken.
        """
        try:
            server = await asyncio.start_server(
                self._connected, host, port, limit=_REQUEST_BYTES_MAX
            )
        except OSError as error:
            settings = "metrics_host", "metrics_port"
            raise cannot_listen(host, port, settings=settings, error=error) from error
        bound = server.sockets[0].getsockname()
        self.address = f"{host}:{bound[1]}"
        try:
            yield self
        finally:
            server.close()
            for writer in list(self._connections):
                writer.transport.abort()
            await server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        # A scraper that breaks off, or sends what is not HTTP, is no event of ours.
        with contextlib.suppress(
            TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError
        ):
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            pieces = await self._answer(head.decode("latin-1"))
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                writer.close()
                await writer.wait_closed()
        self._connections.discard(writer)
        # At once: who has not read by now is not waited for.
        writer.transport.abort()

    async def _answer(self, head: str) -> list[bytes]:
        request, *lines = head.split("\r\n")
        method, _, rest = request.partition(" ")
        path = rest.split(" ")[0].partition("?")[0]
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        if method not in _METHODS.split(", "):
            return _response(405, "text/plain", b"only GET\n", more_head=f"Allow: {_METHODS}\r\n")
        answer = await self._answer_get(path, headers)
        return answer[:1] if method == "HEAD" else answer

    async def _answer_get(self, path: str, headers: dict[str, str]) -> list[bytes]:
        match path:
            case "/metrics":
                encode, content_type = exposition.choose_encoder(headers.get("accept", ""))
                return _response(200, content_type, *await self._scrape(encode))
            case "/livez":
                return _response(200, "text/plain", b"ok\n")
            case "/readyz":
                is_ready, reasons = self._readiness.report()
                text = "\n".join([*reasons, ""])
                return _response(200 if is_ready else 503, "text/plain", text.encode())
            case _:
                return _response(404, "text/plain", b"see /metrics, /livez and /readyz\n")

    async def _scrape(self, encode: Callable[[Any], bytes]) -> list[bytes]:
        for bring_up_to_date in self._before_scrape:
            await bring_up_to_date()
        return await run_slices(self._registry.text(encode))


_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


def _response(status: int, content_type: str, *body: bytes, more_head: str = "") -> list[bytes]:
    """Return the head, and then the pieces of the body."""
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {sum(map(len, body))}\r\n{more_head}Connection: close\r\n\r\n"
    )
    return [head.encode(), *body]
