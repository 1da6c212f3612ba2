"""The list of broker groups at their home: founding, adding, draining, removing.

Owned by the round loop, as all commands are. Changes are CONFIG records (metadata/membership).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import final

from tidemill.broker.engine.configuration.administration import Administration
from tidemill.broker.engine.metadata.catalog import Catalog, topic_item
from tidemill.broker.engine.metadata.dedup_policy import KeyPlacement
from tidemill.broker.engine.metadata.membership import (
    BROKER_GROUPS_MAX,
    BrokerGroup,
    Home,
    broker_group_item,
    home_item,
    redistribute,
)
from tidemill.common.errors import BadRequest, BrokerGroupNotFound, Conflict, Forbidden
from tidemill.common.feature_level import FIRST_LEVEL
from tidemill.message.broker_names import check_address, is_loopback_address

TOPICS_A_SLICE = 16  # topics with queues that move to other members
CLUSTER_ID_BYTES = 8


@final
class BrokerGroups:
    """The commands that change the members of the cluster."""

    def __init__(self, catalog: Catalog, administration: Administration) -> None:
        self._catalog = catalog
        self._administration = administration
        self._membership = catalog.membership
        # Members that are connected at their address and up to date; set by the shell.
        self.connected: set[str] = set()
        # Feature levels that members have reported since this home started.
        self.feature_levels: dict[str, int] = {}

    @property
    def is_home(self) -> bool:
        """Whether this broker is the home of others."""
        home = self._membership.home
        return home is not None and home.name == self._catalog.broker_name

    def find_below(self, level: int) -> list[str]:
        """Return the broker groups of the cluster below a feature level, sorted.

        A member that has not reported since this home started counts as level 1.
        """
        own = self._catalog.broker_name
        levels = {
            name: self.feature_levels.get(name, FIRST_LEVEL) for name in self._membership.groups
        }
        levels[own] = self._catalog.feature_level
        return sorted(name for name, known in levels.items() if known < level)

    def found(self, addresses: Mapping[str, str], now_ms: int) -> None:
        """Become the home of these broker groups, which include this one. Keys are names.

        If this broker is the home already, it updates the addresses of members that are not
        connected. A loopback address never replaces another address. Raises BadRequest, and
        Conflict if this broker follows another home.
        """
        own_name = self._catalog.broker_name
        if own_name not in addresses:
            raise BadRequest(f"{own_name} is not among the broker groups that it is to be home of")
        if len(addresses) > BROKER_GROUPS_MAX:
            raise BadRequest(f"a cluster has at most {BROKER_GROUPS_MAX} broker groups")
        for address in addresses.values():
            check_address(address)
        home = self._membership.home
        if home is not None and home.name != own_name:
            raise Conflict(f"{own_name} follows {home.name} at {home.address}")
        if home is None:
            secret = self._catalog.handle_secret
            cluster_id = blake2b(secret, digest_size=CLUSTER_ID_BYTES, person=b"cluster")
            home = Home(
                cluster_id=cluster_id.hexdigest(), name=own_name, address=addresses[own_name]
            )
            self._record_home(home, now_ms)
            for name, address in addresses.items():
                self._record(BrokerGroup(name=name, address=address), now_ms)
            return
        for name, address in addresses.items():
            group = self._membership.groups.get(name)
            if group is None or group.address == address or name in self.connected:
                continue
            # A proxy on the broker's machine may know the broker as localhost. Other machines
            # cannot use that address. An operator may set it with `add`.
            if is_loopback_address(group.address) or not is_loopback_address(address):
                self._record(replace(group, address=address), now_ms)
                if name == own_name:
                    self._record_home(replace(home, address=address), now_ms)

    def record_home_again(self, now_ms: int) -> None:
        """Record at the home that it is the home: replicas confirm it only to their master."""
        self.check_home()
        home = self._membership.home
        assert home is not None, "the home names itself"
        self._record_home(home, now_ms)

    def add(self, name: str, address: str, now_ms: int) -> BrokerGroup:
        """Add a member, or end its draining; raises Conflict, Forbidden, BadRequest.

        A broker without a cluster adds itself first: it then is the home and can add others.
        """
        if self._membership.home is None and name == self._catalog.broker_name:
            self.found({name: address}, now_ms)
            return self._membership.groups[name]
        self.check_home()
        check_address(address)
        known = self._membership.groups.get(name)
        if known is None and len(self._membership.groups) >= BROKER_GROUPS_MAX:
            raise Conflict(f"a cluster has at most {BROKER_GROUPS_MAX} broker groups")
        for other in self._membership.groups.values():
            if other.address == address and other.name != name:
                raise Conflict(f"{address} is the address of {other.name}")
        group = BrokerGroup(name=name, address=address)
        if name == self._catalog.broker_name and group != known:
            raise Conflict(f"{name} is the home, and a member already")
        if group != known:
            self._record(group, now_ms)
        return group

    def drain(self, name: str, now_ms: int) -> BrokerGroup:
        """Stop sends to a member; raises BrokerGroupNotFound, Conflict, Forbidden."""
        group = self.find_follower(name)
        if group.state != "draining":
            group = replace(group, state="draining")
            self._record(group, now_ms)
        return group

    def find_removable(self, name: str) -> BrokerGroup:
        """Return a member that drains; raises BrokerGroupNotFound, Conflict, Forbidden."""
        group = self.find_follower(name)
        if group.state != "draining":
            raise Conflict(
                f"{name} is not draining: drain it first, and wait until it is empty; force does"
                f" not remove an active broker group either"
            )
        return group

    def remove(self, name: str, now_ms: int) -> Iterator[None]:
        """Move the queues of a member that has left to the other members, and forget it."""
        others = [group.name for group in self._membership.in_order() if group.state == "active"]
        placed = [
            topic
            for topic in self._catalog.topics.values()
            if any(place == name for place, _ in topic.placements)
            or name in topic.placement.groups + topic.placement.before
        ]
        for n, topic in enumerate(placed, 1):
            placements = redistribute(topic.placements, name, others)
            moved = replace(topic, version=topic.version + 1, placements=placements)
            known = topic.placement
            if name in known.groups + known.before:
                # Its keys are over, so the others do not look them up.
                moved = replace(moved, placement=_without(known, name, moved.version))
            self._administration.record(topic_item(moved), now_ms)
            if n % TOPICS_A_SLICE == 0:
                yield
        self._administration.record({"op": "deleteBrokerGroup", "name": name}, now_ms)
        # If it is added again, it becomes no owner of dedup keys before it has received the topics.
        self.feature_levels.pop(name, None)

    def find_follower(self, name: str) -> BrokerGroup:
        """Return a member that is not the home; raises BrokerGroupNotFound, Conflict, Forbidden."""
        self.check_home()
        group = self._membership.groups.get(name)
        if group is None:
            raise BrokerGroupNotFound(f"there is no broker group {name!r}")
        if name == self._catalog.broker_name:
            raise Conflict(
                f"{name} is the home, which stores the topics, consumer groups and broker groups,"
                f" so it cannot be drained or removed. To move it to another machine, stop it, copy"
                f" its data directory and start it there"
            )
        return group

    def check_home(self) -> None:
        """Raise Conflict if there is no home, and Forbidden if another broker is the home."""
        home = self._membership.home
        if home is None:
            raise Conflict(
                f"{self._catalog.broker_name} is the only broker group: to have several, name all "
                f"of them in the setting brokers of the proxies, or first add "
                f"{self._catalog.broker_name} itself with its address"
            )
        if not self.is_home:
            raise Forbidden(
                f"broker groups are changed at their home, {home.name} at {home.address}"
            )

    def _record(self, group: BrokerGroup, now_ms: int) -> None:
        self._administration.record(broker_group_item(group), now_ms)

    def _record_home(self, home: Home, now_ms: int) -> None:
        self._administration.record(home_item(home), now_ms)


def _without(placement: KeyPlacement, name: str, version: int) -> KeyPlacement:
    """Return a list of key owners without a broker group, with this version if the owners change.

    The keys of the broker group are over, so the others look none of them up.
    """
    owners, before = (
        tuple(one for one in groups if one != name)
        for groups in (placement.groups, placement.before)
    )
    if set(owners) == set(before):
        before = ()  # No key moves.
    if owners == placement.groups:
        version = placement.version
    return replace(placement, groups=owners, version=version, before=before)
