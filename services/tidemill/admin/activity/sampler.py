"""One task that reads the counts of all broker groups every 5 s, for REST and the console."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple, final

import grpc
import structlog

from tidemill.admin.activity import disks
from tidemill.admin.activity.disks import DiskForecast, DiskForecasts, DiskPoint
from tidemill.admin.activity.history import History, HistoryKey, HistoryObject, Point
from tidemill.admin.activity.numbers import (
    BrokerSample,
    ClusterNumbers,
    Consumers,
    GroupNumbers,
    SamplePair,
    TopicNumbers,
)
from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import BrokerGroupClient, Brokers
from tidemill.admin.cluster.proxies import list_clients
from tidemill.common.clock import Clock
from tidemill.common.errors import ServiceError
from tidemill.common.slices import run_in_turns
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

PERIOD_S: Final = 5.0
STALE_MS: Final = 20_000  # an older sample is not shown; a slow broker group takes some seconds
CLIENTS_MAX: Final = 1_000  # read per sample, up to a kilobyte each
PAGES_MAX: Final = 1_000  # of one broker group: two million topics

NO_SAMPLE: Final = "there is no sample yet; try again in 5 s"

log = structlog.get_logger()


class Reading(NamedTuple):
    """The newest numbers; or None, and the reason."""

    numbers: ClusterNumbers | None
    reason: str


@final
class ActivitySampler:
    """Samples all broker groups, and keeps their numbers and a history."""

    def __init__(self, brokers: Brokers, clock: Clock) -> None:
        self._brokers = brokers
        self._clock = clock
        self._samples: dict[str, BrokerSample] = {}  # of the broker groups that answered last
        self._numbers: ClusterNumbers | None = None
        self._sampled_ms = 0  # by the monotonic clock
        self._problem = NO_SAMPLE
        self.history = History()
        self._disks = DiskForecasts()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Sample periodically until the block ends."""
        async with asyncio.TaskGroup() as tasks:
            sampling = tasks.create_task(self._sample_periodically(), name="activity sampler")
            yield
            sampling.cancel()

    async def _sample_periodically(self) -> None:
        loop = asyncio.get_running_loop()
        disks_at_s = 0.0
        while True:
            next_s = loop.time() + PERIOD_S
            await self.sample()
            if loop.time() >= disks_at_s:
                disks_at_s = loop.time() + disks.PERIOD_MS / 1_000
                await self.sample_disks()
            await asyncio.sleep(max(next_s - loop.time(), 0))

    def disk_forecast(self, broker: str) -> DiskForecast:
        """Return when the disk of a broker group is full."""
        return self._disks.of(broker, now_ms=self._clock.monotonic_ms())

    async def sample_disks(self) -> None:
        """Read the disks of all broker groups once. One without an answer adds no point."""
        request = pb.GetStorageRequest(topics_max=1)
        try:
            members = await self._brokers.members()
            found = await self._brokers.call_all(calls.GET_STORAGE, request)
        except (ServiceError, grpc.aio.AioRpcError) as error:
            log.info("disks not sampled", reason=_text(error))
            return
        except Exception:
            # A defect in one sample must not end the sampler; the log shows it each time.
            log.exception("sample of disks failed")
            return
        self._disks.forget_unless(frozenset(member.name for member in members))
        for broker, reply in found.answers:
            used_bytes = reply.total_bytes - reply.free_bytes
            room_bytes = reply.free_bytes - reply.reserve_bytes
            point = DiskPoint(self._clock.monotonic_ms(), used_bytes, room_bytes)
            self._disks.note(broker, point)

    def read(self) -> Reading:
        """Return the newest numbers. Numbers of an old sample are unknown."""
        numbers = self._numbers
        if numbers is None:
            return Reading(None, self._problem)
        age_ms = self._clock.monotonic_ms() - self._sampled_ms
        if age_ms > STALE_MS:
            return Reading(None, self._problem or f"the last sample is {age_ms // 1000} s old")
        return Reading(numbers, "")

    async def sample(self) -> None:
        """Read all broker groups once. Each failure is a reason for unknown numbers."""
        try:
            await self._sample()
            self._problem = ""
        except (ServiceError, grpc.aio.AioRpcError) as error:
            self._numbers, self._problem = None, f"no broker group has answered: {_text(error)}"
        except Exception:
            # A defect must not end the process, which serves without numbers.
            log.exception("sample of topics and consumer groups failed")
            self._numbers = None
            self._problem = "sampling failed; the log of the admin process has the error"

    async def _sample(self) -> None:
        members = await self._brokers.members()
        results = await asyncio.gather(
            *(self._read(member) for member in members), return_exceptions=True
        )
        pairs: dict[str, SamplePair] = {}
        unreachable: dict[str, str] = {}
        for member, result in zip(members, results, strict=True):
            if isinstance(result, ServiceError | grpc.aio.AioRpcError):
                unreachable[member.name] = _text(result)
            elif isinstance(result, BaseException):
                raise result
            else:
                old = self._samples.get(member.name)
                is_same_run = old is not None and old.run == result.run
                pairs[member.name] = SamplePair(result, old if is_same_run else None)
        now_ms = self._clock.wall_ms()
        numbers = ClusterNumbers(now_ms, unreachable, await self._count_consumers())
        await run_in_turns(numbers.add_all(pairs))
        self._samples = {name: pair.new for name, pair in pairs.items()}
        self._numbers, self._sampled_ms = numbers, self._clock.monotonic_ms()
        await run_in_turns(self.history.add(now_ms, _objects(numbers)))
        if not unreachable:
            self.history.forget_unless(lambda key: _is_known(key, numbers))

    async def _read(self, member: BrokerGroupClient) -> BrokerSample:
        """Read all pages of one broker group."""
        request = pb.GetActivityRequest()
        sample: BrokerSample | None = None
        for _ in range(PAGES_MAX):
            page = await member.client.call(calls.GET_ACTIVITY, request)
            if sample is None or sample.run != page.run:
                # After a failover between two pages, the later pages are of another process.
                sample = BrokerSample(page.run, page.read_ms, {}, {})
                if request != pb.GetActivityRequest():
                    request = pb.GetActivityRequest()
                    continue
            sample.topics.update((topic.name, topic) for topic in page.topics)
            sample.groups.update((group.name, group) for group in page.groups)
            if not page.HasField("next_page"):
                break
            request = page.next_page
        assert sample is not None, "a page was read"
        return sample

    async def _count_consumers(self) -> Consumers:
        """Count the connected consumers by group, of at most `CLIENTS_MAX` clients."""
        try:
            page = await list_clients(self._brokers, pb.ListClientsRequest(clients_max=CLIENTS_MAX))
        except (ServiceError, grpc.aio.AioRpcError) as error:
            return Consumers(None, f"the clients are unknown: {_text(error)}")
        if page.unreachable:
            names = ", ".join(page.unreachable)
            return Consumers(None, f"the clients are unknown: {names} cannot be reached")
        if page.has_more:
            return Consumers(
                None, f"consumers are counted only up to {CLIENTS_MAX:,} connected clients"
            )
        return Consumers(Counter(client.newest.group for _, client in page.clients))


