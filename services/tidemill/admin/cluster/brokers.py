"""The broker groups of the cluster: one client for each, and calls to all of them at once.

The home stores the list of broker groups. A request reads the list again if the last one is older
than a second. While the home is unreachable, the last list is used. Each member knows the address
of the home, so one reachable broker in the settings is enough.

A call to all broker groups returns the replies and the names of the unreachable broker groups.
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
from tidemill.admin.cluster.calls import BrokerCall
from tidemill.common.errors import (
    BrokerGroupNotFound,
    BrokerGroupUnreachable,
    BrokerTimeout,
    BrokerUnreachable,
    DedupKeyNotFound,
    Draining,
    Forbidden,
    GroupNotFound,
    MessageNotFound,
    Overloaded,
    ServiceError,
    TopicNotFound,
    TransactionNotFound,
)
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

log = structlog.get_logger()

REFRESH_PERIOD_S: Final = 1.0  # the list of a proxy may be as old
REFRESH_WAIT_S: Final = 0.5  # then a request uses the last list: the home is unreachable or slow
# An operator should know of a longer silence of a member: a failover and a restart take less.
MEMBER_UNREACHABLE_MS: Final = 10_000
# Answers with messages have up to 4 MiB at a broker, and 10 MB as JSON.
LARGE_READS_MAX: Final = 8
LARGE_READ_WAIT_S: Final = 5.0
SCANS_MAX: Final = 4  # each reads up to 100,000 dead letters per call at each broker group

T = TypeVar("T")
Q = TypeVar("Q")
Connect: TypeAlias = Callable[[str], AbstractAsyncContextManager[BrokerClient]]

# The broker is unreachable, so its contents are unknown.
UNREACHABLE_ERRORS: Final = (BrokerUnreachable, BrokerTimeout, Draining)
# The broker does not know the resource; another broker may.
UNKNOWN_ERRORS: Final = (
    TopicNotFound,
    GroupNotFound,
    MessageNotFound,
    TransactionNotFound,
    DedupKeyNotFound,
)


class BrokerGroupClient(NamedTuple):
    """A broker group and its client."""

    name: str
    address: str
    is_home: bool
    is_draining: bool
    client: BrokerClient
    unreachable_ms: int = 0  # time for which it has not answered the home
    reason: str = ""  # why it does not answer the home

    def describe_problem(self) -> str:
        """Return why the home cannot reach it; empty if it can, or could some seconds ago."""
        if self.unreachable_ms < MEMBER_UNREACHABLE_MS:
            return ""
        reason = self.reason or "it is connected and does not answer"
        return f"the home has not reached it for {self.unreachable_ms // 1_000} s: {reason}"


class BrokerAnswer(NamedTuple, Generic[T]):
    """The reply of one broker group."""

    broker: str
    value: T


class BrokerAnswers(NamedTuple, Generic[T]):
    """The replies of the reachable broker groups, the home first, and the unreachable names."""

    answers: list[BrokerAnswer[T]]
    unreachable: list[str]


class _BrokerConnection(NamedTuple):
    client: asyncio.Future[BrokerClient]
    is_over: asyncio.Event


@final
class Brokers:
    """Clients of all broker groups, and the list of them."""

    def __init__(self, seeds: Sequence[str], connect: Connect, *, timeout_ms: int) -> None:
        self._seeds = list(seeds)
        self._connect = connect
        self._timeout_s = timeout_ms / 1000
        self._connections: dict[str, _BrokerConnection] = {}  # by address
        self._members: Sequence[BrokerGroupClient] = ()  # the home first; () before the first list
        self._refreshed_at_s = 0.0
        self._refresh_task: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup
        self._large_reads = asyncio.Semaphore(LARGE_READS_MAX)
        self._scans = asyncio.Semaphore(SCANS_MAX)

    def large_read(self) -> AbstractAsyncContextManager[None]:
        """Run a call with a large answer; wait if there are many others. Raises Overloaded."""
        return _wait_for_turn(
            self._large_reads,
            f"{LARGE_READS_MAX} reads of messages run already; try again later, or read less with"
            " maxBytes",
        )

    def scan(self) -> AbstractAsyncContextManager[None]:
        """Run a call that reads many messages; wait if there are others. Raises Overloaded."""
        return _wait_for_turn(
            self._scans, f"{SCANS_MAX} searches for dead letters run already; try again later"
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the connections until the block ends."""
        async with asyncio.TaskGroup() as self._tasks:
            for address in self._seeds:
                await self.client_at(address)
            yield
            if self._refresh_task is not None:
                self._refresh_task.cancel()
            for connection in self._connections.values():
                connection.is_over.set()

    async def client_at(self, address: str) -> BrokerClient:
        """Return the client of the broker at an address; connect if needed."""
        connection = self._connections.get(address)
        if connection is None:
            opened = asyncio.get_running_loop().create_future()
            connection = self._connections[address] = _BrokerConnection(opened, asyncio.Event())
            self._tasks.create_task(self._keep(address, connection), name=f"broker at {address}")
        # A cancelled caller must not cancel the connection, which others share.
        return await asyncio.shield(connection.client)

    async def _keep(self, address: str, connection: _BrokerConnection) -> None:
        async with self._connect(address) as client:
            connection.client.set_result(client)
            await connection.is_over.wait()

    # ------------------------------------------------------------ list of members

    def problems(self) -> list[str]:
        """Return a line per broker group that the home cannot reach, by the last list."""
        return [
            f"{member.name}: {problem}"
            for member in self._members
            if (problem := member.describe_problem())
        ]

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Keep the list new, also without requests, until the block ends."""
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._refresh_periodically(), name="members")
            yield
            watching.cancel()

    async def _refresh_periodically(self) -> None:
        while True:
            with contextlib.suppress(ServiceError, grpc.aio.AioRpcError):
                await self.members()
            await asyncio.sleep(REFRESH_PERIOD_S)

    async def members(self) -> Sequence[BrokerGroupClient]:
        """Return all broker groups, the home first; raise BrokerUnreachable without any list."""
        if not self._members:
            await self.refresh()
        elif time.monotonic() - self._refreshed_at_s >= REFRESH_PERIOD_S:
            if self._refresh_task is None or self._refresh_task.done():
                self._refresh_task = self._tasks.create_task(
                    self._try_refresh(), name="list of brokers"
                )
            await asyncio.wait([self._refresh_task], timeout=REFRESH_WAIT_S)
        return self._members

    async def home(self) -> BrokerClient:
        """Return the client of the home, which stores topics, consumer groups and members."""
        return (await self.members())[0].client

    async def member(self, name: str) -> BrokerGroupClient:
        """Return a broker group by name; raise BrokerGroupNotFound."""
        members = await self.members()
        for member in members:
            if member.name == name:
                return member
        known = ", ".join(member.name for member in members)
        raise BrokerGroupNotFound(f"there is no broker group {name!r}; there are {known}")

    async def refresh(self) -> None:
        """Read the list from the home. Before the home is known, ask all seeds."""
        if self._members:
            home = self._members[0]
            self._replace_members(await self._list_at(home.address, home.client))
            return
        attempts = [asyncio.ensure_future(self._try_list_from(address)) for address in self._seeds]
        refusals = []
        try:
            for attempt in asyncio.as_completed(attempts):
                members = await attempt
                if not isinstance(members, Exception):
                    self._replace_members(members)
                    return
                refusals.append(members)
        finally:
            for pending in attempts:
                pending.cancel()
        raise refusals[0]

    async def _try_refresh(self) -> None:
        try:
            await self.refresh()
        except Exception as error:
            # The last list stays in use. A call to the home reports the error to its caller.
            log.debug("list of broker groups not read", exc_info=error)
        # After a failure too: an unreachable home is asked once per second, not by each request.
        self._refreshed_at_s = time.monotonic()

    async def _try_list_from(
        self, address: str
    ) -> list[BrokerGroupClient] | ServiceError | grpc.aio.AioRpcError:
        """Return what `_list_from` returns or raises."""
        try:
            return await self._list_from(address)
        except (ServiceError, grpc.aio.AioRpcError) as error:
            return error

    async def _list_from(self, address: str) -> list[BrokerGroupClient]:
        """Ask a broker for its home, and return the list of that home."""
        client = await self.client_at(address)
        try:
            return await self._list_at(address, client, may_be_alone=len(self._seeds) == 1)
        except Forbidden:
            # This broker is not the home; it knows the address of the home.
            address = (
                await client.call(calls.GET_CONFIG, pb.GetConfigRequest())
            ).membership.home_address
            return await self._list_at(address, await self.client_at(address))

    async def _list_at(
        self, address: str, home: BrokerClient, *, may_be_alone: bool = True
    ) -> list[BrokerGroupClient]:
        """Return the members in the list of the home at `address`."""
        listed = await home.call(
            calls.LIST_BROKER_GROUPS, pb.ListBrokerGroupsRequest(with_backlog=False)
        )
        found = []
        for group in listed.groups:
            if not (group.member.address or may_be_alone):
                # It was removed, or no proxy has formed the cluster yet, so it is not a home.
                raise BrokerUnreachable(
                    f"{group.member.name} at {address} does not belong to a cluster yet; a proxy"
                    f" forms the cluster when it reaches all brokers of its settings"
                )
            # A broker group that is alone does not know its own address.
            at = group.member.address or address
            is_draining = group.member.state == pb.MEMBER_STATE_DRAINING
            client = home if group.is_home else await self.client_at(at)
            found.append(
                BrokerGroupClient(
                    group.member.name,
                    at,
                    group.is_home,
                    is_draining,
                    client,
                    group.unreachable_ms,
                    group.reason,
                )
            )
        return sorted(found, key=lambda member: not member.is_home)

    def _replace_members(self, members: Sequence[BrokerGroupClient]) -> None:
        self._members, self._refreshed_at_s = members, time.monotonic()
        needed = {*self._seeds, *(member.address for member in members)}
        for address in [one for one in self._connections if one not in needed]:
            # Calls in flight end with the connection.
            self._connections.pop(address).is_over.set()

    # ------------------------------------------------------------ calls to all

    async def call_all(self, call: BrokerCall[Q, T], request: Q) -> BrokerAnswers[T]:
        """Send one request to all broker groups, as `ask_all` does."""
        return await self.ask_all(lambda member: member.client.call(call, request))

    async def ask_all(self, ask: Callable[[BrokerGroupClient], Awaitable[T]]) -> BrokerAnswers[T]:
        """Ask all broker groups at once, each at most for the request timeout.

        A broker group that does not know the resource adds no answer. Without any answer, raise the
        reason: BrokerGroupUnreachable if an unreachable broker group may know the resource.
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
            assert refusal is not None, "the home answered or failed"
            if unreachable and len(members) > 1:
                raise BrokerGroupUnreachable(
                    f"{_list_names(unreachable)} cannot be reached, and the other broker groups do"
                    f" not have it ({refusal})"
                )
            raise refusal
        return BrokerAnswers(answers, unreachable)

    async def call_home(self, call: BrokerCall[Q, T], request: Q) -> BrokerAnswers[T]:
        """Send a request to the home. While the home is unreachable, send it to all others."""
        members = await self.members()
        home = members[0]
        try:
            reply = await self._ask(home, lambda member: member.client.call(call, request))
        except UNREACHABLE_ERRORS:
            if len(members) == 1:
                raise
            return await self.call_all(call, request)
        return BrokerAnswers([BrokerAnswer(home.name, reply)], [])

    async def change_all(
        self, call: BrokerCall[Q, T], *, dry_run: Q, request: Q, home_first: bool = False
    ) -> list[BrokerAnswer[T]]:
        """Send `request` to all broker groups if `dry_run` succeeds at all of them.

        With `home_first`, the home changes first, because only the home compares the version that
        the request expects. Raises BrokerGroupUnreachable. If a broker group became unreachable
        after the dry run, the error names the broker groups that applied the change.
        """
        checked = await self.call_all(call, dry_run)
        if checked.unreachable:
            raise BrokerGroupUnreachable(
                f"{_list_names(checked.unreachable)} cannot be reached: nothing was done; try again"
                f" when all broker groups are up"
            )
        changed = await self._change_each(call, request, home_first=home_first)
        if changed.unreachable:
            names = _list_names([answer.broker for answer in changed.answers])
            raise BrokerGroupUnreachable(
                f"{_list_names(changed.unreachable)} became unreachable: the change was applied at"
                f" {names} only; repeat the request"
            )
        return changed.answers

    async def _change_each(
        self, call: BrokerCall[Q, T], request: Q, *, home_first: bool
    ) -> BrokerAnswers[T]:
        members = await self.members()
        if not home_first or len(members) == 1:
            return await self.call_all(call, request)
        home = members[0]
        done = asyncio.ensure_future(self._ask(home, lambda each: each.client.call(call, request)))
        await done

        def ask(member: BrokerGroupClient) -> Awaitable[T]:
            is_home = member.name == home.name
            return done if is_home else member.client.call(call, request)

        return await self.ask_all(ask)

    async def _ask(
        self, member: BrokerGroupClient, ask: Callable[[BrokerGroupClient], Awaitable[T]]
    ) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await ask(member)
        except TimeoutError:
            raise BrokerTimeout(
                f"broker group {member.name} did not answer within {self._timeout_s:g} s"
            ) from None


@contextlib.asynccontextmanager
async def _wait_for_turn(slots: asyncio.Semaphore, refusal: str) -> AsyncIterator[None]:
    """Hold a slot during the block; wait for a free one for a bounded time. Raises Overloaded."""
    try:
        async with asyncio.timeout(LARGE_READ_WAIT_S):
            await slots.acquire()
    except TimeoutError:
        raise Overloaded(refusal) from None
    try:
        yield
    finally:
        slots.release()


def _list_names(names: Sequence[str]) -> str:
    plural = "s" if len(names) > 1 else ""
    return f"broker group{plural} {', '.join(names)}"
