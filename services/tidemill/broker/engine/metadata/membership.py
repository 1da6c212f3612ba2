"""Who belongs to the cluster: the home, and the broker groups, as the fold of CONFIG records.

The home's log has the list of broker groups, itself among them, and says that it is the home. A
follower's says who its home is, and of which cluster. A broker that is alone has neither. The id of
a cluster is random and made at its founding: a home that has lost its store is another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

from tidemill.message.broker_names import natural_order

BROKER_GROUPS_MAX = 64  # of one cluster: every poll of a proxy asks them all
ITEM_PREFIX = "brokerGroup "  # of the keys under which broker groups are stated

MemberState: TypeAlias = Literal["active", "draining"]
# Broker group and number of queues; a message group is hashed over all of a list of them.
Placements: TypeAlias = "tuple[tuple[str, int], ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Who owns what is configured."""

    cluster_id: str
    name: str
    address: str
    # Of the follower that has this in its log: it takes no messages of producers any more.
    is_draining: bool = False
    # Of the home that a follower has listened to last: the epoch of its log, and a random name of
    # its process. One that was restored from a backup begins again with a lower epoch, or the same.
    epoch: int = 0
    life: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerGroup:
    """A member, as the home knows it."""

    name: str
    address: str
    state: MemberState = "active"


@final
class Membership:
    """What a broker's log says of its cluster."""

    def __init__(self) -> None:
        self.home: Home | None = None
        # Of a broker that was removed: the cluster that it has left. A home that missed the end of
        # the removal hears so from it.
        self.left_cluster_id = ""
        self.groups: dict[str, BrokerGroup] = {}  # at the home

    def apply(self, item: dict[str, Any]) -> None:
        """Fold an item of one of the kinds below in."""
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
        """Return the places of a new topic: so many queues of each active group."""
        return tuple([(group.name, queues) for group in self.in_order() if group.state == "active"])


def home_item(home: Home | None, *, left_cluster_id: str = "") -> dict[str, Any]:
    """Return the item that says who is the home, or of which cluster it was."""
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


def redistribute(placements: Placements, gone: str, others: Sequence[str]) -> Placements:
    """Return `placements` with queues of `others` in the place of those of `gone`.

    Every other place stays where it is, so that no other message group moves. Whoever has a topic
    has as many queues of it as any other.
    """
    assert others, "a topic keeps its messages somewhere"
    found: list[tuple[str, int]] = []
    for name, queues in placements:
        if name != gone:
            found.append((name, queues))
            continue
        each, more = divmod(queues, len(others))
        shares = [each + (n < more) for n in range(len(others))]
        found += [(other, share) for other, share in zip(others, shares, strict=True) if share]
    return tuple(found)
