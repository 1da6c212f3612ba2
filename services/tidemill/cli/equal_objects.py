"""`create` and `set` of objects: compare the given settings with the present ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from shlex import quote
from typing import Final

import typer

from tidemill.cli.rest import call, say, segment
from tidemill.common.exit_codes import EXIT_REFUSED
from tidemill.common.prompts import fail
from tidemill.common.rest_client import Json

CREATE_ONLY: Final = frozenset({"--dry-run", "--like"})  # options of `create`, not of `set`
FORCE: Final = "force"  # a field of requests, not of objects
# Topic types with message groups: another number of queues would break their order.
ORDERED_TYPES: Final = frozenset({"FIFO", "MIXED"})


def say_exists(
    context: typer.Context, noun: str, name: str, known: Json, given: Mapping[str, Json]
) -> None:
    """Say that an object exists. Ends the command if a given setting differs."""
    if different := [setting for setting, _, _ in _differences(known, given)]:
        if fixed := _fixed_setting(noun, known, given):
            remedy = (
                f"{fixed} of a {noun} cannot change in this way: delete the {noun} by `tidemill"
                f" {noun} delete {quote(name)}` and create it again"
            )
        else:
            options = "".join(f" {option}" for option in _typed_options(context))
            remedy = f"change it by `tidemill {noun} set {quote(name)}{options}`"
        fail(f"{noun} {name} exists with another {', '.join(different)}; {remedy}", EXIT_REFUSED)
    say(context, known | {"isNew": False}, f"{noun} {name}: exists already, unchanged")


def _fixed_setting(noun: str, known: Json, given: Mapping[str, Json]) -> str:
    """Return the setting that `set` rejects for this object; "" if there is none."""
    if noun == "group":
        order = known["deliveryOrder"]
        return "deliveryOrder" if given.get("deliveryOrder", order) != order else ""
    queues = given.get("queues", known["queues"])
    has_order = bool(ORDERED_TYPES & {known["messageType"], given.get("messageType")})
    is_fixed = queues < known["queues"] or (queues > known["queues"] and has_order)
    return "queues" if is_fixed else ""


def _typed_options(context: typer.Context) -> Iterator[str]:
    """Yield the options of a `create` as its `set` takes them."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        is_option = parameter.param_type_name == "option" and parameter.opts[0] not in CREATE_ONLY
        if not is_option or source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[parameter.name or ""]
        for each in value if isinstance(value, list | tuple) else [value]:
            yield f"{parameter.opts[0]} {quote(str(each))}"


def put(
    context: typer.Context,
    noun: str,
    name: str,
    given: dict[str, Json],
    *,
    is_dry: bool,
    is_new_only: bool = False,
) -> Json | None:
    """Create or change an object and return it; None after a dry run, which is printed.

    With `is_new_only`, an object that somebody else has created meanwhile is refused.
    """
    done = call(
        context,
        "PUT",
        f"/{noun}s/{segment(name)}",
        body=given,
        query={"dryRun": "true"} if is_dry else None,
        headers={"If-None-Match": "*"} if is_new_only else None,
    )
    if not is_dry:
        return done
    _say_plan(context, noun, name, done, given)
    return None


def _say_plan(
    context: typer.Context, noun: str, name: str, planned: Json, given: Mapping[str, Json]
) -> None:
    """Print the answer to the dry run of a change with the given settings."""
    is_new, before = planned["isNew"], planned.get("before")
    # Without a previous state, an object is new or stays as it is.
    known = {} if is_new else planned if before is None else before
    after = {setting: planned.get(setting) for setting in given if setting != FORCE}
    changes = [
        f"{setting} {_text(new)}" if is_new else f"{setting} {_text(old)} -> {_text(new)}"
        for setting, old, new in _differences(known, after)
    ]
    verb = "created" if is_new else "unchanged" if before is None else "changed"
    detail = f": {', '.join(changes)}" if changes else ""
    say(context, {"dryRun": True, **planned}, f"{noun} {name} would be {verb}{detail}")


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
