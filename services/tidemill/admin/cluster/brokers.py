"""The broker groups as the admin process sees them: one client each, and questions to all at once.

The home has the list of them. It is asked again when somebody needs the list and the last one is a
second old; while it is away the last one stays. Any member tells where the home is, so the settings
need to name one that is up, and no more.

What is asked of all answers what it knows, and who could not be reached: a part is never silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar, final

import grpc
import structlog

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.broker_client import BrokerClient
from tidemill.common.errors import (
    BrokerGroupNotFound,
    BrokerGroupUnreachable,
    BrokerTimeout,
    BrokerUnreachable,
    Draining,
    Forbidden,
    GroupNotFound,
    MessageNotFound,
    ServiceError,
    TopicNotFound,
)
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

log = structlog.get_logger()

LOOK_EVERY_S: Final = 1.0  # the list may be so old: proxies know as little of the moment
LOOK_PATIENCE_S: Final = 0.5  # then who asks goes on with the last list: the home is away, or slow

T = TypeVar("T")
Connect: TypeAlias = Callable[[str], AbstractAsyncContextManager[BrokerClient]]

# The broker cannot be asked, which says nothing of what it has.
UNREACHABLE_ERRORS: Final = (BrokerUnreachable, BrokerTimeout, Draining)
# It has not heard of it, or has none of it; another may.
UNKNOWN_ERRORS: Final = (TopicNotFound, GroupNotFound, MessageNotFound)


class BrokerGroupClient(NamedTuple):
    """A broker group, and who asks it."""

    name: str
    address: str
    is_home: bool
    is_draining: bool
    client: BrokerClient


class BrokerAnswer(NamedTuple, Generic[T]):
    """What one broker group has said."""

    broker: str
    value: T


class BrokerAnswers(NamedTuple, Generic[T]):
    """What all have said that could be reached, the home first, and the names of the others."""

    answers: list[BrokerAnswer[T]]
    unreachable: list[str]


class _Connection(NamedTuple):
    client: asyncio.Future[BrokerClient]
    is_over: asyncio.Event


@final
class Brokers:
    """The broker groups behind this process."""

    def __init__(self, seeds: Sequence[str], connect: Connect, *, timeout_ms: int) -> None:
        self._seeds = list(seeds)
        self._connect = connect
        self._timeout_s = timeout_ms / 1000
        self._connections: dict[str, _Connection] = {}  # by address
        self._members: Sequence[BrokerGroupClient] = ()  # the home first; empty until one has told
        self._looked_at_s = 0.0
        self._look: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Be connected until the block ends."""
        async with asyncio.TaskGroup() as self._tasks:
            for address in self._seeds:
                await self.client_at(address)
            yield
            if self._look is not None:
                self._look.cancel()
            for connection in self._connections.values():
                connection.is_over.set()

    async def client_at(self, address: str) -> BrokerClient:
        """Return who asks the broker at an address."""
        connection = self._connections.get(address)
        if connection is None:
            opened = asyncio.get_running_loop().create_future()
            connection = self._connections[address] = _Connection(opened, asyncio.Event())
            self._tasks.create_task(self._keep(address, connection), name=f"broker at {address}")
        # Who waits may be cancelled; the connection is everybody's.
        return await asyncio.shield(connection.client)

    async def _keep(self, address: str, connection: _Connection) -> None:
        async with self._connect(address) as client:
            connection.client.set_result(client)
            await connection.is_over.wait()

    # ------------------------------------------------------------ who there is

    async def members(self) -> Sequence[BrokerGroupClient]:
        """Return all broker groups, the home first; raise BrokerUnreachable if nobody has told."""
        if not self._members:
            await self.look()
        elif time.monotonic() - self._looked_at_s >= LOOK_EVERY_S:
            if self._look is None or self._look.done():
                self._look = self._tasks.create_task(self._look_again(), name="look for brokers")
            await asyncio.wait([self._look], timeout=LOOK_PATIENCE_S)
        return self._members

    async def home(self) -> BrokerClient:
        """Return who asks the home, which decides about topics, consumer groups and members."""
        return (await self.members())[0].client

    async def member(self, name: str) -> BrokerGroupClient:
        """Return a broker group by its name; raise BrokerGroupNotFound."""
        members = await self.members()
        for member in members:
            if member.name == name:
                return member
        known = ", ".join(member.name for member in members)
        raise BrokerGroupNotFound(f"there is no broker group {name!r}; there are {known}")

    async def look(self) -> None:
        """Ask for the list now: the home, or before it is known all seeds."""
        if self._members:
            home = self._members[0]
            self._take(await self._list_at(home.address, home.client))
            return
        looks = [asyncio.ensure_future(self._try(address)) for address in self._seeds]
        refusals = []
        try:
            for look in asyncio.as_completed(looks):
                answer = await look
                if not isinstance(answer, Exception):
                    self._take(answer)
                    return
                refusals.append(answer)
        finally:
            for waiting in looks:
                waiting.cancel()
        raise refusals[0]

    async def _look_again(self) -> None:
        try:
            await self.look()
        except Exception as error:
            # The last list stays, whatever it was; who asks at the home is told what is wrong.
            log.debug("the list of broker groups was not read", exc_info=error)
        # Also where it failed: a home that is away is asked once a second, and not by everybody.
        self._looked_at_s = time.monotonic()

    async def _try(
        self, address: str
    ) -> list[BrokerGroupClient] | ServiceError | grpc.aio.AioRpcError:
        """Return what `_list_from` returns or raises."""
        try:
            return await self._list_from(address)
        except (ServiceError, grpc.aio.AioRpcError) as error:
            return error

    async def _list_from(self, address: str) -> list[BrokerGroupClient]:
        """Return the list as the home of a broker has it."""
        client = await self.client_at(address)
        try:
            return await self._list_at(address, client, may_be_alone=len(self._seeds) == 1)
        except Forbidden:
            # It follows another, and says whom.
            address = (
                await client.call(calls.GET_CONFIG, pb.GetConfigRequest())
            ).membership.home_address
            return await self._list_at(address, await self.client_at(address))

    async def _list_at(
        self, address: str, home: BrokerClient, *, may_be_alone: bool = True
    ) -> list[BrokerGroupClient]:
        """Return the members as the home has them, which is asked at `address`."""
        listed = await home.call(
            calls.LIST_BROKER_GROUPS, pb.ListBrokerGroupsRequest(with_backlog=False)
        )
        found = []
        for group in listed.groups:
            if not (group.member.address or may_be_alone):
                # It was removed, or nobody has made a cluster of the seeds yet: it is no home.
                raise BrokerUnreachable(
                    f"{group.member.name} at {address} belongs to no cluster yet: one is made when"
                    f" a proxy reaches all of its brokers"
                )
            # One that is alone does not know under which address.
            at = group.member.address or address
            is_draining = group.member.state == pb.MEMBER_STATE_DRAINING
            client = home if group.is_home else await self.client_at(at)
            found.append(
                BrokerGroupClient(group.member.name, at, group.is_home, is_draining, client)
            )
        return sorted(found, key=lambda member: not member.is_home)

    def _take(self, members: Sequence[BrokerGroupClient]) -> None:
        self._members, self._looked_at_s = members, time.monotonic()
        needed = {*self._seeds, *(member.address for member in members)}
        for address in [one for one in self._connections if one not in needed]:
            # Calls that are under way there end with the connection.
            self._connections.pop(address).is_over.set()

    # ------------------------------------------------------------ asking all

    async def ask_all(self, ask: Callable[[BrokerGroupClient], Awaitable[T]]) -> BrokerAnswers[T]:
        """Ask all at once, each at most for the request timeout.

        Who does not know what is asked for has no answer. Raises why where nobody has one:
        BrokerGroupUnreachable when one who is away might.
        """
        members = await self.members()
        results = await asyncio.gather(
            *(self._ask(member, ask) for member in members), return_exceptions=True
        )
        answers: list[BrokerAnswer[T]] = []
        unreachable: list[str] = []
        refusal: BaseException | None = None
        for member, result in zip(members, results, strict=True):
            if isinstance(result, UNREACHABLE_ERRORS):
                unreachable.append(member.name)
                refusal = refusal or result
            elif isinstance(result, UNKNOWN_ERRORS):
                refusal = refusal or result
            elif isinstance(result, BaseException):
                raise result
            else:
                answers.append(BrokerAnswer(member.name, result))
        if not answers:
            assert refusal is not None, "there is a home, and it has answered or not"
            if unreachable and len(members) > 1:
                raise BrokerGroupUnreachable(
                    f"{_named(unreachable)} cannot be reached, and those that can have none"
                    f" ({refusal})"
                )
            raise refusal
        return BrokerAnswers(answers, unreachable)

    async def ask_home(self, ask: Callable[[BrokerGroupClient], Awaitable[T]]) -> BrokerAnswers[T]:
        """Ask the home; while it is away all others say what they have heard of it."""
        members = await self.members()
        try:
            return BrokerAnswers(
                [BrokerAnswer(members[0].name, await self._ask(members[0], ask))], []
            )
        except UNREACHABLE_ERRORS:
            if len(members) == 1:
                raise
        return await self.ask_all(ask)

    async def change_all(
        self,
        check: Callable[[BrokerGroupClient], Awaitable[T]],
        change: Callable[[BrokerGroupClient], Awaitable[T]],
    ) -> list[BrokerAnswer[T]]:
        """Change something at all, or at nobody if one of them is away or refuses.

        Raises BrokerGroupUnreachable, which says where it was done when one went away in between.
        """
        checked = await self.ask_all(check)
        if checked.unreachable:
            raise BrokerGroupUnreachable(
                f"{_named(checked.unreachable)} cannot be reached: nothing was done"
            )
        done = await self.ask_all(change)
        if done.unreachable:
            names = _named([answer.broker for answer in done.answers])
            raise BrokerGroupUnreachable(
                f"{_named(done.unreachable)} went away: it was done at {names} only; do it again"
            )
        return done.answers

    async def _ask(
        self, member: BrokerGroupClient, ask: Callable[[BrokerGroupClient], Awaitable[T]]
    ) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await ask(member)
        except TimeoutError:
            raise BrokerTimeout(f"{member.name} did not answer in time") from None


def _named(names: Sequence[str]) -> str:
    plural = "s" if len(names) > 1 else ""
    return f"broker group{plural} {', '.join(names)}"
