"""Retention with an archive gate keeps unsealed messages until disk space runs low."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.worlds.engine_world import World
from tidemill.broker.engine.layout.numbers import QueueId

DAY_MS = 86_400_000
SEGMENT = 16_384
ARCHIVE = "archive"
TOPICS = ("held", "held too", "free")
# The archive does not cover the last topic.
HELD = TOPICS[:2]
DISK_SEGMENTS = 32  # Too few for all sent messages: retention has to delete some.
RESERVE_SEGMENTS = 8

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.sampled_from(TOPICS), st.integers(1, 12)),
        st.tuples(st.just("seal"), st.sampled_from(HELD), st.integers(0, 100)),
        st.tuples(st.just("wait"), st.just(""), st.integers(0, 3)),
        st.tuples(st.just("start"), st.just(""), st.booleans()),
    ),
    min_size=5,
    max_size=40,
)


class GatedWorld:
    """A world with the sealed offset of each topic."""

    def __init__(self, disk_segments: int) -> None:
        self.world = World(
            FaultyDisk(Random(0)),
            segment_bytes=SEGMENT,
            retention_ms=DAY_MS,
            checkpoint_log_bytes=4 * SEGMENT,
            disk_reserve_bytes=RESERVE_SEGMENTS * SEGMENT,
            archive_gate_group=ARCHIVE,
        )
        self.world.leave_room(disk_segments * SEGMENT)
        self.group_id = self.world.group(ARCHIVE)
        self.sealed = dict.fromkeys(HELD, 0)
        for topic in TOPICS:
            self.world.topic(topic)
        for topic in HELD:
            self._report_offset(topic, 0)

    def bounds(self, topic: str) -> tuple[int, int]:
        queue = self.world.engine.catalog.queue(self.world.topic(topic), QueueId(0))
        return int(queue.min_offset), int(queue.max_offset)

    def step(self, what: str, topic: str, count: int) -> None:
        match what:
            case "send":
                self.world.send(*[f"m{n}" for n in range(count)], topic=topic, size=4_000)
            case "seal":
                # `count` is a percentage of the unsealed messages.
                end = self.bounds(topic)[1]
                self.sealed[topic] += (end - self.sealed[topic]) * count // 100
                self._report_offset(topic, self.sealed[topic])
            case "wait":
                self.world.now_ms += count * DAY_MS
            case "start":
                self.world.restart(power_cut=bool(count))
        self.world.engine.room.measure()
        self.world.background()

    def _report_offset(self, topic: str, offset: int) -> None:
        self.world.engine.administration.update_pull_offset(
            self.group_id, self.world.topic(topic), QueueId(0), offset, self.world.now_ms
        )
        self.world.commit()

    def grow_old(self) -> None:
        """Add segments after the current ones, and let all of them pass their retention time."""
        for _ in range(2):
            self.world.send(*["filler"] * 6, topic="free", size=4_000)
            self.world.now_ms += 2 * DAY_MS
            self.world.engine.room.measure()
            self.world.background()


@given(steps=STEPS)
def test_nothing_goes_that_is_not_sealed_and_everything_goes_that_is(
    steps: list[tuple[str, str, int]],
) -> None:
    gated = GatedWorld(disk_segments=10_000)
    for step in steps:
        gated.step(*step)
        for topic in HELD:
            assert gated.bounds(topic)[0] <= gated.sealed[topic]
    assert gated.world.engine.retention.gate.passed_count == 0
    for topic in HELD:
        gated.step("seal", topic, 100)
    gated.grow_old()
    for topic in HELD:
        low, end = gated.bounds(topic)
        assert low == end, "retention kept sealed messages"


@settings(max_examples=20)  # Each example retires hundreds of segments.
@given(steps=STEPS)
def test_on_a_small_disk_the_gate_gives_way_and_messages_are_taken(
    steps: list[tuple[str, str, int]],
) -> None:
    gated = GatedWorld(DISK_SEGMENTS)
    # A segment and a half of unsealed messages per day: far more than the disk can hold.
    for _ in range(DISK_SEGMENTS):
        gated.step("send", HELD[0], 6)
        gated.world.now_ms += DAY_MS
        assert not gated.world.engine.room.is_full
    assert gated.world.engine.retention.gate.passed_count > 0
    for step in steps:
        gated.step(*step)
        gated.world.now_ms += DAY_MS
        assert not gated.world.engine.room.is_full
