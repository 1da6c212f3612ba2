"""Where the time of a round goes, and the frames that report it."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.worlds.round_world import RoundWorld, idle
from tidemill.broker.server.link import reply_frames
from tidemill.broker.server.round.round_times import SYNCS_KEPT, RoundParts, RoundTimes, SyncLog


def test_the_sync_of_an_offset_is_the_first_one_behind_it() -> None:
    syncs = SyncLog()
    assert syncs.find(0) is None
    for offset, ended_s in ((10, 1.0), (20, 2.0), (20, 3.0)):
        syncs.note(offset, ended_s)
    assert [syncs.find(offset) for offset in (5, 10, 11, 20, 21)] == [1.0, 1.0, 2.0, 2.0, None]


def test_a_sync_that_is_no_longer_kept_is_unknown() -> None:
    syncs = SyncLog()
    for n in range(SYNCS_KEPT + 1):
        syncs.note(n, float(n))
    # The sync of offset 0 is dropped, so the first one that is kept may have had one before it.
    assert [syncs.find(offset) for offset in (0, 1, 2)] == [None, None, 2.0]


@pytest.mark.parametrize(
    ("has_replicas", "parts"),
    [(False, RoundParts(1_250, 2_000, None)), (True, RoundParts(1_000, 2_000, 250))],
)
def test_a_round_has_the_time_of_its_parts(parts: RoundParts, *, has_replicas: bool) -> None:
    syncs = SyncLog()
    times = RoundTimes(10.0)
    assert times.parts(10.5) is None, "the round is not written"
    times.note_written(11.0, 100, syncs, has_replicas=has_replicas)
    assert times.parts(12.0) == RoundParts(1_000, None, None)
    syncs.note(100, 13.0)
    assert times.parts(13.25) == parts


def test_a_round_without_records_waits_for_no_sync() -> None:
    syncs = SyncLog()
    syncs.note(100, 5.0)
    times = RoundTimes(10.0)
    times.note_written(11.0, 100, syncs, has_replicas=False)
    assert times.parts(11.0) == RoundParts(1_000, 0, None)


@pytest.mark.parametrize(("least_s", "is_timed"), [(0.0, True), (3_600.0, False)])
def test_only_the_frame_of_an_old_request_has_its_times(
    monkeypatch: pytest.MonkeyPatch, least_s: float, *, is_timed: bool
) -> None:
    monkeypatch.setattr(reply_frames, "TIMED_S_MIN", least_s)

    async def main() -> None:
        world = RoundWorld()
        async with asyncio.timeout(10), world.running(), world.proxy() as proxy:
            world.syncs.gate.clear()
            await proxy.send(world.append_frame("a"))
            await idle()
            assert proxy.replies.empty()
            world.syncs.gate.set()
            reply = await proxy.reply()
            assert list(reply.appends.request_ids) == [1]
            assert reply.HasField("times") == is_timed
            assert reply.times.HasField("sync_ms") == is_timed
            assert not reply.times.HasField("replicate_ms"), "there are no replicas"

    asyncio.run(main())
