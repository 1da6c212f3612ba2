"""The memory of kept support bundles."""

from __future__ import annotations

import asyncio
import random

from tests.support.clocks import ManualClock
from tidemill.admin.cluster.support_bundles import KEPT_MAX, KEPT_MS, BundledFile, SupportBundles

BYTES_MAX = 40_000


def pack(bundles: SupportBundles, id_: str, text: str = "text") -> None:
    async def collect() -> list[BundledFile]:
        return [BundledFile("overview.json", text)]

    asyncio.run(bundles.make(id_, 1, collect, is_anonymous=False))


def kept(bundles: SupportBundles, *ids: str) -> list[str]:
    return [id_ for id_ in ids if bundles.find(id_) is not None]


def test_the_newest_bundles_are_kept_for_an_hour() -> None:
    clock = ManualClock()
    bundles = SupportBundles(clock)
    for id_ in ("a", "b", "c"):
        pack(bundles, id_)
    assert kept(bundles, "a", "b", "c") == ["b", "c"]
    assert len(kept(bundles, "b", "c")) == KEPT_MAX
    clock.advance(KEPT_MS + 1)
    assert kept(bundles, "b", "c") == []


def test_kept_bundles_share_the_memory_of_one() -> None:
    """A text counts with its full size until it is packed, so two of these do not fit."""
    text = random.Random(0).randbytes(BYTES_MAX * 7 // 20).hex()
    bundles = SupportBundles(ManualClock(), bytes_max=BYTES_MAX)
    pack(bundles, "small")
    pack(bundles, "large", text)
    assert kept(bundles, "small", "large") == ["small", "large"]
    pack(bundles, "next", text)
    assert kept(bundles, "small", "large", "next") == ["next"]
    pack(bundles, "last")
    assert kept(bundles, "next", "last") == ["next", "last"]


def test_only_one_bundle_at_a_time_is_collected() -> None:
    async def main() -> None:
        bundles, begun, may_end = SupportBundles(ManualClock()), asyncio.Event(), asyncio.Event()

        async def collect_slowly() -> list[BundledFile]:
            begun.set()
            await may_end.wait()
            return [BundledFile("overview.json", "text")]

        async def collect_after_the_first() -> list[BundledFile]:
            assert kept(bundles, "first") == ["first"]
            return [BundledFile("overview.json", "text")]

        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            tasks.create_task(bundles.make("first", 1, collect_slowly, is_anonymous=False))
            await begun.wait()
            tasks.create_task(
                bundles.make("second", 1, collect_after_the_first, is_anonymous=False)
            )
            await asyncio.sleep(0)
            may_end.set()
        assert kept(bundles, "first", "second") == ["first", "second"]

    asyncio.run(main())


def test_a_cancelled_collection_keeps_no_bundle() -> None:
    bundles = SupportBundles(ManualClock())

    async def collect() -> None:
        return None

    asyncio.run(bundles.make("cancelled", 1, collect, is_anonymous=False))
    assert kept(bundles, "cancelled") == []
    pack(bundles, "next")
    assert kept(bundles, "next") == ["next"]
