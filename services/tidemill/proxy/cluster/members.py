"""The broker groups of the cluster: links to the seeds, later to the members on the home's list.

The proxy serves nothing before the configuration of the home has arrived. After each change of a
link, `_update` evaluates all configurations again, so their order does not matter.
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

FOUND_RETRY_S: Final = 1.0  # pause after a rejected founding
FOUND_TIMEOUT_MS: Final = 3_000  # enough for a round of a broker; a second request does no harm
INTRODUCED_MAX: Final = 64  # lists of addresses that the home has, and need not be sent again


@final
class MemberLinks:
    """The broker groups and the links to them."""

    def __init__(self, seeds: Sequence[str], open_link: Callable[[str], BrokerLink]) -> None:
        """Create links to the addresses of `seeds`; they connect while `running`."""
        self._open_link = open_link
        self._all: dict[str, LinkedGroup] = {}  # by address
        self._links: dict[str, asyncio.Task[None]] = {}
        self._reports: dict[str, BrokerReport | None] = dict.fromkeys(seeds)
        self._tasks: asyncio.TaskGroup | None = None
        self._request: asyncio.Task[None] | None = None  # the founding in flight
        self._introduced: set[tuple[tuple[str, str], ...]] = set()
        self._must_repeat = False  # The founding in flight lacks later changes.
        self._warned: dict[str, None] = {}
        self.conflict = ""  # between seeds; an operator has to resolve it
        for address in seeds:
            self._open(address)
        # The owner of topics, groups and the list of broker groups; the others copy them.
        self.home = self._all[seeds[0]]
        self.brokers: list[LinkedGroup] = list(self._all.values())  # members, in a stable order
        self.by_name: dict[str, LinkedGroup] = {}  # members, also those without a configuration
        self.configured = asyncio.Event()
        self._changed = asyncio.Event()
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
                if self._request is not None:
                    self._request.cancel()

    @property
    def all(self) -> Iterable[LinkedGroup]:
        """All broker groups with a link, members or not."""
        return self._all.values()

    async def wait_until(self, holds: Callable[[], bool], timeout_ms: int, failure: str) -> None:
        """Wait until a condition on configurations holds; raise BrokerTimeout with `failure`."""
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                while not holds():
                    await self._changed.wait()
        except TimeoutError:
            raise BrokerTimeout(
                f"{failure}; the request was not sent and has done nothing; retry"
            ) from None

    # ------------------------------------------------------------ links

    def _open(self, address: str) -> LinkedGroup:
        """Return the broker group at an address. Open a link if there is none."""
        group = self._all.get(address)
        if group is None:
            link = self._open_link(address)
            link.on_change = self._update
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
        group.link.pending.fail_all(f"the broker at {address} is not a member of the cluster")

    # ------------------------------------------------------------ configurations

    def _update(self) -> None:
        """Evaluate all configurations after a change of one of them."""
        for address in self._reports:
            group = self._all.get(address)
            if group is not None and group.link.configured.is_set():
                self._reports[address] = _report_of(group)
        self.conflict = ""
        match decide(self._reports):
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
                self.conflict = reason
                self._warn_once(reason, log.error)
        self.on_change()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _follow(self, home: LinkedGroup) -> None:
        if not home.link.configured.is_set():
            return
        membership = home.link.configuration.membership
        if membership.home_name != home.name:
            self._warn_once(
                f"{home.name} at {home.link.address} is not the home, as other brokers report",
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

    def _find(self, member: link_pb2.ClusterMember) -> LinkedGroup | None:
        """Return the broker group of a member, by its address or the name that it reports.

        None if another broker group has its address, and its own address is unknown.
        """
        listed = self._open(member.address)
        named = next((group for group in self.all if group.name == member.name), None)
        if listed.name == member.name:
            return listed
        return named or (listed if not listed.name else None)

    def _settle(self, home: LinkedGroup, members: dict[str, tuple[LinkedGroup, bool]]) -> None:
        """Use these broker groups from now on, each with whether it drains."""
        cluster_id = home.link.configuration.membership.cluster_id
        for group in self.all:
            group.is_member = False
        self.by_name = {}
        for name, (group, is_draining) in members.items():
            configuration = group.link.configuration
            is_named = group.link.configured.is_set() and configuration.broker_name == name
            group.is_member = is_named and configuration.membership.cluster_id == cluster_id
            group.is_draining = is_draining
            self.by_name[name] = group
        self.home = home
        self.brokers = [group for group in self.by_name.values() if group.is_member]
        self.configured.set()

    def _drop_others(self, membership: link_pb2.Membership) -> None:
        """Close links to other broker groups. A seed without a report may still be a member."""
        keep = {group.link.address for group in self.by_name.values()}
        keep |= {member.address for member in membership.members}
        for address in self._all.keys() - keep:
            if address in self._reports and self._reports[address] is None:
                continue
            group = self._all[address]
            if address in self._reports:
                self._warn_once(
                    f"{group.name} at {address} is not used: it is not in the cluster of"
                    f" {membership.home_name}; add it there first",
                    log.warning,
                )
            self._close(address)

    def _introduce(self, home: LinkedGroup, membership: link_pb2.Membership) -> None:
        """Send the addresses of members to the home if its list has other ones."""
        members = tuple(
            (name, group.link.address) for name, group in self.by_name.items() if group.name == name
        )
        known = {member.name: member.address for member in membership.members}
        if members in self._introduced or all(known[name] == at for name, at in members):
            return
        if not self._ask_to_found(home, members):
            # The founding in flight may have fewer members. These follow after its answer.
            self._must_repeat = True
            return
        if len(self._introduced) >= INTRODUCED_MAX:
            self._introduced.clear()
        self._introduced.add(members)

    def _ask_to_found(self, home: LinkedGroup, members: Iterable[tuple[str, str]]) -> bool:
        """Request the founding of a cluster; return False if another request is in flight."""
        if self._tasks is None or (self._request is not None and not self._request.done()):
            return False
        request = link_pb2.FoundClusterRequest(
            members=[
                link_pb2.ClusterMember(name=name, address=address) for name, address in members
            ]
        )
        self._request = self._tasks.create_task(self._found(home, request), name="founding")
        return True

    async def _found(self, home: LinkedGroup, request: link_pb2.FoundClusterRequest) -> None:
        try:
            await home.link.ask(FOUND, request, timeout_ms=FOUND_TIMEOUT_MS)
        except ServiceError as error:
            log.warning("founding failed", home=home.name, reason=error.message)
            await asyncio.sleep(FOUND_RETRY_S)
            self._must_repeat = True
        if self._must_repeat:
            self._must_repeat = False
            self._request = None
            self._update()

    def _warn_once(self, text: str, write: Callable[[str], None]) -> None:
        if text not in self._warned:
            if len(self._warned) >= INTRODUCED_MAX:
                self._warned.clear()
            self._warned[text] = None
            write(text)


def _report_of(group: LinkedGroup) -> BrokerReport:
    configuration = group.link.configuration
    has_user_topics = any(not topic.is_system for topic in configuration.topics.values())
    return BrokerReport(
        name=configuration.broker_name,
        cluster_id=configuration.membership.cluster_id,
        home_name=configuration.membership.home_name,
        home_address=configuration.membership.home_address,
        is_in_use=has_user_topics or bool(configuration.groups or configuration.security.items),
    )