def _is_known(key: HistoryKey, numbers: ClusterNumbers) -> bool:
    return key.name in (numbers.topics if key.kind == "topic" else numbers.groups)


def _objects(numbers: ClusterNumbers) -> Iterator[HistoryObject]:
    now_ms = numbers.sampled_at_ms
    by_kind: dict[str, Mapping[str, TopicNumbers | GroupNumbers]]
    by_kind = {"topic": numbers.topics, "group": numbers.groups}
    for kind, found in by_kind.items():
        for name, one in found.items():
            busyness = (one.in_per_second or 0) + (one.out_per_second or 0)
            busyness += one.ack_per_second or 0
            yield HistoryObject(HistoryKey(kind, name), busyness, partial(_point, one, now_ms))


def _point(one: TopicNumbers | GroupNumbers, now_ms: int) -> Point:
    """Return the numbers of the series, in their order."""
    oldest_ms = None if one.lag is None else _age_ms(one.oldest_unacked_at_ms, now_ms)
    return one.in_per_second, one.out_per_second, one.ack_per_second, one.lag, oldest_ms


def _age_ms(at_ms: int | None, now_ms: int) -> int:
    """Return the age of the oldest unacknowledged message; 0 if there is none."""
    return 0 if at_ms is None else max(now_ms - at_ms, 0)


def _text(error: ServiceError | grpc.aio.AioRpcError) -> str:
    if isinstance(error, ServiceError):
        return error.message
    return error.details() or error.code().name.lower()
