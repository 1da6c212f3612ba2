"""`tidemill process ...`."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from tidemill.cli.completion_names import complete_process
from tidemill.cli.numbers import UNKNOWN, certificate_end
from tidemill.cli.rest import call, say, segment, show, warn_unreachable
from tidemill.common.clock import SystemClock
from tidemill.common.prompts import warn
from tidemill.common.rest_client import Json
from tidemill.common.times import age, duration_ms, from_now, utc

app = typer.Typer(
    no_args_is_help=True,
    help="""Show what runs with which settings; change log levels; find slow calls.

* `tidemill process list`
* `tidemill process settings proxy-0 --changed`
* `tidemill process set-log-level proxy-0 debug --for 10m`
* `tidemill process slow-calls --topic orders`
""",
)

COLUMNS = ("PROCESS", "KIND", "READY", "VERSION", "STARTED", "LOG LEVEL", "CLOCK", "ADDRESS")
SETTING_COLUMNS = ("SETTING", "VALUE", "DEFAULT", "SOURCE")
CALL_COLUMNS = (
    *("AT", "TOOK", "QUEUE", "BROKER", "SYNC", "REPLICATE"),
    *("METHOD", "CODE", "TOPIC", "GROUP", "CLIENT", "PROCESS"),
)
PARTS = "queueMs", "brokerMs", "syncMs", "replicateMs"
SKEW_SHOWN_MS = 100  # smaller differences of clocks are not worth a number


class Level(StrEnum):
    """The log level of a process; `default` is that of its settings."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    DEFAULT = "default"


Name = Annotated[
    str,
    typer.Argument(
        help="Name of the process, as `list` shows it.", autocompletion=complete_process
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the effect and change nothing.")]


@app.command("list")
def list_processes(context: typer.Context) -> None:
    """List brokers with their replicas, controllers, proxies and the admin process.

    CLOCK is the difference to the clock of the admin process.

    Example: tidemill process list
    """
    listed = call(context, "GET", "/processes")
    show(context, listed, COLUMNS, [_row(process) for process in listed["items"]])
    warn_unreachable(listed)


@app.command("show")
def show_process(context: typer.Context, name: Name) -> None:
    """Show a process.

    Example: tidemill process show broker-0
    """
    found = call(context, "GET", f"/processes/{segment(name)}")
    level = found["logLevel"]
    if "logLevelUntilMs" in found:
        level = f"{level} until {utc(found['logLevelUntilMs'])}"
    rows = [
        ("name", found["name"]),
        ("kind", found["kind"]),
        ("address", found["address"]),
        ("ready", "yes" if found["ready"] else "no"),
        ("version", found["version"]),
        ("commit", found.get("commit")),
        ("feature level", found["featureLevel"]),
        ("process id", found["pid"]),
        ("started at", f"{utc(found['startedAtMs'])} ({_age(found)} ago)"),
        ("log level", level),
        ("clock", _skew(found)),
        ("certificates", _certificates(found)),
    ]
    show(context, found, ("NAME", "VALUE"), [row for row in rows if row[1] is not None])


@app.command("settings")
def list_settings(
    context: typer.Context,
    name: Name,
    is_changed: Annotated[
        bool, typer.Option("--changed", help="Only settings that are not at their default.")
    ] = False,
) -> None:
    """Show the settings in effect in a process, and where each value comes from.

    SOURCE is FLAG, ENVIRONMENT, FILE or DEFAULT. A standalone passes flags to its processes.

    Examples:
    * `tidemill process settings broker-0`
    * `tidemill process settings broker-0 --changed`
    """
    found = call(context, "GET", f"/processes/{segment(name)}/settings")
    rows = [
        (each["name"], _value(each["value"]), _value(each["default"]), each["source"])
        for each in found["items"]
        if not is_changed or each["value"] != each["default"]
    ]
    show(context, found, SETTING_COLUMNS, rows)


@app.command("set-log-level")
def set_log_level(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            help="Name of the process; '*': all processes.", autocompletion=complete_process
        ),
    ],
    level: Annotated[
        Level, typer.Argument(help="Lowest severity of log lines; default: of the settings.")
    ],
    duration: Annotated[
        str, typer.Option("--for", metavar="DURATION", help="Time of the change, at most 1d.")
    ] = "30m",
    is_dry: DryRun = False,
) -> None:
    """Change the log level of a process for some time, without a restart.

    Afterwards the process returns to the level of its settings.

    Examples:
    * `tidemill process set-log-level proxy-0 debug --for 10m`
    * `tidemill process set-log-level proxy-0 default`
    * `tidemill process set-log-level '*' warning --for 1d`
    """
    body: Json = {"forMs": duration_ms(duration)}
    if level is not Level.DEFAULT:
        body["level"] = level.value
    path = f"/processes/{segment(name)}/log-level"
    done = call(context, "PUT", path, body=body, query={"dryRun": "true"} if is_dry else {})
    verb = "would log" if is_dry else "logs"
    now_ms = SystemClock().wall_ms()
    sentences = []
    for each in done["items"]:
        until = each.get("untilMs")
        end = f" until {utc(until)} ({from_now(until, now_ms)})" if until else ""
        sentences.append(f"{each['process']} {verb} {each['level']} (was {each['before']}){end}")
    say(context, done, "\n".join(sentences))
    for missing in done.get("unreachable", []):
        warn(f"the log level is unchanged: {missing} did not answer")


