"""The members of the cluster: the home and the broker groups, as the fold of CONFIG records.

The home's log lists all broker groups and says that it is the home. A follower's log names its home
and its cluster. A single broker has neither. The cluster id is random and assigned at the founding,
so a home that has lost its store belongs to another cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

from tidemill.message.broker_names import natural_order

BROKER_GROUPS_MAX = 64  # of one cluster: every poll of a proxy asks all of them
ITEM_PREFIX = "brokerGroup "  # of the keys of broker groups

MemberState: TypeAlias = Literal["active", "draining"]
# (broker group, number of queues); a message group is hashed over all queues of the list.
Placements: TypeAlias = "tuple[tuple[str, int], ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """The owner of the configuration."""

    cluster_id: str
    name: str
    address: str
    # Of the follower with this log: it rejects messages of producers.
    is_draining: bool = False
    # Of the home that the follower listened to last: the epoch of its log, and a random name of its
    # process. A home that was restored from a backup has a lower epoch, or the same.
    epoch: int = 0
    life: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerGroup:
    """A member of the cluster, at the home."""

    name: str
    address: str
    state: MemberState = "active"


@final
class Membership:
    """The cluster as a broker's log describes it."""

    def __init__(self) -> None:
        self.home: Home | None = None
        # Of a removed broker: the cluster that it left. A home that missed the end of the removal
        # learns it from here.
        self.left_cluster_id = ""
        self.groups: dict[str, BrokerGroup] = {}  # at the home

    def apply(self, item: dict[str, Any]) -> None:
        """Apply an item of a kind below."""
        match item["op"]:
            case "home":
                self.home = Home(**item["home"]) if item["home"] else None
                self.left_cluster_id = item.get("left", "")
            case "brokerGroup":
                group = BrokerGroup(**item["group"])
                self.groups[group.name] = group
            case "deleteBrokerGroup":
                self.groups.pop(item["name"], None)

    def in_order(self) -> list[BrokerGroup]:
        """Return all members by name, in natural order."""
        return sorted(self.groups.values(), key=lambda group: natural_order(group.name))

    def placements(self, queues: int) -> Placements:
        """Return the placements of a new topic: `queues` queues of each active group."""
        return tuple([(group.name, queues) for group in self.in_order() if group.state == "active"])


def home_item(home: Home | None, *, left_cluster_id: str = "") -> dict[str, Any]:
    """Return the item that names the home, or the cluster that was left."""
    if home is None:
        return {"op": "home", "home": None, "left": left_cluster_id}
    values = {
        "cluster_id": home.cluster_id,
        "name": home.name,
        "address": home.address,
        "is_draining": home.is_draining,
        "epoch": home.epoch,
        "life": home.life,
    }
    return {"op": "home", "home": values}


def broker_group_item(group: BrokerGroup) -> dict[str, Any]:
    """Return the item that puts a broker group."""
    values = {"name": group.name, "address": group.address, "state": group.state}
    return {"op": "brokerGroup", "group": values}


def redistribute(placements: Placements, removed: str, others: Sequence[str]) -> Placements:
    """Replace the queues of `removed` in `placements` by queues of `others`.

    All other placements stay, so that no other message group moves. Every broker group with a topic
    has the same number of its queues.
    """
    assert others, "a topic keeps its messages somewhere"
    found: list[tuple[str, int]] = []
    for name, queues in placements:
        if name != removed:
            found.append((name, queues))
            continue
        each, more = divmod(queues, len(others))
        shares = [each + (n < more) for n in range(len(others))]
        found += [(other, share) for other, share in zip(others, shares, strict=True) if share]
    return tuple(found)
