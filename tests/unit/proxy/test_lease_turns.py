"""The leases of a request to the home: those that calls wait for, and then the others in turn."""

from __future__ import annotations

import asyncio

from tests.unit.proxy.test_send_quotas import MESSAGES, World
from tidemill.proxy.quotas.leases import DEMANDS_MAX, Lease, LeaseBook
from tidemill.security.permit_buckets import LeaseDemand
from tidemill.security.quotas import LimitKey, MatchedLimit, QuotaKind


def book_of(count: int) -> tuple[LeaseBook, list[Lease]]:
    book = LeaseBook(0)
    keys = [LimitKey(f"topic:t{number}", MESSAGES) for number in range(count)]
    return book, [book.lease_of(MatchedLimit(key, 100, key.quota), 0) for key in keys]


def keys_of(demands: list[LeaseDemand]) -> list[str]:
    return [demand.key.quota for demand in demands]


def test_a_limit_that_a_call_waits_for_is_asked_first() -> None:
    book, leases = book_of(3 * DEMANDS_MAX)
    waiting = leases[-1]
    book.ask_first(waiting.key)
    for begin in (0, DEMANDS_MAX - 1):
        waiting.waiting = [1]
        first, *others = keys_of(book.plan(0))
        assert first == waiting.key.quota, "in each request while the call waits"
        assert others == [lease.key.quota for lease in leases[begin:][: DEMANDS_MAX - 1]]
    waiting.waiting = []
    book.plan(0)
    assert waiting.key.quota not in keys_of(book.plan(0))


def test_limits_that_calls_wait_for_take_turns() -> None:
    book, leases = book_of(3 * DEMANDS_MAX)
    for lease in leases[DEMANDS_MAX // 2 :]:
        lease.waiting = [1]
        book.ask_first(lease.key)
    asked = [key for _ in range(3) for key in keys_of(book.plan(0))]
    assert set(asked) >= {lease.key.quota for lease in leases[DEMANDS_MAX // 2 :]}
    assert all(len(keys_of(book.plan(0))) == DEMANDS_MAX for _ in range(3))


def test_a_forgotten_limit_is_not_asked() -> None:
    book, [lease] = book_of(1)
    book.ask_first(lease.key)
    book.leases.clear()
    assert book.plan(0) == []


def test_a_send_beside_many_quotas_waits_for_one_request() -> None:
    async def scenario() -> None:
        world = World()
        world.available[MESSAGES] = 1 << 30
        for number in range(2 * DEMANDS_MAX):
            rate = MatchedLimit(LimitKey(f"topic:t{number}", MESSAGES), 100, f"Topic:t{number}")
            world.quotas._book.lease_of(rate, world.clock.monotonic_ms())
        world.put(QuotaKind.TOPIC, "last", publishMessagesPerS=100)
        send = asyncio.create_task(world.send(topic="last"))
        await asyncio.sleep(0)
        await world.quotas._renewal.renew()
        await asyncio.sleep(0)
        assert send.done()
        await send
        assert world.asked == 1

    asyncio.run(scenario())
