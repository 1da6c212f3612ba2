"""Questions to all processes of the cluster, or to one of them by name (ADR 0094).

The admin process answers itself. Brokers, their replicas and the controllers are called at their
addresses, and proxies through a broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar, final

import grpc

from tidemill.admin.cluster.controllers import ControllerClients, short_channel
from tidemill.admin.cluster.proxies import ALL_PROXIES, ProxyRoute, ask_proxy, find_proxies
from tidemill.admin.scaling.shared_answer import SharedAnswer
from tidemill.common.errors import (
    BadRequest,
    Conflict,
    NotBuilt,
    ProcessNotFound,
    ProcessUnreachable,
    ServiceError,
    from_wire,
)
from tidemill.message.similar_names import find_similar
from tidemill.stubs.tidemill.broker.v1 import broker_pb2
from tidemill.stubs.tidemill.process.v1 import process_pb2 as pb
from tidemill.stubs.tidemill.process.v1 import process_pb2_grpc

if TYPE_CHECKING:
    from tidemill.admin.cluster.brokers import Brokers
    from tidemill.transport.aio.process_service import ProcessService
    from tidemill.transport.aio.tls import ReloadableCredentials

# Enough for a busy process; one that hangs delays the whole answer by this time.
ANSWER_TIMEOUT_MS: Final = 2_000
# Of the descriptions for the overview. Pages read it every second, and each question to all
# processes makes new connections.
RECENT_AGE_S_MAX: Final = 30.0
CONTROLLERS: Final = "records of the controllers"

T = TypeVar("T")


class ProcessAnswered(NamedTuple):
    """The answer of one process."""

    value: pb.ProcessAnswer
    # The difference of its wall clock to that of this process, to half the time of the call.
    skew_ms: int


class ProcessAnswers(NamedTuple):
    """The answers of the reachable processes by name, and the addresses of the others."""

    answers: list[ProcessAnswered]
    unreachable: list[str]


class _Route(NamedTuple):
    label: str  # of the process in `unreachable`: its name if it is known, or its address
    ask: Callable[[pb.ProcessQuestion], Awaitable[pb.ProcessAnswer]]


@final
class Processes:
    """The processes of the cluster."""

    def __init__(
        self,
        own: ProcessService,
        brokers: Brokers,
        controllers: ControllerClients,
        credentials: ReloadableCredentials[grpc.ChannelCredentials] | None,
    ) -> None:
        self._own = own
        self._brokers = brokers
        self._controllers = controllers
        self._credentials = credentials
        self._recent: SharedAnswer[ProcessAnswers]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve `describe_recently` until the block ends."""
        async with asyncio.TaskGroup() as tasks:
            question = pb.ProcessQuestion(describe=pb.DescribeProcess())
            self._recent = SharedAnswer(
                lambda: self.ask_all(question), tasks, age_s_max=RECENT_AGE_S_MAX
            )
            yield

    async def describe_recently(self) -> ProcessAnswers:
        """Return the descriptions of all processes, at most `RECENT_AGE_S_MAX` old."""
        return await self._recent.get()

    async def ask_all(self, question: pb.ProcessQuestion) -> ProcessAnswers:
        """Ask all processes at the same time. A rejection is listed like a missing answer."""
        routes, unreachable = await self._routes()
        found = await asyncio.gather(*(_ask(route, question) for route in routes))
        answers: list[ProcessAnswered] = []
        for each in found:
            if isinstance(each, str):
                unreachable.append(each)
            elif each.value.error:
                unreachable.append(f"{each.value.name}: {each.value.message}")
            else:
                answers.append(each)
        answers.sort(key=lambda each: each.value.name)
        return ProcessAnswers(answers, sorted(unreachable))

    async def ask(self, name: str, question: pb.ProcessQuestion) -> ProcessAnswered:
        """Ask the process with a name.

        Raises ProcessNotFound, ProcessUnreachable, Conflict, or the rejection of the process.
        """
        routes, unreachable = await self._routes()
        named = [route for route in routes if route.label == name]
        if not named:
            # Its name may differ from the one in the list of broker groups.
            found = await self._describe(routes, unreachable)
            named = [route for route, known in found if known == name]
            if not named:
                raise _unknown(name, [known for _, known in found], unreachable)
        if len(named) > 1:
            raise Conflict(
                f"{len(named)} processes have the name {name!r}; give each its own name (--name or"
                " --node-id)"
            )
        answer = await _ask(named[0], question)
        if isinstance(answer, str):
            raise ProcessUnreachable(f"process {answer} did not answer in time; try again")
        if answer.value.error:
            raise from_wire(answer.value.error, f"{name}: {answer.value.message}")
        return answer

    async def _describe(
        self, routes: list[_Route], unreachable: list[str]
    ) -> list[tuple[_Route, str]]:
        """Return the names of all processes; add those without an answer to `unreachable`."""
        question = pb.ProcessQuestion(describe=pb.DescribeProcess())
        found = await asyncio.gather(*(_ask(route, question) for route in routes))
        unreachable += [each for each in found if isinstance(each, str)]
        return [
            (route, each.value.name)
            for route, each in zip(routes, found, strict=True)
            if isinstance(each, ProcessAnswered)
        ]

    async def _routes(self) -> tuple[list[_Route], list[str]]:
        """Return the routes to all known processes, and the names of unknown parts."""
        unreachable: list[str] = []
        members, replicas, proxies = await asyncio.gather(
            _in_time(self._brokers.members(), "all brokers", unreachable),
            _in_time(self._replicas(), CONTROLLERS, unreachable),
            _in_time(find_proxies(self._brokers), ALL_PROXIES, unreachable),
        )
        addresses = {member.address: member.name for member in members or ()}
        for address in self._controllers.addresses:
            addresses[address] = f"controller at {address}"
        addresses.update(replicas or {})
        if proxies is not None and not proxies.proxies:
            unreachable.append(ALL_PROXIES)
        return [
            _Route(self._own.name, self._own.Ask),
            *(_Route(label, self._at(address)) for address, label in addresses.items()),
            *(
                _Route(proxy.name, _through_broker(proxy))
                for proxy in (() if proxies is None else proxies.proxies)
            ),
        ], unreachable

    async def _replicas(self) -> dict[str, str]:
        """Return the names of all replicas by their addresses; none without controllers."""
        if not self._controllers.are_configured:
            return {}
        return {
            replica.address: f"{group.name}-{replica.replica_id}"
            for group in await self._controllers.groups()
            for replica in group.replicas
        }

    def _at(self, address: str) -> Callable[[pb.ProcessQuestion], Awaitable[pb.ProcessAnswer]]:
        async def ask(question: pb.ProcessQuestion) -> pb.ProcessAnswer:
            try:
                async with short_channel(address, self._credentials) as channel:
                    stub = process_pb2_grpc.ProcessAdminStub(channel)
                    return await stub.Ask(question, timeout=ANSWER_TIMEOUT_MS / 1_000)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    raise NotBuilt(f"the process at {address} has an older version") from None
                details = error.details() or error.code().name
                raise ProcessUnreachable(f"the process at {address}: {details}") from None

        return ask


