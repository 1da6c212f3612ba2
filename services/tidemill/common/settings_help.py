"""`--help` of a process, in the form of the other commands.

The help is made from the settings model, so it lists every setting once. Settings of one subject
stand in one panel (`ProcessSettings.panels`). Settings that only a supervisor sets are hidden.
"""

from __future__ import annotations

import inspect
from enum import Enum
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic_settings import CLI_SUPPRESS

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from tidemill.common.settings import ProcessSettings

SOURCES = (
    "Each setting is also an environment variable (`TIDEMILL_GRPC_PORT`) and a key of the YAML file"
    " of `--config` (`grpc_port`). Flags override the environment, the environment overrides the"
    " file."
)


def print_help(settings: type[ProcessSettings]) -> None:
    """Print the help of a process and exit with 0."""

    def process() -> None:
        """Only its signature is used."""

    options = [
        _option(settings, name, field)
        for name, field in settings.model_fields.items()
        if CLI_SUPPRESS not in field.metadata
    ]
    process.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]  # typer reads it
    process.__annotations__ = {option.name: option.annotation for option in options}
    app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    app.command(settings.command, help=inspect.getdoc(settings), epilog=SOURCES)(process)
    app(["--help"], prog_name=f"tidemill {settings.command}")


def panel_of(settings: type[ProcessSettings], name: str) -> str:
    """Return the panel of a setting: the longest matching prefix, in the class that declares it."""
    for declaring in reversed(settings.__mro__):
        if name in inspect.get_annotations(declaring):
            panels: dict[str, str] = vars(declaring).get("panels", {})
            return panels[max(filter(name.startswith, panels), key=len)]
    raise AssertionError(f"{name} is not a setting of {settings.command}")


def _option(settings: type[ProcessSettings], name: str, field: FieldInfo) -> inspect.Parameter:
    flag = f"--{name.replace('_', '-')}"
    kind = _type_of(field.annotation)
    default = _default_of(kind, field.get_default(call_default_factory=True))
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if default is True else flag,
        help=field.description,
        rich_help_panel=panel_of(settings, name),
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _default_of(kind: Any, value: Any) -> Any:
    """Return a default as the help shows it; None is not shown."""
    value = getattr(value, "value", value)  # a member of an enum
    if value in (None, "", [], ()):
        return None
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return kind(str(value) if kind is str else value)


def _type_of(annotation: Any) -> Any:
    """Return a type that the help can show: a plain type or an enum of the choices."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_of(arguments[0])
    if origin is Literal:
        return Enum("choice", {each: each for each in arguments if each})
    if origin in (Union, UnionType):
        return _type_of(next(each for each in arguments if each is not type(None)))
    if annotation in (bool, int, float):
        return annotation
    is_choice = isinstance(annotation, type) and issubclass(annotation, Enum)
    return annotation if is_choice else str
