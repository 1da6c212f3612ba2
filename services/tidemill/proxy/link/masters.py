"""Where the master of each broker group is, by all that a proxy hears: a machine without I/O.

    learn        controllers push what they know of groups, at once and again when it changes
    refused      a replica says that it is not the master, and who is
    forget       there is no such group any more
    failed       nobody is there: then all known replicas are asked in turn, until one serves
    silent       who was dialled is connected and says nothing; `heard` when it does again
    answered     another replica is there, meanwhile

A link is to a broker group, by any address of it that somebody has written down; here is said whom
it dials. Invariant: of one group nothing with a lower version counts (F-22).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidemill.common.replica_group import ReplicationView

# Of one group: replicas, and where they have been. The oldest are forgotten.
ADDRESSES_MAX: Final = 32
# A master that was just elected may hear of it later than we do: it is asked again, so often, with
# the pauses of a link. Then others are asked too.
LATE_MAX: Final = 10


# Versions of what no controller has said. What an earlier run has kept may be of records that were
# lost since: it counts until anybody says otherwise.
KEPT: Final = -1
NOTHING: Final = -2


class MasterRoute(NamedTuple):
    """What is known of a group."""

    version: int
    master: str  # its address; empty: nobody knows
    addresses: tuple[str, ...]  # of all its replicas, also where they have been
    epoch: int = 0


class UnreachableMaster(NamedTuple):
    """A master that cannot be reached."""

    master: str
    reachable: frozenset[str]  # other replicas, which have answered since


@dataclass(slots=True)
class _GroupState:
    """One address that a link is kept to, and whom that means."""

    address: str
    version: int = NOTHING
    epoch: int = 0
    master: str = ""
    late: int = 0  # how often the master has said that it knows less than we do
    others: list[str] = field(default_factory=list)
    is_doubtful: bool = False  # the master did not serve when it was asked last
    turn: int = 0
    lost: str = ""  # a master that cannot be reached, and is not known to be replaced
    refused_by: str = ""  # who was dialled last, and has answered that it is not the master
    answering: set[str] = field(default_factory=set)  # others, since then

    def mark_lost(self) -> None:
        if self.lost != self.master:
            self.lost, self.answering = self.master, set()

    def candidates(self) -> list[str]:
        return list(dict.fromkeys([*filter(None, [self.master]), *self.others, self.address]))


@final
class Masters:
    """All groups of which anything is known."""

    def __init__(self) -> None:
        self._groups: dict[str, _GroupState] = {}
        self._routes: dict[str, MasterRoute] = {}

    @property
    def routes(self) -> Mapping[str, MasterRoute]:
        """What controllers have told, by group."""
        return self._routes

    def dial(self, address: str) -> str:
        """Return whom to dial for the group that has a replica at `address`."""
        group = self._group(address)
        if group.master and not group.is_doubtful:
            return group.master
        candidates = group.candidates()
        group.turn += 1
        return candidates[group.turn % len(candidates)]

    def master_of(self, address: str) -> str:
        """Return who is believed to be the master; empty: nobody knows."""
        group = self._group(address)
        return "" if group.is_doubtful else group.master

    def learn(self, name: str, view: ReplicationView) -> list[str]:
        """Take what a controller says of a group; return the addresses whose master has moved."""
        master = "" if view.master is None else view.address_of(view.master.replica_id)
        return self.update_route(
            name, view.version, master, [at for _, at in view.addresses], view.epoch
        )

    def update_route(
        self, name: str, version: int, master: str, addresses: list[str], epoch: int = 0
    ) -> list[str]:
        """Do the same with what is said of a view."""
        known = self._routes.get(name)
        if known is not None and version <= known.version:
            return []
        # Those that are there now come first.
        before = () if known is None else known.addresses
        all_addresses = tuple(dict.fromkeys([*addresses, *before]))[:ADDRESSES_MAX]
        self._routes[name] = MasterRoute(version, master, all_addresses, epoch)
        return [
            group.address
            for group in self._groups.values()
            if group.address in all_addresses and self._apply_route(group, self._routes[name])
        ]

    def forget(self, name: str) -> None:
        """Hear that there is no such group any more: one that is made anew begins with epoch 1."""
        route = self._routes.pop(name, None)
        for group in self._groups.values():
            if route is not None and group.address in route.addresses:
                group.version, group.epoch, group.lost = NOTHING, 0, ""

    def note_rejection(
        self, address: str, dialled: str, *, version: int, master: str, epoch: int = 0
    ) -> None:
        """Hear of who was dialled that it is not the master, but who is, as far as it knows."""
        group = self._group(address)
        group.refused_by = dialled
        if version < group.version and dialled == group.master and group.late < LATE_MAX:
            group.late += 1
            return
        group.late = 0
        if version > group.version:
            group.version, group.master, group.epoch = version, master, epoch
        if group.master != group.lost or dialled == group.lost:
            group.lost = ""
        elif len(group.answering) < ADDRESSES_MAX:
            group.answering.add(dialled)
        group.is_doubtful = not group.master or group.master == dialled
        if group.master and group.master not in group.others:
            group.others = [group.master, *group.others][:ADDRESSES_MAX]

    def note_failure(self, address: str, dialled: str) -> None:
        """Hear that nobody served who was dialled."""
        group = self._group(address)
        if dialled == group.master:
            group.is_doubtful = True
            if dialled != group.refused_by:
                group.mark_lost()
        group.refused_by = ""

    def note_silence(self, address: str, dialled: str) -> None:
        """Hear that who was dialled says nothing, on a stream that may go on all the same."""
        group = self._group(address)
        if dialled == group.master:
            group.mark_lost()

    def note_recovery(self, address: str, dialled: str) -> None:
        """Hear that the stream of who was silent goes on."""
        group = self._group(address)
        if dialled == group.lost:
            group.lost = ""

    def unprobed(self, address: str) -> list[str]:
        """Return the other replicas that have not answered since the master was lost."""
        group = self._group(address)
        if not group.lost:
            return []
        return [one for one in group.others if one not in {group.lost, *group.answering}]

    def note_answer(self, address: str, other: str) -> None:
        """Hear that another replica has answered, while the master is lost."""
        group = self._group(address)
        if group.lost not in {"", other}:
            group.answering.add(other)

    def accept_master(self, address: str, dialled: str, *, epoch: int = 0) -> bool:
        """Hear that who was dialled serves as the master of `epoch`; whether it is believed.

        Whoever has said otherwise, but not where a later epoch is known: it was deposed, and has
        not heard of it (F-22). Of epoch 0 is a broker that has no replicas.
        """
        group = self._group(address)
        if 0 < epoch < group.epoch:
            return False
        group.master, group.is_doubtful, group.lost, group.late = dialled, False, "", 0
        group.epoch = max(group.epoch, epoch)
        return True

    def unreachable(self) -> dict[str, UnreachableMaster]:
        """Return the groups whose master cannot be reached from here, though nobody replaces it."""
        found = {}
        for name, route in self._routes.items():
            for group in self._groups.values():
                if group.lost and group.lost == route.master and group.address in route.addresses:
                    found[name] = UnreachableMaster(group.lost, frozenset(group.answering))
        return found

    def _group(self, address: str) -> _GroupState:
        group = self._groups.get(address)
        if group is None:
            group = self._groups[address] = _GroupState(address)
            for route in self._routes.values():
                if address in route.addresses:
                    self._apply_route(group, route)
        return group

    def _apply_route(self, group: _GroupState, route: MasterRoute) -> bool:
        """Take a route; whether the master is another one."""
        group.others = list(route.addresses)
        if route.version <= group.version:
            return False
        has_moved = route.master not in {"", group.master}
        group.version, group.is_doubtful = route.version, not route.master
        group.epoch, group.late = max(group.epoch, route.epoch), 0
        group.master = route.master or group.master
        return has_moved

    # ------------------------------------------------------------ kept on disk

    def load(self, routes: Mapping[str, MasterRoute]) -> None:
        """Take routes that were kept by an earlier run: whatever is said now counts for more.

        Their epochs do not: where records were lost since, nobody would be believed.
        """
        for name, route in routes.items():
            self.update_route(name, KEPT, route.master, list(route.addresses))
