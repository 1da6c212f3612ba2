"""`tidemill definitions ...`."""

from __future__ import annotations

import json
import secrets
import sys
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from tidemill.cli.operations import await_end, result_of
from tidemill.cli.output import Output, OutputFormat
from tidemill.cli.rest import call, check_is_sure, output_of, say, show, show_table
from tidemill.common.exit_codes import EXIT_PARTIAL, EXIT_USAGE
from tidemill.common.prompts import confirm, fail
from tidemill.common.rest_client import Json

app = typer.Typer(
    no_args_is_help=True,
    help="Export, apply and convert definitions: roles, users, topics, consumer groups and quotas"
    " in one file, to compare clusters, to keep them in a repository, and to move from RabbitMQ or"
    " RocketMQ.",
)

STDIN: Final = Path("-")
COLUMNS: Final = ("ACTION", "KIND", "NAME", "CHANGE")


class SourceName(StrEnum):
    """The brokers whose files are converted."""

    RABBITMQ = "rabbitmq"
    ROCKETMQ = "rocketmq"


@app.command("export")
def export_definitions(context: typer.Context) -> None:
    """Print the definitions that you may get as YAML, or as JSON with `-o json`.

    The file has no secrets, and no positions of consumer groups.

    Examples:
    * `tidemill definitions export > cluster.yaml`
    * `tidemill definitions export -o json | jq .topics`
    """
    _print_file(context, call(context, "GET", "/definitions"))


@app.command("apply")
def apply_definitions(
    context: typer.Context,
    file: Annotated[
        Path, typer.Argument(help="File with definitions, YAML or JSON; - is standard input.")
    ],
    prune: Annotated[
        bool, typer.Option("--prune", help="Delete objects of the listed kinds that it lacks.")
    ] = False,
    is_dry: Annotated[
        bool, typer.Option("--dry-run", help="Show the changes and make none.")
    ] = False,
    is_sure: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Make the cluster as a file defines it, and wait for the end.

    A missing field of an object does not change, and neither does a kind that the file lacks. One
    refused change refuses the file. Exit with 5 if a change failed afterwards.

    Examples:
    * `tidemill definitions apply cluster.yaml --dry-run`
    * `tidemill definitions apply cluster.yaml --prune --yes`
    """
    definitions = _read(file)
    query = {"prune": str(prune).lower()}
    planned = call(
        context, "POST", "/definitions:apply", body=definitions, query={**query, "dryRun": "true"}
    )
    changes = planned["changes"]
    if not changes or is_dry:
        _show_changes(context, planned)
        return
    check_is_sure("definitions apply", is_sure=is_sure)
    if not is_sure:
        show_table(context, COLUMNS, [_row(change) for change in changes])
        confirm(f"Make these {len(changes)} changes?")
    begun = call(
        context,
        "POST",
        "/definitions:apply",
        body=definitions,
        query=query,
        headers={"Idempotency-Key": secrets.token_hex(16), "If-Match": planned["etag"]},
    )
    if "operation" not in begun:  # Another operator has made the changes meanwhile.
        _show_changes(context, begun)
        return
    ended = await_end(context, begun["operation"]["id"])
    lines = [result_of(ended)]
    lines += [f"{one['id']}: {one['outcome']}" for one in ended.get("errors", ())]
    lines += [f"{one['kind']} {one['name']}: {one['note']}" for one in changes if "note" in one]
    say(context, {**begun, "operation": ended}, "\n".join(lines))
    if ended["state"] != "DONE":
        raise typer.Exit(EXIT_PARTIAL)


@app.command("convert")
def convert_definitions(
    context: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(
            help="JSON of `rabbitmqctl export_definitions` or `mqadmin exportMetadata`; - is"
            " standard input."
        ),
    ],
    source: Annotated[
        SourceName, typer.Option("--from", case_sensitive=False, help="The broker that wrote it.")
    ],
) -> None:
    """Print definitions that were converted from another broker, and report on stderr.

    The report has a row for each object of the source. Nothing changes in the cluster.

    Examples:
    * `tidemill definitions convert rabbit.json --from rabbitmq > cluster.yaml`
    * `tidemill definitions convert metadata.json --from rocketmq | tidemill definitions apply -`
    """
    exported = _read(file)
    found = call(
        context, "POST", "/definitions:convert", body=exported, query={"from": source.value}
    )
    for one in found["report"]:
        target = f" -> {one['target']}" if one["target"] else ""
        reason = f": {one['reason']}" if one["reason"] else ""
        typer.echo(f"{one['outcome'].lower():9} {one['source']}{target}{reason}", err=True)
    counts = Counter(one["outcome"].lower() for one in found["report"])
    typer.echo(", ".join(f"{count} {outcome}" for outcome, count in counts.items()), err=True)
    _print_file(context, found["definitions"])


def _show_changes(context: typer.Context, planned: Json) -> None:
    if not planned["changes"]:
        say(context, planned, "nothing to change")
        return
    show(context, planned, COLUMNS, [_row(change) for change in planned["changes"]])


def _row(change: Json) -> tuple[str, str, str, str]:
    return change["action"].lower(), change["kind"], change["name"], _difference(change)


def _difference(change: Json) -> str:
    """Return the changed settings, or the loss of a deletion, in one line."""
    if "loss" in change:
        lost = (f"{name} {_short(value)}" for name, value in change["loss"].items())
        return f"loses {', '.join(lost)}"
    before, after = change.get("before") or {}, change.get("after") or {}
    if change["action"] != "CHANGE":
        return ""
    return ", ".join(
        f"{name} {_short(before.get(name))} -> {_short(value)}"
        for name, value in after.items()
        if before.get(name) != value
    )


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _read(file: Path) -> Json:
    """Return the content of a file, which is YAML or JSON. End the command if it is neither."""
    import yaml  # Most commands need no YAML.

    from tidemill.common.yaml_loader import load_yaml

    try:
        text = sys.stdin.read() if file == STDIN else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{file} cannot be read: {error}", EXIT_USAGE)
    try:
        found = load_yaml(text)
    except yaml.YAMLError as error:
        fail(f"{file} is neither YAML nor JSON: {error}", EXIT_USAGE)
    if not isinstance(found, dict):
        fail(f"{file} has no definitions; see `tidemill definitions export`", EXIT_USAGE)
    try:
        return json.loads(json.dumps(found, default=str))  # A date of YAML becomes its text.
    except TypeError as error:
        fail(f"{file} has a value that JSON does not have: {error}", EXIT_USAGE)


def _print_file(context: typer.Context, definitions: Json) -> None:
    """Print a file as YAML, or as another format of documents."""
    output = output_of(context)
    if output.is_text:
        output = Output(OutputFormat.YAML)
    output.show(definitions, ("KIND",), [(kind,) for kind in definitions])
