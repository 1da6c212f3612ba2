"""When a disk counts as slow."""

from __future__ import annotations

from tidemill.broker.server.round.sync_pace import FORGET_MS, SyncPace


def paced(*syncs: tuple[int, int]) -> SyncPace:
    """Return what syncs have told that began and ended then."""
    pace = SyncPace()
    for began_at_ms, ended_at_ms in syncs:
        pace.began(began_at_ms)
        pace.ended(ended_at_ms)
    return pace


def test_a_disk_is_slow_when_no_sync_was_quick_for_five_seconds() -> None:
    pace = paced((0, 2), (100, 2_100), (2_110, 4_110))
    assert not pace.is_slow(4_120), "four seconds of it may be a stall"
    pace.began(4_120)
    assert not pace.is_slow(5_099)
    pace.ended(5_130)
    assert pace.is_slow(5_131)


def test_one_sync_that_does_not_come_back_is_enough() -> None:
    pace = paced((0, 2))
    pace.began(1_000)
    assert not pace.is_slow(5_999)
    assert pace.is_slow(6_000)


def test_one_quick_sync_ends_it() -> None:
    slow = ((0, 2_000), (2_000, 4_000), (4_000, 6_000))
    assert paced(*slow).is_slow(6_001)
    assert not paced(*slow, (6_000, 6_010)).is_slow(6_020)


def test_a_slow_sync_long_ago_says_nothing() -> None:
    pace = paced((0, 1_500))
    assert not pace.is_slow(1_500 + FORGET_MS + 1)
    pace.began(60_000)
    assert not pace.is_slow(64_999)
    assert pace.is_slow(65_000)
