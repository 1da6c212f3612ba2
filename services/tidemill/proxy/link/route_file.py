"""The routes that a proxy keeps for a start without controllers: a cache, as JSON.

    {"cluster": "tidemill", "groups": {"broker-0": {"version": 7, "master": "10.0.0.1:10911",
                                                    "addresses": ["10.0.0.1:10911", ...]}}}

What is of another cluster, or makes no sense, is a cache that is lost, and no more than that.
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
    """Return what `to_text` was given; nothing of another cluster, or of what makes no sense."""
    try:
        found = json.loads(text)
        if found["cluster"] != cluster:
            return {}
        return {
            str(name): MasterRoute(
                int(one["version"]), str(one["master"]), tuple(map(str, one["addresses"]))
            )
            for name, one in found["groups"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
