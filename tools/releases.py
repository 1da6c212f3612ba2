"""The releases that changes/releases.toml names."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

COMMIT = re.compile(r"[0-9a-f]{40}")


class Release(NamedTuple):
    """A version and the commit that became it."""

    version: str
    commit: str


def read(file: Path) -> list[Release]:
    """Return the releases, oldest first; raise ValueError if an entry is not well-formed."""
    releases = []
    for entry in tomllib.loads(file.read_text("utf-8")).get("release", []):
        if entry.keys() != {"version", "commit"} or not COMMIT.fullmatch(entry["commit"]):
            raise ValueError(
                f"{file.name}: {entry} needs a version and a commit of 40 hexadecimal digits"
            )
        releases.append(Release(**entry))
    return releases
