"""Worlds with packs: two topics with messages in turn, and the steps of packing."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.disk.quiet import has_pending
from tests.support.worlds.engine_world import World
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.message_store import RECENT_MS, RECENT_STEP_MS
from tidemill.broker.engine.upkeep.parts import Steps

SEGMENT = 64 << 10
DAY_MS = 86_400_000


def small_world(disk: FaultyDisk | None = None, **changes: object) -> World:
    options = {"segment_bytes": SEGMENT, "checkpoint_log_bytes": SEGMENT, **changes}
    return World(disk, retention_ms=400 * DAY_MS, **options)  # type: ignore[arg-type]  # checked by World


def used(world: World) -> int:
    """Return the bytes of the log on the disk."""
    sizes = 0
    for name in world.disk.names("log"):
        file = world.disk.open(name)
        sizes += file.size()
        file.close()
    return sizes


def pack_all(world: World, *, between: Callable[[], None] = lambda: None) -> int:
    """Pack every segment but the last two; return how many were packed."""
    return pack_engine(world.engine, between=between)


def pack_engine(engine: Engine, *, between: Callable[[], None] = lambda: None) -> int:
    """Pack every segment that the background may pack; return how many were packed."""
    count = 0
    for segment in engine.log.segments[:-2]:
        if segment.end > engine.log.committed_offset:
            break
        steps = engine.packing.pack(segment, freed_min=1)
        while True:
            try:
                files = next(steps)
            except StopIteration as end:
                count += bool(end.value)
                break
            for file in files:
                file.sync()
            between()
    return count


def forget_recent(engine: Engine) -> None:
    """Let no stored message be so recent that a proxy may send it again."""
    for monotonic_ms in (0, RECENT_STEP_MS, RECENT_STEP_MS + RECENT_MS):
        engine.store.note_time(monotonic_ms)


def drop_dead_entries(engine: Engine, *, between: Callable[[], None] = lambda: None) -> None:
    """Merge the due derived files, and rewrite those with mostly dead entries.

    `between` runs after each step, and commits the pending records at some time.
    """
    forget_recent(engine)
    merges = engine.merges
    while merges.is_due:
        finish(merges.merge(), between)
    finish(merges._drop_dead_entries(), between)


def finish(steps: Steps, between: Callable[[], None] = lambda: None) -> None:
    """Run all steps of a background job; `between` runs after each."""
    for n, files in enumerate(steps):
        for file in files:
            file.sync()
        between()
        assert n < 10_000, "the merge waits for a quiet moment in vain"


def derived_bytes(engine: Engine) -> tuple[int, int]:
    """Return the sizes of the queue files and of the index files."""
    store = engine.store
    files = store.queue_files, store.index.files
    queues, index = (sum(one.size_bytes for one in each) for each in files)
    return queues, index


def move_floor(world: World, floor: int) -> None:
    """Move the state floor to the end of a segment that the last checkpoint covers."""
    for files in world.engine.retention.move_floor(floor, world.now_ms):
        for file in files:
            file.sync()
        if has_pending(world.engine):
            world.commit()


def floors(world: World) -> list[int]:
    """Return the ends of the segments that the state floor may pass."""
    log, derived = world.engine.log, world.engine.store.derived_offset
    return [one.end for one in log.segments[:-1] if log.state_floor < one.end <= derived]


def forget_derived_files(world: World) -> None:
    """End the process, and delete everything but the log."""
    world.disk = world.disk.after_kill()
    for folder in ("queues", "index", "snapshots"):
        for name in world.disk.names(folder):
            world.disk.remove(name)
    if world.disk.read("checkpoint") is not None:
        world.disk.remove("checkpoint")


def two_topics(world: World, *, count: int = 100, kept_size: int = 500) -> list[str]:
    """Send messages of two topics in turn; return the texts of the topic "kept"."""
    kept = []
    for n in range(count):
        world.send(f"gone {n}", topic="gone", size=4_000)
        if n % 10 == 0:
            kept.append(f"kept {n}")
            world.send(kept[-1], topic="kept", size=kept_size)
    world.checkpoint()
    return kept


def delete_topic(world: World, name: str) -> None:
    world.engine.administration.delete_topic(name, world.now_ms)
    world.commit()
