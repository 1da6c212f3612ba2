"""Which broker groups there are: links to the seeds, and then to whom the home lists.

Nothing is served before the home has told its configuration. Whatever any link hears is looked at
as a whole (`_look`), so that it does not matter who has told what first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, final

import structlog

from tidemill.common.errors import BrokerTimeout, ServiceError
from tidemill.proxy.cluster.founding import (
    BrokerReport,
    KnownHome,
    NewCluster,
    NoDecision,
    SeedConflict,
    SingleBroker,
    decide,
)
from tidemill.proxy.cluster.linked_group import LinkedGroup
from tidemill.proxy.link.commands import FOUND
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from tidemill.proxy.link import BrokerLink

log = structlog.get_logger()

FOUND_RETRY_S: Final = 1.0  # until a founding that was refused is asked for again
FOUND_TIMEOUT_MS: Final = 3_000  # a round at a broker; asking twice is harmless
INTRODUCED_MAX: Final = 64  # new addresses that the home was told of, and need not be again


@final
class MemberLinks:
    """The broker groups, and the links to them."""

    def __init__(self, seeds: Sequence[str], open_link: Callable[[str], BrokerLink]) -> None:
        """Know the addresses of `seeds`; connections are made while `running`."""
        self._open_link = open_link
        self._all: dict[str, LinkedGroup] = {}  # by address
        self._links: dict[str, asyncio.Task[None]] = {}
        self._told: dict[str, BrokerReport | None] = dict.fromkeys(seeds)
        self._tasks: asyncio.TaskGroup | None = None
        self._asking: asyncio.Task[None] | None = None
        self._introduced: set[tuple[tuple[str, str], ...]] = set()
        self._is_more_known = False  # than what the home is being asked to take
        self._warned: dict[str, None] = {}
        self.refusal = ""  # why somebody has to act before what the home says can be believed
        for address in seeds:
            self._open(address)
        # Of topics, groups and the list of broker groups; the others have them from it.
        self.home = self._all[seeds[0]]
        self.brokers: list[LinkedGroup] = list(self._all.values())  # members, in one order
        self.by_name: dict[str, LinkedGroup] = {}  # members, some of whom have yet to tell
        self.configured = asyncio.Event()
        self._news = asyncio.Event()
        self.on_change: Callable[[], None] = lambda: None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the links up until the block ends."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for address in self._all:
                self._start(address)
            try:
                yield
            finally:
                self._tasks = None
                for task in self._links.values():
                    task.cancel()
                if self._asking is not None:
                    self._asking.cancel()

    @property
    def all(self) -> Iterable[LinkedGroup]:
        """Everybody to whom there is a link, member or not."""
        return self._all.values()

    async def wait_until(self, holds: Callable[[], bool], timeout_ms: int, what: str) -> None:
        """Wait until something that brokers tell holds; raise BrokerTimeout."""
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                while not holds():
                    await self._news.wait()
        except TimeoutError:
            raise BrokerTimeout(f"{what}; the request was not sent and has done nothing") from None

    # ------------------------------------------------------------ links

    def _open(self, address: str) -> LinkedGroup:
        """Return the broker group at an address; there is a link to it from here on."""
        group = self._all.get(address)
        if group is None:
            link = self._open_link(address)
            link.on_change = self._look
            group = self._all[address] = LinkedGroup(link)
            self._start(address)
        return group

    def _start(self, address: str) -> None:
        if self._tasks is not None:
            run = self._all[address].link.run()
            self._links[address] = self._tasks.create_task(run, name=f"link to {address}")

    def _close(self, address: str) -> None:
        group = self._all.pop(address)
        group.is_member = False
        task = self._links.pop(address, None)
        if task is not None:
            task.cancel()
        group.link.pending.fail_all(f"the broker at {address} is no member of the cluster")

    # ------------------------------------------------------------ what was told

    def _look(self) -> None:
        """Do what follows from all that was told: called whenever a broker has told something."""
        for address in self._told:
            group = self._all.get(address)
            if group is not None and group.link.configured.is_set():
                self._told[address] = _told_by(group)
        self.refusal = ""
        match decide(self._told):
            case SingleBroker(address):
                alone = self._all[address]
                self._settle(alone, {alone.name: (alone, False)})
            case KnownHome(address):
                self._follow(self._open(address))
            case NewCluster(address, members):
                self._ask_to_found(self._all[address], members)
            case NoDecision(reason):
                self._warn_once(f"waiting for all brokers: {reason}", log.info)
            case SeedConflict(reason):
                self.refusal = reason
                self._warn_once(reason, log.error)
        self.on_change()
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _follow(self, home: LinkedGroup) -> None:
        if not home.link.configured.is_set():
            return
        membership = home.link.configuration.membership
        if membership.home_name != home.name:
            self._warn_once(
                f"{home.name} at {home.link.address} was said to be the home, and is not",
                log.warning,
            )
            return
        members: dict[str, tuple[LinkedGroup, bool]] = {}
        for member in membership.members:
            group = home if member.name == home.name else self._find(member)
            if group is not None:
                members[member.name] = group, member.state == link_pb2.MEMBER_STATE_DRAINING
        self._settle(home, members)
        self._drop_others(membership)
        self._introduce(home, membership)

    def _find(self, member: link_pb2.Member) -> LinkedGroup | None:
        """Return who is a member: at its address, unless a seed is it by its own word.

        None where another has taken its address, and nobody knows where it is.
        """
        listed = self._open(member.address)
        named = next((group for group in self.all if group.name == member.name), None)
        if listed.name == member.name:
            return listed
        return named or (listed if not listed.name else None)

    def _settle(self, home: LinkedGroup, members: dict[str, tuple[LinkedGroup, bool]]) -> None:
        """Ask these from here on; each with whether it drains."""
        cluster_id = home.link.configuration.membership.cluster_id
        for group in self.all:
            group.is_member = False
        self.by_name = {}
        for name, (group, is_draining) in members.items():
            told = group.link.configuration
            is_told = group.link.configured.is_set() and told.broker_name == name
            group.is_member = is_told and told.membership.cluster_id == cluster_id
            group.is_draining = is_draining
            self.by_name[name] = group
        self.home = home
        self.brokers = [group for group in self.by_name.values() if group.is_member]
        self.configured.set()

    def _drop_others(self, membership: link_pb2.Membership) -> None:
        """Close links to who is no member; a seed that has told nothing may be one yet."""
        keep = {group.link.address for group in self.by_name.values()}
        keep |= {member.address for member in membership.members}
        for address in self._all.keys() - keep:
            if address in self._told and self._told[address] is None:
                continue
            group = self._all[address]
            if address in self._told:
                self._warn_once(
                    f"{group.name} at {address} is not used: it is not among the broker groups"
                    f" of {membership.home_name}'s cluster; add it there first",
                    log.warning,
                )
            self._close(address)

    def _introduce(self, home: LinkedGroup, membership: link_pb2.Membership) -> None:
        """Tell the home where members are that it knows at other addresses."""
        members = tuple(
            (name, group.link.address) for name, group in self.by_name.items() if group.name == name
        )
        known = {member.name: member.address for member in membership.members}
        if members in self._introduced or all(known[name] == at for name, at in members):
            return
        if not self._ask_to_found(home, members):
            # Of fewer of them, it may be: these are told once that is answered.
            self._is_more_known = True
            return
        if len(self._introduced) >= INTRODUCED_MAX:
            self._introduced.clear()
        self._introduced.add(members)

    def _ask_to_found(self, home: LinkedGroup, members: Iterable[tuple[str, str]]) -> bool:
        """Ask for it; False where something else is asked at this moment."""
        if self._tasks is None or (self._asking is not None and not self._asking.done()):
            return False
        request = link_pb2.FoundClusterRequest(
            members=[link_pb2.Member(name=name, address=address) for name, address in members]
        )
        self._asking = self._tasks.create_task(self._found(home, request), name="founding")
        return True

    async def _found(self, home: LinkedGroup, request: link_pb2.FoundClusterRequest) -> None:
        try:
            await home.link.ask(FOUND, request, timeout_ms=FOUND_TIMEOUT_MS)
        except ServiceError as error:
            log.warning("the home was not founded", home=home.name, reason=error.message)
            await asyncio.sleep(FOUND_RETRY_S)
            self._is_more_known = True
        if self._is_more_known:
            self._is_more_known = False
            self._asking = None
            self._look()

    def _warn_once(self, text: str, write: Callable[[str], None]) -> None:
        if text not in self._warned:
            if len(self._warned) >= INTRODUCED_MAX:
                self._warned.clear()
            self._warned[text] = None
            write(text)


def _told_by(group: LinkedGroup) -> BrokerReport:
    told = group.link.configuration
    return BrokerReport(
        name=told.broker_name,
        cluster_id=told.membership.cluster_id,
        home_name=told.membership.home_name,
        home_address=told.membership.home_address,
        has_topics=bool(told.groups) or any(not each.is_system for each in told.topics.values()),
    )