@app.command("slow-calls")
def list_slow_calls(
    context: typer.Context,
    least: Annotated[
        str | None,
        typer.Option("--min", metavar="DURATION", help="Only calls that took at least this time."),
    ] = None,
    method: Annotated[
        str | None, typer.Option("--method", help="Only this method, such as send_message.")
    ] = None,
    topic: Annotated[str | None, typer.Option("--topic", help="Only for this topic.")] = None,
    client: Annotated[
        str | None, typer.Option("--client", help="Only of the client with this id.")
    ] = None,
) -> None:
    """Show the last slow calls of clients, the newest first.

    Each proxy keeps the last 1,000 calls that took at least its setting slow_call_ms. Receives and
    pulls wait for messages, so they are not slow calls.

    QUEUE, BROKER, SYNC and REPLICATE are the parts of the slowest request to a broker. `?` is
    unknown: the broker took less than 50 ms, or the call has several messages.

    Examples:
    * `tidemill process slow-calls`
    * `tidemill process slow-calls --min 2s --topic orders`
    """
    filters = {"method": method, "topic": topic, "client": client}
    query = {key: value for key, value in filters.items() if value is not None}
    if least is not None:
        query["minMs"] = str(duration_ms(least))
    found = call(context, "GET", "/slow-calls", query=query)
    rows = [
        (
            utc(each["atMs"]),
            f"{each['durationMs']} ms",
            *(_milliseconds(each.get("parts", {}).get(part)) for part in PARTS),
            each["method"],
            each["code"],
            each.get("topic"),
            each.get("group"),
            each.get("clientId"),
            each["process"],
        )
        for each in found["items"]
    ]
    show(context, found, CALL_COLUMNS, rows)
    warn_unreachable(found)


def _milliseconds(part_ms: int | None) -> str:
    return UNKNOWN if part_ms is None else f"{part_ms} ms"


def _row(process: Json) -> tuple[object, ...]:
    return (
        process["name"],
        process["kind"],
        "yes" if process["ready"] else "no",
        process["version"],
        f"{_age(process)} ago",
        process["logLevel"],
        _skew(process),
        process["address"],
    )


def _age(process: Json) -> str | None:
    return age(process["startedAtMs"], SystemClock().wall_ms())


def _certificates(process: Json) -> str:
    if "certificates" not in process:
        return f"{UNKNOWN} (the process has an older version)"
    now_ms = SystemClock().wall_ms()
    ends = [f"{each['use']} {certificate_end(each, now_ms)}" for each in process["certificates"]]
    return ", ".join(ends) or "none"


def _skew(process: Json) -> str:
    skew_ms = process["clockSkewMs"]
    return f"{skew_ms:+} ms" if abs(skew_ms) >= SKEW_SHOWN_MS else "equal"


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
