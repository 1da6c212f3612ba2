"""The nearest known name to a misspelt one, for errors."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

NAME_CHARS_MAX: Final = 64  # of a name in an error; known fields and parameters are shorter
# Names that are compared: 100,000 would take a second, and these take some milliseconds.
COMPARED_MAX: Final = 1_000
SCANNED_MAX: Final = 20_000


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


def nearest_name(name: str, known: Iterable[str], *, may_show: Callable[[str], bool]) -> str | None:
    """Return the known topic or consumer group that a caller probably means; None: none is near.

    Of the first SCANNED_MAX names, at most COMPARED_MAX that begin with the same character and have
    about the same length are compared.
    """
    first, chars = name[:1].lower(), len(name)
    near = (
        each
        for each in islice(known, SCANNED_MAX)
        if each[:1].lower() == first and abs(len(each) - chars) < 4 and may_show(each)
    )
    by_plain = {each.lower(): each for each in islice(near, COMPARED_MAX)}
    found = difflib.get_close_matches(name.lower(), by_plain, n=1, cutoff=0.75)
    return by_plain[found[0]] if found else None


def unknown_text(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the begin of an error about an unknown field or parameter, with the known ones."""
    listed = list(known)
    near = nearest_field(name, listed)
    text = f"unknown {kind} {name[:NAME_CHARS_MAX]!r}, so nothing was done"
    if near is not None:
        text += f"; did you mean {near!r}?"
    return f"{text}; known are {', '.join(listed)}" if listed else text
