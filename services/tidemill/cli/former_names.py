"""Names of v0.1.0, which commands keep until the next minor release.

A former name is not part of the help. It runs the present command, with a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from tidemill.common.prompts import warn

# The arguments after a former name -> the present name, with its arguments.
Rewrite = Callable[[Sequence[str]], list[str]]
WORDS: Final = 2  # of a name: noun and verb


def _renamed(name: str, *options: str, **renamed: str) -> Rewrite:
    """Return a rewrite to `name` with more options. `renamed` has options with other names."""

    def rewrite(arguments: Sequence[str]) -> list[str]:
        found = []
        for argument in arguments:
            option, equals, value = argument.partition("=")
            other = renamed.get(option.removeprefix("--")) if option.startswith("--") else None
            found.append(argument if other is None else f"--{other}{equals}{value}")
        return [*name.split(), *options, *found]

    return rewrite


def _drain(arguments: Sequence[str]) -> list[str]:
    others = [each for each in arguments if each != "--undo"]
    return ["replica", "drain" if len(others) == len(arguments) else "undrain", *others]


def _min_in_sync(arguments: Sequence[str]) -> list[str]:
    # The number was an argument.
    options = [f"--min-in-sync={each}" if each.isdecimal() else each for each in arguments]
    return ["broker-group", "set", *options]


FORMER: Final[dict[str, Rewrite]] = {
    **{
        f"{noun} ls": _renamed(f"{noun} list")
        for noun in ("topic", "group", "delivery", "timer", "client", "broker-group")
    },
    "broker-group status": _renamed("broker-group show"),
    "cluster status": _renamed("replica list"),
    "cluster history": _renamed("broker-group history"),
    "cluster transfer": _renamed("broker-group transfer"),
    "cluster replace": _renamed("broker-group transfer", "--unclean", **{"with": "to"}),
    "cluster forget": _renamed("broker-group remove", "--record-only"),
    "cluster min-in-sync": _min_in_sync,
    "cluster drain": _drain,
    "group progress": _renamed("group show"),
    "group scale-hint": _renamed("group show", "--scaling"),
    "group release": _renamed("group unlock"),
    "group forget": _renamed("pull-offset delete"),
    "store rebuild": _renamed("store mend"),
}


def present_command(arguments: list[str]) -> list[str]:
    """Return the arguments after the root options with present names. Warns about a former one."""
    former = " ".join(arguments[:WORDS])
    rewrite = FORMER.get(former)
    if rewrite is None:
        return arguments
    present = rewrite(arguments[WORDS:])
    warn(
        f"`tidemill {former}` is now `tidemill {' '.join(present[:WORDS])}`; the next minor release"
        " removes the former name"
    )
    return present
