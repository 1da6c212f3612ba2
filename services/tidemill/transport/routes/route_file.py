"""The file of routes, for a start without controllers: a cache, as JSON.

    {"cluster": "tidemill", "groups": {"broker-0": {"version": 7, "master": "10.0.0.1:10911",
                                                    "addresses": ["10.0.0.1:10911", ...]}}}
    3735928559

The second line is the CRC-32 of the first one, so that no proxy calls an address that the disk
changed. A proxy ignores a file of another cluster, a damaged file, and one that it cannot parse.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from zlib import crc32

from tidemill.transport.routes.masters import MasterRoute

if TYPE_CHECKING:
    from collections.abc import Mapping


def to_text(cluster: str, routes: Mapping[str, MasterRoute]) -> str:
    """Return the routes of a cluster and their checksum."""
    groups = {name: route._asdict() for name, route in routes.items()}
    line = json.dumps({"cluster": cluster, "groups": groups})
    return f"{line}\n{crc32(line.encode())}\n"


def from_text(cluster: str, text: str) -> dict[str, MasterRoute]:
    """Return the routes of `to_text`; none if the text is damaged or of another cluster."""
    line, _, checksum = text.partition("\n")
    try:
        parsed = json.loads(line)
        if int(checksum) != crc32(line.encode()) or parsed["cluster"] != cluster:
            return {}
        return {
            str(name): MasterRoute(
                int(one["version"]), str(one["master"]), tuple(map(str, one["addresses"]))
            )
            for name, one in parsed["groups"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
