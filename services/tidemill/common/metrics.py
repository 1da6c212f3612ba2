"""The metrics of every process: the HTTP endpoint, common collectors, the limit of label sets.

    GET /metrics   Prometheus text, or OpenMetrics if the scraper asks for it
    GET /livez     200 while the event loop runs
    GET /readyz    200 while the process is ready, else 503; the body gives the reason and the
                   state of each broker

The endpoint runs in the event loop of the process, so a hanging scrape shows a hanging process. Hot
paths count in plain dictionaries. Collectors turn the counts into samples at a scrape.

Twenty thousand topics make half a million samples, which take seconds. Therefore a collector may
yield a metric in several parts, in any order. The server joins the text of the parts and runs other
tasks between them.
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

LABEL_SETS_MAX: Final = 50_000  # per metric; further topics are counted under OVERFLOW
OVERFLOW: Final = "__overflow__"
SAMPLES_PER_PART: Final = 64  # takes about a millisecond to create and to encode
_END_OF_OPENMETRICS = b"# EOF\n"
_REQUEST_BYTES_MAX = 16_384  # of a request head; scrapers send a few hundred
_REQUEST_TIMEOUT_S = 10.0  # to receive a request head; it ends idle connections
_WRITE_TIMEOUT_S = 60.0  # to write the whole response; scrapers give up after ten seconds
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
    """Return a histogram as a metric, with its values divided by `divisor`.

    `labels_of` returns the label values for a label of the histogram; None omits the label.
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
    """Yield the metric of `histogram_family` in parts, for a histogram with many labels."""
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
    """Yield the samples of `families` and clear them, if there are enough for a part.

    A collector of many samples calls it after each item that it adds.
    """
    if sum(len(family.samples) for family in families) < SAMPLES_PER_PART:
        return
    for family in families:
        part = copy.copy(family)
        family.samples = []
        yield part


class Registry:
    """The metrics of this process; every sample has the common labels of the process."""

    def __init__(self, *, cluster: str, node_type: str, node_id: str, **extra: str) -> None:
        self.common: Final = {
            "cluster": cluster,
            "node_type": node_type,
            "node_id": node_id,
            **extra,
        }
        self._collectors = CollectorRegistry(auto_describe=False)
        self._overflows: dict[str, int] = {}
        # Metric names stay as declared. Creation times would add a series to each metric.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # theirs
        prometheus_client.ProcessCollector(registry=self._collectors)
        prometheus_client.GCCollector(registry=self._collectors)
        self._collectors.register(_FunctionCollector(self._collect_own))

    def register(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Call `collect` for its metrics at every scrape."""
        self._collectors.register(_FunctionCollector(collect))

    def label_sets(
        self, metric: str, label_names: Labels, limit: int = LABEL_SETS_MAX
    ) -> LabelSets:
        """Return the label sets of one metric, limited in number."""
        self._overflows.setdefault(metric, 0)
        return LabelSets(metric, label_names, limit, self._overflows)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, with the common labels on each sample."""
        for metric in self._collectors.collect():
            metric.samples = [
                sample._replace(labels={**self.common, **sample.labels})
                for sample in metric.samples
            ]
            yield metric

    def text(self, encode: Callable[[Any], bytes]) -> Generator[None, None, list[bytes]]:
        """Return all metrics as text of `encode`; each slice of the work encodes some samples."""
        texts: dict[str, list[bytes]] = {}
        for metric in self.collect():
            part, samples = copy.copy(metric), metric.samples
            for first in range(0, len(samples) or 1, SAMPLES_PER_PART):
                part.samples = samples[first : first + SAMPLES_PER_PART]
                collector = _FunctionCollector(functools.partial(list, [part]))
                encoded = encode(collector).removesuffix(_END_OF_OPENMETRICS)
                parts = texts.setdefault(metric.name, [])
                parts.append(_without_head(encoded) if parts else encoded)
                yield
        end = [_END_OF_OPENMETRICS] if encode(_FunctionCollector(list)) else []
        return [*chain.from_iterable(texts.values()), *end]

    def _collect_own(self) -> Iterator[Metric]:
        build = GaugeMetricFamily(
            "rocketmq_build_info",
            "Version and commit of this process.",
            labels=("version", "commit", "python"),
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
    """The label sets of one metric; at most `limit`, so that topics cannot exhaust memory."""

    def __init__(
        self, metric: str, label_names: Labels, limit: int, overflows: dict[str, int]
    ) -> None:
        self._metric = metric
        self._topic_at = label_names.index("topic") if "topic" in label_names else 0
        self._limit = limit
        self._overflows = overflows
        self._known: set[Labels] = set()

    def admit(self, labels: Labels) -> Labels:
        """Return `labels`; if the metric is full and they are new, return the overflow set."""
        if labels in self._known:
            return labels
        if len(self._known) < self._limit:
            self._known.add(labels)
            return labels
        self._overflows[self._metric] = self._overflows.get(self._metric, 0) + 1
        at = self._topic_at
        return (*labels[:at], OVERFLOW, *labels[at + 1 :])

    def forget(self, labels: Labels) -> None:
        """Remove the label set of a deleted resource."""
        self._known.discard(labels)


def _without_head(text: bytes) -> bytes:
    """Return the samples of a metric without the HELP and TYPE lines."""
    while text.startswith(b"# "):
        text = text.partition(b"\n")[2]
    return text


class _FunctionCollector(Collector):
    """A collector that calls a function."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


class MetricsServer:
    """The small HTTP server of `/metrics`, `/livez` and `/readyz`.

    The `before_scrape` functions update values that are too expensive to keep current at all times.
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
        """The address of the metrics."""
        return f"http://{self.address}/metrics"

    @contextlib.asynccontextmanager
    async def serving(self, host: str, port: int) -> AsyncIterator[MetricsServer]:
        """Serve until the block ends; port 0 picks a free port, see `address`.

        Raises StartError if the port is in use.
        """
        try:
            server = await asyncio.start_server(
                self._serve_connection, host, port, limit=_REQUEST_BYTES_MAX
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

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._connections.add(writer)
        # A scraper that disconnects, or a client that does not send HTTP, is not an error here.
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
        # Do not wait for a client that has not read the response by now.
        writer.transport.abort()

    async def _answer(self, head: str) -> list[bytes]:
        request, *lines = head.split("\r\n")
        method, _, target = request.partition(" ")
        path = target.split(" ")[0].partition("?")[0]
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        if method not in _METHODS.split(", "):
            return _response(
                405,
                "text/plain",
                b"only GET and HEAD are supported\n",
                more_head=f"Allow: {_METHODS}\r\n",
            )
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
        for update in self._before_scrape:
            await update()
        return await run_slices(self._registry.text(encode))


_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


def _response(status: int, content_type: str, *body: bytes, more_head: str = "") -> list[bytes]:
    """Return the response as a list: the head, then the parts of the body."""
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {sum(map(len, body))}\r\n{more_head}Connection: close\r\n\r\n"
    )
    return [head.encode(), *body]
