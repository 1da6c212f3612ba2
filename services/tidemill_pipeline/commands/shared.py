"""Options that several commands share, and the way to run a job."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from tidemill.common.exit_codes import EXIT_REFUSED, EXIT_UNREACHABLE, EXIT_USAGE
from tidemill.common.prompts import fail
from tidemill_pipeline import errors
from tidemill_pipeline.signals import raise_on_sigterm

EXIT_FOUND = 2  # an audit found an error
EXIT_DAMAGED = 1  # the same as in `tidemill store`
EXIT_INTERRUPTED = 130  # Ctrl-C, as shells report it
EXIT_TERMINATED = 143  # SIGTERM, as shells report it

R = TypeVar("R")


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Use the options of a file as defaults: `to: ./archive`, `topic: [orders]`."""
    if path is None:
        return None
    import yaml

    try:
        found = yaml.safe_load(path.read_text("utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{path} does not contain `option: value` lines")
    # Keys are the names of the command line.
    named = {
        word.removeprefix("--"): parameter
        for parameter in context.command.params
        for word in parameter.opts
        if word.startswith("--")
    }
    given = {}
    for name, value in found.items():
        parameter = named.get(str(name).replace("_", "-"))
        if parameter is None:
            near = errors.suggestion(str(name).replace("_", "-"), named)
            raise typer.BadParameter(f"{path}: this command has no option {name}{near}")
        is_alone = getattr(parameter, "multiple", False) and not isinstance(value, list)
        given[parameter.name] = [value] if is_alone else value
    context.default_map = given
    return path


Config = Annotated[
    Path | None,
    typer.Option(callback=_read_config, is_eager=True, help="YAML with options of this command."),
]
Endpoints = Annotated[
    str, typer.Option(envvar="TIDEMILL_ENDPOINTS", help="Proxies, `host:port[,host:port]`.")
]
To = Annotated[str, typer.Option("--to", help="Folder, or s3a://bucket/path.")]
TopicNames = Annotated[
    list[str] | None,
    typer.Option(
        "--topic",
        "-t",
        help="Topic; may be repeated. `*` in a name is any text: '%DLQ%*' are all dead letters."
        " Default: all topics except dead letters.",
    ),
]
Pattern = Annotated[
    str, typer.Option("--topic-pattern", help="Regular expression of whole topic names.")
]
Master = Annotated[
    str | None, typer.Option(help="Master of Spark. Default: that of spark-submit, else local[*].")
]
OptionPairs = Annotated[
    list[str] | None,
    typer.Option("--option", "-O", help="Option of the source, such as `tls.enabled=true`."),
]

MetricsFile = Annotated[
    str, typer.Option(help="File to write metrics to, for a textfile collector.")
]
ClusterName = Annotated[
    str, typer.Option(envvar="TIDEMILL_CLUSTER", help="Label `cluster` of the metrics.")
]

Gate = Annotated[
    str,
    typer.Option(
        metavar="GROUP", help="The archive_gate_group of brokers that keep unsealed messages."
    ),
]

StoreIsGone = Annotated[
    bool,
    typer.Option(
        "--store-is-gone", help="The store of a broker group was replaced or deleted for good."
    ),
]

ENDPOINTS = "127.0.0.1:8081"
EVERY_TOPIC = ".*"
CLUSTER = "tidemill"  # the default of all processes


def given_options(
    endpoints: str, topics: list[str] | None, pattern: str, more: list[str] | None, **own: str
) -> dict[str, str]:
    """Return options of the source."""
    given = {"endpoints": endpoints, **{name: value for name, value in own.items() if value}}
    if topics:
        given["topics"] = ",".join(topics)
    elif pattern:
        given["topicPattern"] = pattern
    return given | option_pairs(more)


def option_pairs(more: list[str] | None) -> dict[str, str]:
    """Return the values of `--option` by name."""
    from tidemill_pipeline.option_table import spelt

    given = {}
    for pair in more or ():
        name, found, value = pair.partition("=")
        if not found:
            fail(f"--option {pair} is not name=value", EXIT_USAGE)
        given[spelt(name)] = value
    return given


def run_job(module: str, work: Callable[[Any], R], *, goes_on: bool = False) -> R:
    """Run a job of a module. After an error, print it and exit.

    `goes_on`: the next run continues where this one ended.
    """
    # PySpark forks to start Java, and fork handlers of gRPC sometimes break that.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    try:
        with raise_on_sigterm():
            _check_spark()
            return work(importlib.import_module(module))
    except KeyboardInterrupt as ended:
        by, status = (
            ("SIGTERM", EXIT_TERMINATED)
            if isinstance(ended, errors.Termination)
            else ("Ctrl-C", EXIT_INTERRUPTED)
        )
        again = ", and it goes on where it was" if goes_on else ""
        line = "\n" if sys.stderr.isatty() else ""  # keeps the line of progress
        _end(f"ended by {by}: start it again{again}", status, before=line)
    except Exception as error:  # Spark wraps the exception of a task.
        told = errors.error_summary(error)
        if told is not None:
            statuses = {
                errors.NoAnswer.__name__: EXIT_UNREACHABLE,
                errors.BadOption.__name__: EXIT_USAGE,
            }
            fail(told[1], statuses.get(told[0], EXIT_REFUSED))
        if isinstance(error, OSError):  # an error of a folder or file
            fail(str(error), EXIT_REFUSED)
        raise


def _check_spark() -> None:
    try:
        importlib.import_module("tidemill_pipeline.session").check_spark()
    except ModuleNotFoundError as error:
        fail(f"{error}: pip install tidemill-pipeline", EXIT_REFUSED)
    except errors.PipelineError as error:
        fail(str(error), EXIT_REFUSED)


def _end(told: str, status: int, *, before: str) -> NoReturn:
    """Exit without the shutdown of the interpreter, which can hang in grpcio."""
    typer.echo(f"{before}error: {told}", err=True)
    sys.stdout.flush()
    os._exit(status)


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table with columns of the least width."""
    lines = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())
    typer.echo("")
