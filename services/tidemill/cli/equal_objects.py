"""`create` of an object that exists: an equal one is a success, another one is not."""

from __future__ import annotations

from collections.abc import Mapping

import typer

from tidemill.cli.rest import say
from tidemill.common.exit_codes import EXIT_REFUSED
from tidemill.common.prompts import fail
from tidemill.common.rest_client import Json


def say_exists(
    context: typer.Context, noun: str, name: str, known: Json, given: Mapping[str, Json]
) -> None:
    """Say that an object exists. Ends the command if a given setting differs."""
    if different := list(_differences(known, given)):
        fail(
            f"{noun} {name} exists with another {', '.join(different)}; change it by `tidemill"
            f" {noun} set {name}`",
            EXIT_REFUSED,
        )
    say(context, known | {"isNew": False}, f"{noun} {name}: exists already, unchanged")


def _differences(known: Json, given: Mapping[str, Json]) -> list[str]:
    """Return the given settings that differ. A missing setting is null: its default."""
    found = []
    for key, value in given.items():
        other = known.get(key)
        if isinstance(value, dict):
            nested = _differences(other or {}, value)
            found += [f"{key}.{each}" for each in nested]
        elif value != other:
            found.append(key)
    return found
