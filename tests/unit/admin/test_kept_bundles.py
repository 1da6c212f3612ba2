"""The memory of kept support bundles."""

from __future__ import annotations

import asyncio
import random

from tests.support.clocks import ManualClock
from tidemill.admin.cluster.support_bundles import KEPT_MAX, KEPT_MS, BundledFile, SupportBundles

BYTES_MAX = 40_000


def pack(bundles: SupportBundles, id_: str, text: str = "text") -> None:
    files = [BundledFile("overview.json", text)]
    asyncio.run(bundles.pack(id_, files, 1, is_anonymous=False))


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
