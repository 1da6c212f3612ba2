"""Sends that wait for permits: order, limits and texts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence

import pytest

from tests.support.clocks import ManualClock
from tests.support.security_items import counts_of
from tidemill.common.errors import BrokerUnreachable, Overloaded
from tidemill.proxy.quotas import sends
from tidemill.proxy.quotas.renewal import Leased
from tidemill.proxy.quotas.sends import SendQuotas
from tidemill.security.permit_buckets import LeaseDemand
from tidemill.security.quotas import (
    QUOTA,
    LimitKey,
    QuotaKind,
    QuotaLimit,
    QuotaTable,
    TrafficQuota,
    quota_of,
)
from tidemill.security.subjects import subject_name

MESSAGES, BYTES = QuotaLimit.PUBLISH_MESSAGES, QuotaLimit.PUBLISH_BYTES
USER_ID = 7  # of shop
STORED, TIMERS = QuotaLimit.STORED_BYTES, QuotaLimit.PENDING_TIMERS


class World:
    """Quotas over items in memory, and a home that grants what the test allows."""

    def __init__(self, *, wait_ms: int = 5_000) -> None:
        self.items: dict[str, bytes] = {}
        self.clock = ManualClock()
        self.table = QuotaTable(
            lambda _kind, name: self.items.get(name), lambda: counts_of(QUOTA, self.items)
        )
        self.available: dict[QuotaLimit, int] = {MESSAGES: 0, BYTES: 1 << 40}
        self.rooms: dict[QuotaLimit, int] = {}  # of stocks
        self.asked = 0
        self.is_up = True
        self.passed: list[int] = []
        self.quotas = SendQuotas(self.table, self.lease, self.clock.monotonic_ms, wait_ms=wait_ms)

    async def lease(self, demands: Sequence[LeaseDemand]) -> Leased:
        if not self.is_up:
            raise BrokerUnreachable("down")
        self.asked += 1
        granted: list[int] = []
        for demand in demands:
            limit = demand.key.limit
            if limit in self.rooms:
                permits = min(demand.wanted, self.rooms[limit])
                granted.append(permits if permits >= demand.first else 0)
                self.rooms[limit] += demand.returned - granted[-1]
                continue
            permits = min(demand.wanted, self.available[limit])
            self.available[limit] -= permits
            granted.append(permits)
        return Leased(granted, 1, [self.rooms.get(demand.key.limit) for demand in demands])

    def put(self, kind: QuotaKind, value: str, **limits: int) -> None:
        named = {QuotaLimit(name): rate for name, rate in limits.items()}
        user_id = USER_ID if kind is QuotaKind.USER else 0
        quota = TrafficQuota(kind=kind, value=value, user_id=user_id, limits=named)
        self.items[quota.name] = json.dumps(quota.to_item()).encode()
        self.table.note_change()

    def serve(self) -> None:
        """Let the sends with enough permits pass."""
        self.quotas.serve(list(self.quotas._book.leases.values()))

    async def until_passed(self, count: int) -> None:
        while len(self.passed) < count:  # noqa: ASYNC110  # The sends are the events.
            await asyncio.sleep(0.001)

    async def send(
        self,
        number: int = 0,
        *,
        client: str = "c",
        topic: str = "orders",
        group: str = "",
        other_group: str = "",
        messages: int = 1,
        timers: int = 0,
    ) -> None:
        groups = frozenset([group, other_group]) - {""}
        await self.quotas.admit(
            user="shop",
            user_id=USER_ID,
            client_id=client,
            topic=topic,
            messages=messages,
            size_bytes=100,
            timers=timers,
            message_groups=groups,
        )
        self.passed.append(number)


class QuotaWorld:
    """A table of quotas that notes which items it reads."""

    def __init__(self) -> None:
        self.items: dict[str, bytes] = {}
        self.read: list[str] = []
        self.table = QuotaTable(self._find, lambda: counts_of(QUOTA, self.items))

    def _find(self, _kind: str, name: str) -> bytes | None:
        self.read.append(name)
        return self.items.get(name)

    def put(self, kind: QuotaKind, value: str, **limits: int) -> None:
        named = {QuotaLimit(name): rate for name, rate in limits.items()}
        user_id = USER_ID if kind is QuotaKind.USER else 0
        quota = TrafficQuota(kind=kind, value=value, user_id=user_id, limits=named)
        self.items[quota.name] = json.dumps(quota.to_item()).encode()
        self.table.note_change(quota.name)

    def delete(self, name: str) -> None:
        del self.items[name]
        self.table.note_change(name)


def run(scenario: Callable[[World], Awaitable[None]], **options: int) -> None:
    async def main() -> None:
        world = World(**options)
        async with asyncio.timeout(20), world.quotas.running():
            await scenario(world)

    asyncio.run(main())


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_quota_is_stored_and_read_with_all_its_fields() -> None:
    quota = TrafficQuota(
        kind=QuotaKind.PREFIX,
        value="shop%",
        limits={MESSAGES: 5, BYTES: 7},
        created_at_ms=1,
        changed_at_ms=2,
        changed_by="ops",
    )
    item = quota.to_item()
    assert (item["op"], item["name"], quota.subject) == (QUOTA, "prefix:shop%25", "Prefix:shop%")
    assert quota_of(json.dumps(item).encode()) == quota


def test_a_quota_of_a_deleted_user_does_not_apply_to_a_later_one() -> None:
    world = QuotaWorld()
    world.put(QuotaKind.USER, "shop", publishMessagesPerS=1)
    assert [rate.amount for rate in world.table.limits_of("shop", USER_ID, "c", "t")] == [1]
    assert world.table.limits_of("shop", USER_ID + 1, "c", "t") == ()
    quota = quota_of(world.items["user:shop"])
    assert (quota.user_id, quota.to_item()[QUOTA]["userId"]) == (USER_ID, USER_ID)


def test_all_matching_quotas_apply() -> None:
    async def scenario(world: World) -> None:
        world.put(QuotaKind.USER, "shop", publishMessagesPerS=1)
        world.put(QuotaKind.CLIENT, "c", publishMessagesPerS=2)
        world.put(QuotaKind.TOPIC, "orders", publishBytesPerS=3)
        world.put(QuotaKind.PREFIX, "ord", publishMessagesPerS=4)
        world.put(QuotaKind.PREFIX, "other", publishMessagesPerS=5)
        assert world.quotas.is_active

        def rates(user: str, client: str, topic: str) -> list[int]:
            return sorted(
                rate.amount for rate in world.table.limits_of(user, USER_ID, client, topic)
            )

        assert rates("shop", "c", "orders") == [1, 2, 3, 4]
        assert rates("", "c", "order") == [2, 4]
        assert rates("x", "y", "z") == []

    run(scenario)


def test_without_quotas_a_send_checks_one_attribute() -> None:
    async def scenario(world: World) -> None:
        assert not world.quotas.is_active
        world.put(QuotaKind.TOPIC, "orders", publishMessagesPerS=1)
        assert world.table.limits_of("", 0, "c", "orders")
        world.items.clear()
        world.table.note_change()
        assert (world.quotas.is_active, world.table.limits_of("", 0, "c", "orders")) == (False, ())

    run(scenario)


def test_sends_wait_for_permits_and_pass_in_their_order() -> None:
    async def scenario(world: World) -> None:
        world.put(QuotaKind.TOPIC, "orders", publishMessagesPerS=10, publishBytesPerS=1_000)
        async with asyncio.TaskGroup() as tasks:
            for number in range(5):
                tasks.create_task(world.send(number))
            await turns()
            assert world.passed == []
            world.available[MESSAGES] = 2
            await world.until_passed(2)
            late = tasks.create_task(world.send(5))
            await turns()
            assert not late.done(), "it may not overtake the waiting ones"
            world.available[MESSAGES] = 100
        assert world.passed == [0, 1, 2, 3, 4, 5]

    run(scenario)


def test_a_send_is_refused_after_its_wait_with_the_used_up_limit() -> None:
    async def scenario(world: World) -> None:
        world.put(QuotaKind.USER, "shop", publishMessagesPerS=2)
        text = "publish messages/s of User:shop is used up; retry in 500 ms"
        with pytest.raises(Overloaded, match=text):
            await world.send()
        world.available[MESSAGES] = 10
        await world.send(1)
        assert world.passed == [1]

    run(scenario, wait_ms=30)


def test_a_refused_message_is_not_overtaken_by_its_message_group() -> None:
    async def scenario(world: World) -> None:
        world.put(QuotaKind.TOPIC, "orders", publishMessagesPerS=10)
        first = asyncio.create_task(world.send(0, group="a"))
        await turns()
        world.quotas._wait_s = 60.0  # of the later sends, which end before
        same = asyncio.create_task(world.send(1, group="a"))
        other = asyncio.create_task(world.send(2, group="b"))
        results = await asyncio.gather(first, same, return_exceptions=True)
        assert [type(result) for result in results] == [Overloaded, Overloaded]
        assert not other.done()
        world.available[MESSAGES] = 10
        await other
        assert world.passed == [2]

    run(scenario, wait_ms=30)


def test_a_send_with_permits_in_the_turn_of_its_time_out_is_not_overtaken() -> None:
    async def scenario(world: World) -> None:
        world.put(QuotaKind.TOPIC, "orders", publishMessagesPerS=10)

        async def send(number: int, *, wait_s: float) -> None:
            world.quotas._wait_s = wait_s
            await world.send(number, group="a")

        async def serve() -> None:
            for lease in world.quotas._book.leases.values():
                lease.permits = 2
            world.serve()

        await asyncio.gather(send(0, wait_s=0.0), send(1, wait_s=60.0), serve())
        assert world.passed == [0, 1]

    run(scenario)


def test_permits_in_the_turn_after_a_time_out_pass_no_later_message_of_the_group() -> None:
    async def scenario(world: World) -> None:
        world.put(QuotaKind.TOPIC, "orders", publishMessagesPerS=10)

        async def send(number: int, group: str, *, wait_s: float) -> None:
            world.quotas._wait_s = wait_s
            await world.send(number, group=group)

        async def serve() -> None:
            await asyncio.sleep(0)  # The time-out of the first send is earlier in this turn.
            for lease in world.quotas._book.leases.values():
                lease.permits = 1
            world.serve()

        results = await asyncio.gather(
            send(0, "a", wait_s=0.0),
            send(1, "a", wait_s=60.0),
            send(2, "b", wait_s=60.0),
            serve(),
            return_exceptions=True,
        )
        assert [type(result) for result in results[:2]] == [Overloaded, Overloaded]
        assert world.passed == [2]

    run(scenario)


def test_a_message_behind_a_refused_batch_of_several_groups_is_refused() -> None:
    """The batch waits behind a refused message of one group, so it is refused with it."""

    async def scenario(world: World) -> None:
        world.put(QuotaKind.TOPIC, "orders", publishMessagesPerS=10)
        first = asyncio.create_task(world.send(0, group="a"))
        await turns()
        world.quotas._wait_s = 60.0  # of the later sends, which end before
        batch = asyncio.create_task(world.send(1, group="a", other_group="b", messages=2))
        last = asyncio.create_task(world.send(2, group="b"))
        results = await asyncio.gather(first, batch, last, return_exceptions=True)
        assert [type(result) for result in results] == [Overloaded] * 3

    run(scenario, wait_ms=30)


def test_a_message_that_comes_in_the_turn_of_a_refusal_does_not_overtake_it() -> None:
    async def scenario(world: World) -> None:
        world.put(QuotaKind.TOPIC, "orders", storedBytes=1_000, publishMessagesPerS=10)
        world.rooms[STORED] = 1_000
        first = asyncio.create_task(world.send(0, group="a"))
        await turns()
        [stock] = [lease for lease in world.quotas._book.leases.values() if lease.is_stock]
        later = asyncio.create_task(world.send(1, group="a"))  # It begins in the next turn.
        stock.room = stock.permits = 0
        world.serve()
        stock.permits = 1_000
        results = await asyncio.gather(first, later, return_exceptions=True)
        assert [type(result) for result in results] == [Overloaded, Overloaded]

    run(scenario, wait_ms=60_000)


@pytest.mark.parametrize("change", ["deleted", "another remains", "added"])
def test_a_change_of_quotas_keeps_the_order_of_sends(change: str) -> None:
    async def scenario(world: World) -> None:
        world.put(QuotaKind.TOPIC, "orders", publishMessagesPerS=10)
        if change == "another remains":
            world.put(QuotaKind.TOPIC, "other", publishMessagesPerS=10)
        first = asyncio.create_task(world.send(0, group="a", messages=3))
        await turns()
        assert not first.done()
        if change == "added":
            world.put(QuotaKind.CLIENT, "c", publishMessagesPerS=100)
        else:
            del world.items["topic:orders"]
            world.table.note_change()
        second = asyncio.create_task(world.send(1, group="a"))
        await turns()
        for lease in world.quotas._book.leases.values():
            lease.permits = 1  # enough for the second one
        world.serve()
        await turns()
        world.available[MESSAGES] = 100
        await asyncio.gather(first, second)
        assert world.passed == [0, 1]
        assert world.quotas.is_active is (change != "deleted")
        await world.send(2)

    run(scenario)


def test_a_change_of_quotas_matches_no_waiting_send_of_another_sender() -> None:
    """The cost of a change does not grow with the clients that wait."""

    async def scenario(world: World) -> None:
        world.put(QuotaKind.TOPIC, "orders", publishMessagesPerS=1)
        waiting = [
            asyncio.create_task(world.send(number, client=f"c{number}", group="a"))
            for number in range(100)
        ]
        await turns()
        read: list[str] = []
        find = world.table._find_item

        def find_noted(kind: str, name: str) -> bytes | None:
            read.append(name)
            return find(kind, name)

        world.table._find_item = find_noted
        quota = TrafficQuota(kind=QuotaKind.CLIENT, value="c7", limits={BYTES: 1_000})
        world.items[quota.name] = json.dumps(quota.to_item()).encode()
        world.table.note_change(quota.name)
        assert read == []
        later = asyncio.create_task(world.send(100, client="c7", group="a"))
        await turns()
        assert read == ["client:c7"]
        world.available[MESSAGES] = 1_000
        await asyncio.gather(*waiting, later)
        assert world.passed.index(7) < world.passed.index(100)

    run(scenario)


def test_a_new_client_id_is_one_look_up() -> None:
    world = QuotaWorld()
    world.put(QuotaKind.PREFIX, "ord", publishMessagesPerS=1)
    world.put(QuotaKind.CLIENT, "a", publishMessagesPerS=2)
    assert len(world.table.limits_of("shop", USER_ID, "a", "orders")) == 2
    world.read.clear()
    for number in range(10):
        assert len(world.table.limits_of("shop", USER_ID, f"c{number}", "orders")) == 1
    assert world.read == [f"client:c{number}" for number in range(10)]


def test_a_changed_quota_is_read_again_and_others_are_not() -> None:
    world = QuotaWorld()
    long_id = "c" * 255

    def rates() -> list[int]:
        found = world.table.limits_of("shop", USER_ID, long_id, "shop%orders")
        return [*(rate.amount for rate in found), len(world.table.group_limits("billing"))]

    world.put(QuotaKind.USER, "shop", publishMessagesPerS=1)
    world.put(QuotaKind.CLIENT, long_id, publishMessagesPerS=2)
    world.put(QuotaKind.TOPIC, "shop%orders", publishMessagesPerS=3)
    world.put(QuotaKind.PREFIX, "shop%", publishMessagesPerS=4)
    assert rates() == [2, 3, 4, 1, 0]
    world.read.clear()
    world.put(QuotaKind.CLIENT, long_id, publishMessagesPerS=20)
    world.put(QuotaKind.USER, "shop", publishMessagesPerS=10)
    assert rates() == [20, 3, 4, 10, 0]
    assert world.read == [subject_name(QuotaKind.CLIENT, long_id), "user:shop"]
    world.put(QuotaKind.PREFIX, "shop%o", publishMessagesPerS=5)
    world.put(QuotaKind.GROUP, "billing", dispatchMessagesPerS=6)
    assert rates() == [20, 3, 4, 5, 10, 1]
    world.delete("topic:shop%25orders")
    world.delete("prefix:shop%25")
    world.delete("group:billing")
    assert rates() == [20, 5, 10, 0]


def test_the_waiting_sends_of_one_client_do_not_delay_another() -> None:
    async def scenario(world: World) -> None:
        world.put(QuotaKind.CLIENT, "greedy", publishMessagesPerS=1)
        waiting = asyncio.create_task(world.send(0, client="greedy"))
        await turns()
        await world.send(1, client="other")
        assert world.passed == [1]
        waiting.cancel()

    run(scenario)


def test_sends_that_wait_for_another_limit_do_not_delay_those_with_permits() -> None:
    async def scenario(world: World) -> None:
        world.put(QuotaKind.CLIENT, "greedy", publishMessagesPerS=1)
        world.put(QuotaKind.TOPIC, "orders", publishBytesPerS=1_000_000)
        waiting = asyncio.create_task(world.send(0, client="greedy"))
        await turns()
        await world.send(1, client="other")  # The proxy has its use, so it leases for the next one.
        lease = world.quotas._book.leases[LimitKey("topic:orders", BYTES)]
        while lease.permits < 300:  # noqa: ASYNC110  # The renewals are the events.
            await asyncio.sleep(0.001)
        at_once = asyncio.create_task(world.send(2, client="other"))
        await asyncio.sleep(0)
        assert at_once.done()
        assert lease.permits >= 100, "those of the waiting send stay"
        lease.permits = 150
        late = asyncio.create_task(world.send(3, client="other"))
        await asyncio.sleep(0)
        assert not late.done()
        waiting.cancel()
        await late

    run(scenario)


@pytest.mark.parametrize("bound", ["WAITING_MAX", "WAITING_BYTES_MAX"])
def test_the_number_and_the_bytes_of_waiting_sends_have_a_limit(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sends, bound, 4 if bound == "WAITING_MAX" else 400)

    async def scenario(world: World) -> None:
        world.put(QuotaKind.TOPIC, "orders", publishMessagesPerS=10)
        waiting = [asyncio.create_task(world.send(number)) for number in range(2)]
        await turns()
        with pytest.raises(Overloaded, match="used up"):
            await world.send(2)
        waiting[0].cancel()
        await turns()
        third = asyncio.create_task(world.send(3))
        await turns()
        assert not third.done(), "the place of the cancelled one is free"
        world.available[MESSAGES] = 10
        await asyncio.gather(waiting[1], third)
        assert world.passed == [1, 3]

    run(scenario)


@pytest.mark.parametrize("bound", ["WAITING_MAX", "WAITING_BYTES_MAX"])
def test_one_sender_over_its_limit_leaves_places_to_others(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sends, bound, 10 if bound == "WAITING_MAX" else 1_000)

    async def scenario(world: World) -> None:
        world.put(QuotaKind.CLIENT, "greedy", publishMessagesPerS=1)
        world.put(QuotaKind.CLIENT, "modest", publishMessagesPerS=1_000)
        greedy = [asyncio.create_task(world.send(client="greedy")) for _ in range(20)]
        await turns()
        modest = [asyncio.create_task(world.send(client="modest")) for _ in range(2)]
        await turns()
        assert [task.done() for task in modest] == [False, False], "they wait for the home"
        assert sum(not task.done() for task in greedy) == 5
        world.available[MESSAGES] = 100
        await asyncio.gather(*modest)
        await asyncio.gather(*greedy, return_exceptions=True)

    run(scenario)


def test_without_the_home_sends_use_a_local_bucket() -> None:
    async def scenario(world: World) -> None:
        world.is_up = False
        world.put(QuotaKind.TOPIC, "orders", publishMessagesPerS=10)
        sending = asyncio.create_task(world.send())
        await turns()
        assert not sending.done(), "the home may answer soon"
        while not sending.done():  # The loop of the leases has no event.
            world.clock.advance(300)
            await asyncio.sleep(0.005)
        assert world.passed == [0]

    run(scenario)


# ------------------------------------------------------------ stocks


@pytest.mark.parametrize("room", [99, 100])
def test_a_send_passes_up_to_the_last_byte_of_a_stock(room: int) -> None:
    async def scenario(world: World) -> None:
        world.rooms[STORED] = room
        world.put(QuotaKind.TOPIC, "orders", storedBytes=1_000)
        if room == 100:
            await world.send()
        with pytest.raises(Overloaded) as refused:
            await world.send(1)
        assert refused.value.message == (
            "Topic:orders has reached its limit of 1000 stored bytes; retry when there is room"
            " again"
        )
        assert world.passed == [0] * (room == 100)

    run(scenario)


def test_a_send_to_a_full_stock_does_not_wait_and_does_not_ask_the_home() -> None:
    async def scenario(world: World) -> None:
        world.rooms[STORED] = 0
        world.put(QuotaKind.TOPIC, "orders", storedBytes=1_000)
        with pytest.raises(Overloaded):
            await world.send()
        asked = world.asked
        for _ in range(sends.WAITING_MAX + 1):
            with pytest.raises(Overloaded):
                await world.send()
        assert world.asked == asked
        world.rooms[STORED] = 150
        await world.quotas._renewal.renew()
        await world.send(1)
        assert world.passed == [1]

    run(scenario)


def test_only_delayed_messages_need_room_for_timers() -> None:
    async def scenario(world: World) -> None:
        world.rooms[TIMERS] = 2
        world.put(QuotaKind.PREFIX, "ord", pendingTimers=2)
        await world.send(0, timers=2, messages=3)
        with pytest.raises(
            Overloaded, match="Prefix:ord has reached its limit of 2 pending timers"
        ):
            await world.send(1, timers=1)
        await world.send(2)
        assert world.passed == [0, 2]

    run(scenario)


def test_a_message_refused_by_a_stock_is_not_overtaken_by_its_message_group() -> None:
    async def scenario(world: World) -> None:
        world.rooms[TIMERS] = 0
        world.put(QuotaKind.TOPIC, "orders", publishMessagesPerS=10, pendingTimers=5)
        results = await asyncio.gather(
            world.send(0, group="a", timers=1),
            world.send(1, group="a", timers=1),
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [Overloaded, Overloaded]

    run(scenario)


def test_a_cancelled_send_returns_permits_that_came_in_the_same_turn() -> None:
    async def scenario(world: World) -> None:
        world.put(QuotaKind.TOPIC, "orders", publishMessagesPerS=10)
        sending = asyncio.create_task(world.send())
        await asyncio.sleep(0)
        [lease] = world.quotas._book.leases.values()
        lease.permits = 1
        world.serve()
        assert lease.permits == 0
        sending.cancel()
        await asyncio.wait([sending])
        assert (sending.cancelled(), lease.permits, lease.used) == (True, 1, 0)
        # Without its permits, it returns none.
        sending = asyncio.create_task(world.send(messages=2))
        await asyncio.sleep(0)
        sending.cancel()
        await asyncio.wait([sending])
        assert (lease.permits, lease.used) == (1, 0)

    run(scenario)


def test_an_unknown_stock_refuses_nothing_without_the_home() -> None:
    async def scenario(world: World) -> None:
        world.is_up = False
        world.put(QuotaKind.TOPIC, "orders", storedBytes=1)
        world.clock.advance(1_000)
        await world.send()
        assert world.passed == [0]

    run(scenario)
