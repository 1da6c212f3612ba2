"""The nearest known field or parameter to a misspelt one, for errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

NAME_CHARS_MAX: Final = 64  # of a name in an error; known fields and parameters are shorter


def nearest_field(name: str, known: Iterable[str]) -> str | None:
    """Return the known field or parameter that a caller probably means; None: there is none.

    `dry_run` and `DRYRUN` mean `dryRun`, and an option of the command line such as `order` means
    the field that contains it, `deliveryOrder`.
    """
    by_plain = {each.lower(): each for each in known}
    plain = name[:NAME_CHARS_MAX].replace("_", "").replace("-", "").lower()
    found = [each for each in by_plain if plain in each][:1] if len(plain) > 2 else []
    found = found or difflib.get_close_matches(plain, by_plain, n=1)
    return by_plain[found[0]] if found else None


def unknown_text(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the begin of an error about an unknown field or parameter, with the known ones."""
    listed = list(known)
    near = nearest_field(name, listed)
    text = f"unknown {kind} {name[:NAME_CHARS_MAX]!r}, so nothing was done"
    if near is not None:
        text += f"; did you mean {near!r}?"
    return f"{text}; known are {', '.join(listed)}" if listed else text


class UnknownField(ValueError):
    """A body has a field that nobody knows. The text names the nearest and all known ones."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(unknown_text("field", name, known))
        self.name = name
