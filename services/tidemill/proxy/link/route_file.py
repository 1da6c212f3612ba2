"""The file of routes, for a start without controllers: a cache, as JSON.

    {"cluster": "tidemill", "groups": {"broker-0": {"version": 7, "master": "10.0.0.1:10911",
                                                    "addresses": ["10.0.0.1:10911", ...]}}}

The file is a cache. A proxy ignores a file of another cluster and a file that it cannot parse.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tidemill.proxy.link.masters import MasterRoute

if TYPE_CHECKING:
    from collections.abc import Mapping


def to_text(cluster: str, routes: Mapping[str, MasterRoute]) -> str:
    """Return the routes of a cluster."""
    groups = {name: route._asdict() for name, route in routes.items()}
    return json.dumps({"cluster": cluster, "groups": groups})


def from_text(cluster: str, text: str) -> dict[str, MasterRoute]:
    """Return the routes of `to_text`; none if the text is invalid or of another cluster."""
    try:
        parsed = json.loads(text)
        if parsed["cluster"] != cluster:
            return {}
        return {
            str(name): MasterRoute(
                int(one["version"]), str(one["master"]), tuple(map(str, one["addresses"]))
            )
            for name, one in parsed["groups"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