def _through_broker(
    proxy: ProxyRoute,
) -> Callable[[pb.ProcessQuestion], Awaitable[pb.ProcessAnswer]]:
    async def ask(question: pb.ProcessQuestion) -> pb.ProcessAnswer:
        wrapped = broker_pb2.ProxyQuestion(process=question)
        return (await ask_proxy(proxy, wrapped, ANSWER_TIMEOUT_MS)).process

    return ask


async def _in_time(asked: Awaitable[T], label: str, unreachable: list[str]) -> T | None:
    """Return an answer; None without one in time, and `label` is then unreachable."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_MS / 1_000):
            return await asked
    except (TimeoutError, ServiceError):
        unreachable.append(label)
        return None


async def _ask(route: _Route, question: pb.ProcessQuestion) -> ProcessAnswered | str:
    """Return the answer of a process, or the label of a process that does not answer."""
    began_ms = time.time_ns() // 1_000_000
    try:
        answer = await route.ask(question)
    except (NotBuilt, BadRequest):
        return f"{route.label} (older version, without this question)"
    except ServiceError:
        return route.label
    middle_ms = (began_ms + time.time_ns() // 1_000_000) // 2
    return ProcessAnswered(answer, answer.description.wall_ms - middle_ms)


def _unknown(name: str, known: list[str], unreachable: list[str]) -> ServiceError:
    if unreachable:
        return ProcessUnreachable(
            f"process {name!r} does not answer, or is unknown; without an answer:"
            f" {', '.join(unreachable)}"
        )
    similar = find_similar(name, known)
    nearest = f"; did you mean {similar}?" if similar else f"; there are {', '.join(known)}"
    return ProcessNotFound(f"there is no process {name!r}{nearest}")
