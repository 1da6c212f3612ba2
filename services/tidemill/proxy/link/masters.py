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


class Route(NamedTuple):
    """What is known of a group."""

    version: int
    master: str  # its address; empty: nobody knows
    addresses: tuple[str, ...]  # of all its replicas, also where they have been
    epoch: int = 0


class CutOff(NamedTuple):
    """A master that cannot be reached."""

    master: str
    reachable: frozenset[str]  # other replicas, which have answered since


@dataclass(slots=True)
class _Place:
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

    def lose(self) -> None:
        if self.lost != self.master:
            self.lost, self.answering = self.master, set()

    def candidates(self) -> list[str]:
        return list(dict.fromkeys([*filter(None, [self.master]), *self.others, self.address]))


@final
class Masters:
    """All groups of which anything is known."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}
        self._routes: dict[str, Route] = {}

    @property
    def routes(self) -> Mapping[str, Route]:
        """What controllers have told, by group."""
        return self._routes

    def dial(self, address: str) -> str:
        """Return whom to dial for the group that has a replica at `address`."""
        place = self._place(address)
        if place.master and not place.is_doubtful:
            return place.master
        candidates = place.candidates()
        place.turn += 1
        return candidates[place.turn % len(candidates)]

    def master_of(self, address: str) -> str:
        """Return who is believed to be the master; empty: nobody knows."""
        place = self._place(address)
        return "" if place.is_doubtful else place.master

    def learn(self, name: str, view: ReplicationView) -> list[str]:
        """Take what a controller says of a group; return the addresses whose master has moved."""
        master = "" if view.master is None else view.address_of(view.master.replica_id)
        return self.take(name, view.version, master, [at for _, at in view.addresses], view.epoch)

    def take(
        self, name: str, version: int, master: str, addresses: list[str], epoch: int = 0
    ) -> list[str]:
        """Do the same with what is said of a view."""
        known = self._routes.get(name)
        if known is not None and version <= known.version:
            return []
        # Those that are there now come first.
        before = () if known is None else known.addresses
        all_addresses = tuple(dict.fromkeys([*addresses, *before]))[:ADDRESSES_MAX]
        self._routes[name] = Route(version, master, all_addresses, epoch)
        return [
            place.address
            for place in self._places.values()
            if place.address in all_addresses and self._update(place, self._routes[name])
        ]

    def forget(self, name: str) -> None:
        """Hear that there is no such group any more: one that is made anew begins with epoch 1."""
        route = self._routes.pop(name, None)
        for place in self._places.values():
            if route is not None and place.address in route.addresses:
                place.version, place.epoch, place.lost = NOTHING, 0, ""

    def refused(
        self, address: str, dialled: str, *, version: int, master: str, epoch: int = 0
    ) -> None:
        """Hear of who was dialled that it is not the master, but who is, as far as it knows."""
        place = self._place(address)
        place.refused_by = dialled
        if version < place.version and dialled == place.master and place.late < LATE_MAX:
            place.late += 1
            return
        place.late = 0
        if version > place.version:
            place.version, place.master, place.epoch = version, master, epoch
        if place.master != place.lost or dialled == place.lost:
            place.lost = ""
        elif len(place.answering) < ADDRESSES_MAX:
            place.answering.add(dialled)
        place.is_doubtful = not place.master or place.master == dialled
        if place.master and place.master not in place.others:
            place.others = [place.master, *place.others][:ADDRESSES_MAX]

    def failed(self, address: str, dialled: str) -> None:
        """Hear that nobody served who was dialled."""
        place = self._place(address)
        if dialled == place.master:
            place.is_doubtful = True
            if dialled != place.refused_by:
                place.lose()
        place.refused_by = ""

    def silent(self, address: str, dialled: str) -> None:
        """Hear that who was dialled says nothing, on a stream that may go on all the same."""
        place = self._place(address)
        if dialled == place.master:
            place.lose()

    def heard(self, address: str, dialled: str) -> None:
        """Hear that the stream of who was silent goes on."""
        place = self._place(address)
        if dialled == place.lost:
            place.lost = ""

    def unasked(self, address: str) -> list[str]:
        """Return the other replicas that have not answered since the master was lost."""
        place = self._place(address)
        if not place.lost:
            return []
        return [one for one in place.others if one not in {place.lost, *place.answering}]

    def answered(self, address: str, other: str) -> None:
        """Hear that another replica has answered, while the master is lost."""
        place = self._place(address)
        if place.lost not in {"", other}:
            place.answering.add(other)

    def served(self, address: str, dialled: str, *, epoch: int = 0) -> bool:
        """Hear that who was dialled serves as the master of `epoch`; whether it is believed.

        Whoever has said otherwise, but not where a later epoch is known: it was deposed, and has
        not heard of it (F-22). Of epoch 0 is a broker that has no replicas.
        """
        place = self._place(address)
        if 0 < epoch < place.epoch:
            return False
        place.master, place.is_doubtful, place.lost, place.late = dialled, False, "", 0
        place.epoch = max(place.epoch, epoch)
        return True

    def cut_off(self) -> dict[str, CutOff]:
        """Return the groups whose master cannot be reached from here, though nobody replaces it."""
        found = {}
        for name, route in self._routes.items():
            for place in self._places.values():
                if place.lost and place.lost == route.master and place.address in route.addresses:
                    found[name] = CutOff(place.lost, frozenset(place.answering))
        return found

    def _place(self, address: str) -> _Place:
        place = self._places.get(address)
        if place is None:
            place = self._places[address] = _Place(address)
            for route in self._routes.values():
                if address in route.addresses:
                    self._update(place, route)
        return place

    def _update(self, place: _Place, route: Route) -> bool:
        """Take a route; whether the master is another one."""
        place.others = list(route.addresses)
        if route.version <= place.version:
            return False
        has_moved = route.master not in {"", place.master}
        place.version, place.is_doubtful = route.version, not route.master
        place.epoch, place.late = max(place.epoch, route.epoch), 0
        place.master = route.master or place.master
        return has_moved

    # ------------------------------------------------------------ kept on disk

    def load(self, routes: Mapping[str, Route]) -> None:
        """Take routes that were kept by an earlier run: whatever is said now counts for more.

        Their epochs do not: where records were lost since, nobody would be believed.
        """
        for name, route in routes.items():
            self.take(name, KEPT, route.master, list(route.addresses))
