"""`create` and `set` of objects: compare the given settings with the present ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import typer

from tidemill.cli.rest import say
from tidemill.common.exit_codes import EXIT_REFUSED
from tidemill.common.prompts import fail
from tidemill.common.rest_client import Json


def say_exists(
    context: typer.Context, noun: str, name: str, known: Json, given: Mapping[str, Json]
) -> None:
    """Say that an object exists. Ends the command if a given setting differs."""
    if different := [setting for setting, _, _ in _differences(known, given)]:
        fail(
            f"{noun} {name} exists with another {', '.join(different)}; change it by `tidemill"
            f" {noun} set {name}`",
            EXIT_REFUSED,
        )
    say(context, known | {"isNew": False}, f"{noun} {name}: exists already, unchanged")


def say_plan(
    context: typer.Context, noun: str, name: str, known: Json, given: Mapping[str, Json]
) -> None:
    """Print the result of a dry run. `known` is None if the object is missing."""
    changes = [
        f"{setting} {_text(new)}" if known is None else f"{setting} {_text(old)} -> {_text(new)}"
        for setting, old, new in _differences(known or {}, given)
    ]
    answer = {"dryRun": True, "isNew": known is None, "given": given}
    verb = "created" if known is None else "changed" if changes else "unchanged"
    detail = f": {', '.join(changes)}" if changes else ""
    say(context, answer, f"{noun} {name} would be {verb}{detail}")


def _differences(known: Json, given: Mapping[str, Json]) -> Iterator[tuple[str, Json, Json]]:
    """Yield each given setting that differs, with both values. A missing one is its default."""
    for key, value in given.items():
        present = known.get(key)
        if isinstance(value, dict):
            for nested, old, new in _differences(present or {}, value):
                yield f"{key}.{nested}", old, new
        elif value != present:
            yield key, present, value


def _text(value: Json) -> str:
    return "default" if value is None else value if isinstance(value, str) else json.dumps(value)
