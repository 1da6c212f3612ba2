"""The address of the master of each broker group, as far as a caller knows it. No I/O.

    bind             the broker group at an address has a name
    learn            a controller sent the view of a broker group
    note_rejection   a replica is not the master, and named the master that it knows
    forget           the broker group was removed
    note_failure     the dialled replica did not serve; all known replicas are then tried in turn
    note_silence     the dialled replica is connected and silent
    note_recovery    the silent replica answers again
    note_answer      another replica answers meanwhile
    accept_master    the dialled replica serves as master

A link belongs to a broker group, under any address of it. `dial` returns the address to connect to.
Invariant: knowledge with a lower version never replaces that with a higher one (F-22).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidemill.common.replica_group import ReplicationView

# Present and former addresses of the replicas of one broker group. The oldest are forgotten.
ADDRESSES_MAX: Final = 32
# A new master may learn of its election later than the caller. The caller dials it this many times
# before it tries other replicas. A link of a proxy does so with its shortest pauses, for 1.5 s.
LATE_MAX: Final = 10
LATE_MAX_OF_PROXY: Final = 40


# Versions without a controller. Routes in the file of an earlier run may be of records that were
# lost since, so any other source replaces them.
FROM_FILE: Final = -1
UNKNOWN: Final = -2


class MasterRoute(NamedTuple):
    """The known master and replicas of a broker group."""

    version: int
    master: str  # its address; empty if unknown
    addresses: tuple[str, ...]  # of all replicas, present ones first, then former ones
    epoch: int = 0


class UnreachableMaster(NamedTuple):
    """A master that the caller cannot reach."""

    master: str
    reachable: frozenset[str]  # other replicas, which have answered meanwhile


@dataclass(slots=True)
class _GroupState:
    """The broker group behind the address of one link."""

    address: str
    name: str = ""  # empty: unknown
    version: int = UNKNOWN
    epoch: int = 0
    master: str = ""
    late_count: int = 0  # rejections by the master, each with an older version than is known here
    replicas: list[str] = field(default_factory=list)
    is_doubtful: bool = False  # the master did not serve at the last attempt
    turn: int = 0
    lost: str = ""  # an unreachable master without a known successor
    rejected_by: str = ""  # the replica dialled last, if it answered that it is not the master
    answering: set[str] = field(default_factory=set)  # other replicas, since the loss

    def mark_lost(self) -> None:
        if self.lost != self.master:
            self.lost, self.answering = self.master, set()

    def belongs_to(self, name: str, route: MasterRoute) -> bool:
        return self.name == name or self.address in route.addresses

    def candidates(self) -> list[str]:
        return list(dict.fromkeys([*filter(None, [self.master]), *self.replicas, self.address]))


@final
class Masters:
    """The known masters of all broker groups."""

    def __init__(self, *, late_max: int = LATE_MAX) -> None:
        self._late_max = late_max
        self._groups: dict[str, _GroupState] = {}  # by address of the link
        self._routes: dict[str, MasterRoute] = {}

    @property
    def routes(self) -> Mapping[str, MasterRoute]:
        """The routes of controllers, by broker group."""
        return self._routes

    def bind(self, address: str, name: str) -> None:
        """Use the routes of `name` for `address`, even if its replicas have other addresses."""
        group = self._group(address)
        group.name = name
        if name in self._routes:
            self._apply_route(group, self._routes[name])

    def unbind(self, address: str) -> None:
        """Forget the broker group at `address`."""
        self._groups.pop(address, None)

    def dial(self, address: str) -> str:
        """Return the address to dial for the broker group at `address`."""
        group = self._group(address)
        group.rejected_by = ""
        if group.master and not group.is_doubtful:
            return group.master
        candidates = group.candidates()
        group.turn += 1
        return candidates[group.turn % len(candidates)]

    def master_of(self, address: str) -> str:
        """Return the address of the master; empty if it is unknown or doubtful."""
        group = self._group(address)
        return "" if group.is_doubtful else group.master

    def is_late(self, address: str) -> bool:
        """Whether the master has answered the last attempt and did not know of its election yet."""
        return self._group(address).late_count > 0

    def learn(self, name: str, view: ReplicationView) -> list[str]:
        """Apply the view of a controller; return the link addresses with a new election."""
        master = "" if view.master is None else view.address_of(view.master.replica_id)
        return self.update_route(
            name, view.version, master, [at for _, at in view.addresses], view.epoch
        )

    def update_route(
        self, name: str, version: int, master: str, addresses: list[str], epoch: int = 0
    ) -> list[str]:
        """Apply a route; return the link addresses with a new election.

        A master that is elected again also counts: a link may wait between two attempts.
        """
        known = self._routes.get(name)
        if known is not None and version <= known.version:
            return []
        former = () if known is None else known.addresses
        all_addresses = tuple(dict.fromkeys([*addresses, *former]))[:ADDRESSES_MAX]
        self._routes[name] = MasterRoute(version, master, all_addresses, epoch)
        return [
            group.address
            for group in self._groups.values()
            if group.belongs_to(name, self._routes[name])
            and self._apply_route(group, self._routes[name])
        ]

    def forget(self, name: str) -> None:
        """Forget a removed broker group. A new one of that name begins with epoch 1."""
        route = self._routes.pop(name, None)
        for group in self._groups.values():
            if route is not None and group.belongs_to(name, route):
                group.version, group.epoch, group.lost = UNKNOWN, 0, ""

    def note_rejection(
        self, address: str, dialled: str, *, version: int, master: str, epoch: int = 0
    ) -> None:
        """Note that the dialled replica is not the master, and the master that it named."""
        group = self._group(address)
        group.rejected_by = dialled
        is_late = version < group.version and dialled == group.master
        if is_late and group.late_count < self._late_max:
            group.late_count += 1
            return
        group.late_count = 0
        if version > group.version:
            group.version, group.master, group.epoch = version, master, epoch
        if group.master != group.lost or dialled == group.lost:
            group.lost = ""
        elif len(group.answering) < ADDRESSES_MAX:
            group.answering.add(dialled)
        group.is_doubtful = not group.master or group.master == dialled
        if group.master and group.master not in group.replicas:
            group.replicas = [group.master, *group.replicas][:ADDRESSES_MAX]

    def note_failure(self, address: str, dialled: str) -> None:
        """Note that the dialled replica did not serve."""
        group = self._group(address)
        has_answered = dialled == group.rejected_by
        if not has_answered:
            group.late_count = 0
        if dialled == group.master:
            group.is_doubtful = group.is_doubtful or not group.late_count
            if not has_answered:
                group.mark_lost()
        group.rejected_by = ""

    def note_silence(self, address: str, dialled: str) -> None:
        """Note that the dialled replica is silent. Its stream may recover."""
        group = self._group(address)
        if dialled == group.master:
            group.mark_lost()

    def note_recovery(self, address: str, dialled: str) -> None:
        """Note that the silent replica answers again."""
        group = self._group(address)
        if dialled == group.lost:
            group.lost = ""

    def unprobed(self, address: str) -> list[str]:
        """Return the other replicas that have not answered since the loss of the master."""
        group = self._group(address)
        if not group.lost:
            return []
        return [one for one in group.replicas if one not in {group.lost, *group.answering}]

    def note_answer(self, address: str, replica: str) -> None:
        """Note that another replica has answered while the master is lost."""
        group = self._group(address)
        if group.lost not in {"", replica}:
            group.answering.add(replica)

    def accept_master(self, address: str, dialled: str, *, epoch: int = 0) -> bool:
        """Accept the dialled replica as the master of `epoch`; return False if it is a former one.

        A later epoch proves that the replica was replaced and does not know it yet (F-22). No other
        knowledge counts against a replica that serves. A broker without replicas has epoch 0.
        """
        group = self._group(address)
        if 0 < epoch < group.epoch:
            return False
        group.master, group.is_doubtful, group.lost, group.late_count = dialled, False, "", 0
        group.epoch = max(group.epoch, epoch)
        return True

    def unreachable(self) -> dict[str, UnreachableMaster]:
        """Return the unreachable masters without a known successor, by broker group."""
        masters = {}
        for name, route in self._routes.items():
            for group in self._groups.values():
                is_lost = group.lost and group.lost == route.master
                if is_lost and group.belongs_to(name, route):
                    masters[name] = UnreachableMaster(group.lost, frozenset(group.answering))
        return masters

    def _group(self, address: str) -> _GroupState:
        group = self._groups.get(address)
        if group is None:
            group = self._groups[address] = _GroupState(address)
            for route in self._routes.values():
                if address in route.addresses:
                    self._apply_route(group, route)
        return group

    def _apply_route(self, group: _GroupState, route: MasterRoute) -> bool:
        """Apply a route; return whether a master was elected."""
        group.replicas = list(route.addresses)
        if route.version <= group.version:
            return False
        is_elected = route.master != "" and (
            route.master != group.master or route.epoch > group.epoch
        )
        group.version, group.is_doubtful = route.version, not route.master
        group.epoch, group.late_count = max(group.epoch, route.epoch), 0
        group.master = route.master or group.master
        return is_elected

    # ------------------------------------------------------------ routes file

    def load(self, routes: Mapping[str, MasterRoute]) -> None:
        """Apply the routes of an earlier run, which any other source replaces.

        Their epochs are ignored: if records were lost since, no master could reach them.
        """
        for name, route in routes.items():
            self.update_route(name, FROM_FILE, route.master, list(route.addresses))
