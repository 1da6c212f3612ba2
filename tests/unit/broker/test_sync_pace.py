"""The detection of a slow disk."""

from __future__ import annotations

from tidemill.broker.server.round.sync_pace import FORGET_MS, SyncPace


def paced(*syncs: tuple[int, int]) -> SyncPace:
    """Return the pace after syncs with these begins and ends."""
    pace = SyncPace()
    for began_at_ms, ended_at_ms in syncs:
        pace.note_begin(began_at_ms)
        pace.note_end(ended_at_ms)
    return pace


def test_a_disk_without_a_fast_sync_for_five_seconds_is_slow() -> None:
    pace = paced((0, 2), (100, 2_100), (2_110, 4_110))
    assert not pace.is_slow(4_120), "four seconds of it may be a stall"
    pace.note_begin(4_120)
    assert not pace.is_slow(5_099)
    pace.note_end(5_130)
    assert pace.is_slow(5_131)


def test_a_disk_whose_sync_does_not_end_is_slow() -> None:
    pace = paced((0, 2))
    pace.note_begin(1_000)
    assert not pace.is_slow(5_999)
    assert pace.is_slow(6_000)


def test_one_fast_sync_ends_the_slow_state() -> None:
    slow = ((0, 2_000), (2_000, 4_000), (4_000, 6_000))
    assert paced(*slow).is_slow(6_001)
    assert not paced(*slow, (6_000, 6_010)).is_slow(6_020)


def test_a_slow_sync_is_forgotten_after_a_while() -> None:
    pace = paced((0, 1_500))
    assert not pace.is_slow(1_500 + FORGET_MS + 1)
    pace.note_begin(60_000)
    assert not pace.is_slow(64_999)
    assert pace.is_slow(65_000)
