"""Sizes as people write them: 512MiB, 10GiB."""

from __future__ import annotations

import re

import typer

SIZE = "SIZE"  # name in help texts for the input of `size_bytes`

# The largest first.
_UNITS_BYTES = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
_SIZE = re.compile(rf"(\d{{1,15}})({'|'.join(_UNITS_BYTES)})")


def size_bytes(text: str) -> int:
    """Read a size such as 512MiB or 10GiB; end the command for other text."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise typer.BadParameter(f"{text!r} is not a size; write 512KiB, 100MiB, 10GiB or 1TiB")
    return int(found[1]) * _UNITS_BYTES[found[2]]


def size_text(size_bytes: int) -> str:
    """Return a size as `size_bytes` reads it, in the largest unit without a rest: 10GiB."""
    unit, factor = next(one for one in _UNITS_BYTES.items() if size_bytes % one[1] == 0)
    return f"{size_bytes // factor}{unit}"
