"""`tidemill bench ...`: a short measurement, on a topic of its own."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from tidemill.cli.release import channel_credentials
from tidemill.cli.rest import call, options_of, show
from tidemill.common.exit_codes import EXIT_INTERRUPTED, EXIT_PARTIAL, EXIT_REFUSED
from tidemill.common.prompts import warn
from tidemill.common.rest_client import Json
from tidemill.common.times import DURATION, duration_within_ms

if TYPE_CHECKING:
    from tidemill.cli.bench_run import BenchPlan, BenchResult

PREFIX: Final = "tidemill-bench-"

app = typer.Typer(
    no_args_is_help=True,
    help="""Measure sends, receives and delays through the proxies, on a topic of its own.

The command creates the topic `tidemill-bench-...`, and deletes it at the end, also after Ctrl-C.
The calls are signed by the user of the command line, which needs rights to topics and consumer
groups with this prefix. The load competes with that of other clients.

* `tidemill bench send --proxy 127.0.0.1:8081`
* `tidemill bench receive --rate 500 --for 30s`
* `tidemill bench delay --delay 5s`
""",
)

Proxy = Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of the proxies.")]
Duration = Annotated[
    str, typer.Option("--for", metavar=DURATION, help="Duration of the sends, 1s to 10m.")
]
Concurrency = Annotated[int, typer.Option(min=1, max=512, help="Calls in flight.")]
Size = Annotated[int, typer.Option(min=8, max=4 << 20, help="Bytes of a body.")]
Rate = Annotated[float, typer.Option(min=0.1, max=1e6, help="Messages per second.")]
HasTls = Annotated[bool, typer.Option("--tls", help="The proxies use TLS.")]
CaFile = Annotated[
    Path | None,
    typer.Option(
        help="Authorities (PEM) of the certificate of the proxies. Default: public authorities."
    ),
]


@app.command("send")
def bench_send(
    context: typer.Context,
    proxy: Proxy = "127.0.0.1:8081",
    duration: Duration = "10s",
    concurrency: Concurrency = 32,
    size: Size = 1024,
    rate: Annotated[
        float | None,
        typer.Option(min=0.1, max=1e6, help="Messages per second at most. Default: no limit."),
    ] = None,
    has_tls: HasTls = False,
    ca_file: CaFile = None,
) -> None:
    """Measure the time of a send, from the request to its answer.

    Example: tidemill bench send --for 30s --concurrency 64
    """
    plan = _plan(context, duration, concurrency, size, rate)
    _run(context, plan, proxy, has_tls=has_tls, ca_file=ca_file)


@app.command("receive")
def bench_receive(
    context: typer.Context,
    proxy: Proxy = "127.0.0.1:8081",
    duration: Duration = "10s",
    concurrency: Concurrency = 8,
    size: Size = 1024,
    rate: Rate = 200.0,
    has_tls: HasTls = False,
    ca_file: CaFile = None,
) -> None:
    """Measure the time from the send of a message until a waiting consumer receives it.

    Example: tidemill bench receive --rate 1000
    """
    plan = _plan(context, duration, concurrency, size, rate, has_receivers=True)
    _run(context, plan, proxy, has_tls=has_tls, ca_file=ca_file)


@app.command("delay")
def bench_delay(
    context: typer.Context,
    proxy: Proxy = "127.0.0.1:8081",
    duration: Duration = "10s",
    delay: Annotated[
        str, typer.Option(metavar=DURATION, help="Delay of each message, 1s to 10m.")
    ] = "5s",
    concurrency: Concurrency = 8,
    size: Size = 1024,
    rate: Rate = 200.0,
    has_tls: HasTls = False,
    ca_file: CaFile = None,
) -> None:
    """Measure how late delayed messages are received, and count those that come early.

    The clocks of this machine and of the brokers must agree.

    Example: tidemill bench delay --delay 10s --rate 1000
    """
    delay_ms = duration_within_ms("--delay", delay, least="1s", most="10m")
    plan = _plan(context, duration, concurrency, size, rate, has_receivers=True, delay_ms=delay_ms)
    _run(context, plan, proxy, has_tls=has_tls, ca_file=ca_file)


def _plan(
    context: typer.Context,
    duration: str,
    concurrency: int,
    size: int,
    rate: float | None,
    *,
    has_receivers: bool = False,
    delay_ms: int | None = None,
) -> BenchPlan:
    from tidemill.cli.bench_run import BenchPlan
    from tidemill.release.trial import ANYONE, TrialUser

    known = options_of(context).credentials
    return BenchPlan(
        name=f"{PREFIX}{secrets.token_hex(4)}",
        user=ANYONE if known is None or known.is_token else TrialUser(*known.pair),
        duration_s=duration_within_ms("--for", duration, least="1s", most="10m") / 1_000,
        concurrency=concurrency,
        body_bytes=size,
        rate=rate,
        delay_ms=delay_ms,
        has_receivers=has_receivers,
    )


def _run(
    context: typer.Context, plan: BenchPlan, proxy: str, *, has_tls: bool, ca_file: Path | None
) -> None:
    """Measure, delete the topic, and print the numbers, also after Ctrl-C."""
    from tidemill.cli.bench_run import BenchResult, measure

    credentials = channel_credentials(ca_file, None, None) if has_tls else None
    result, is_interrupted = BenchResult(), False
    with _own_topic(context, plan):
        try:
            asyncio.run(measure(plan, result, proxy, credentials))
        except KeyboardInterrupt:
            is_interrupted = True
    answer = _answer(plan, result)
    show(context, answer, ("NAME", "VALUE"), _rows(answer))
    if is_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if not result.latencies.count:
        raise typer.Exit(EXIT_REFUSED)
    if result.errors or result.early:
        raise typer.Exit(EXIT_PARTIAL)


@contextmanager
def _own_topic(context: typer.Context, plan: BenchPlan) -> Iterator[None]:
    """Create the topic and the consumer group, and delete them at the end."""
    kind = "NORMAL" if plan.delay_ms is None else "DELAY"
    call(context, "PUT", f"/topics/{plan.name}", body={"messageType": kind})
    try:
        if plan.has_receivers:
            call(context, "PUT", f"/groups/{plan.name}", body={})
        yield
    finally:
        try:
            if plan.has_receivers:
                call(context, "DELETE", f"/groups/{plan.name}", may_miss=True)
            call(context, "DELETE", f"/topics/{plan.name}", may_miss=True)
        except BaseException:
            warn(f"topic {plan.name} may still exist; run: tidemill topic delete {plan.name}")
            raise


def _answer(plan: BenchPlan, result: BenchResult) -> Json:
    latencies = result.latencies
    answer: Json = {
        "topic": plan.name,
        "messages": latencies.count,
        "perSecond": round(result.per_second(plan.delay_ms), 1),
        "p50Ms": _rounded(latencies.quantile(0.5)),
        "p99Ms": _rounded(latencies.quantile(0.99)),
        "maxMs": _rounded(latencies.max_ms) if latencies.count else None,
        "errors": dict(sorted(result.errors.items())),
    }
    if plan.delay_ms is not None:
        answer["early"] = result.early
    return answer


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _rows(answer: Json) -> list[tuple[str, object]]:
    errors = ", ".join(f"{count} {code}" for code, count in answer["errors"].items())
    rows: list[tuple[str, object]] = [
        ("messages", answer["messages"]),
        ("per second", answer["perSecond"]),
        ("P50", _ms(answer["p50Ms"])),
        ("P99", _ms(answer["p99Ms"])),
        ("maximum", _ms(answer["maxMs"])),
        ("errors", errors or "0"),
    ]
    if "early" in answer:
        rows.append(("early", answer["early"]))
    return rows


def _ms(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f} ms"
