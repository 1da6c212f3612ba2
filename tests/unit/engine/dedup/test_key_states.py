"""Each state of a dedup key with each type of message: stored, repeated, replaced or rejected."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Final

import pytest

from tests.support.worlds.dedup_world import WINDOW_MS, DedupWorld
from tidemill.broker.engine.dedup.config import DedupConfig
from tidemill.broker.engine.dedup.deduplication import RepeatedSend
from tidemill.broker.engine.layout.numbers import HalfId
from tidemill.broker.engine.metadata.dedup_policy import DedupMode
from tidemill.common.errors import Overloaded

LATER_MS: Final = 3 * WINDOW_MS
STORED, REPEATED, REPLACED, REJECTED = "stored", "repeated", "replaced", "rejected"

KINDS: Final[dict[str, dict[str, bool]]] = {
    "plain": {},
    "delayed": {"is_delayed": True},
    "half": {"is_half": True},
}


def send(
    world: DedupWorld,
    text: str,
    *,
    is_delayed: bool = False,
    is_half: bool = False,
    is_ended: bool = True,
) -> int:
    """Send a message with the key; return its timer id or half id, whichever it has."""
    due_at_ms = world.now_ms + LATER_MS if is_delayed else None
    sent = world.store(text, key="k", due_at_ms=due_at_ms, is_half=is_half, is_ended=is_ended)
    return sent.half_id if is_half else sent.queue_offset


def _free(_world: DedupWorld) -> None:
    pass


def _in_flight(world: DedupWorld) -> None:
    send(world, "first", is_ended=False)


def _known(world: DedupWorld) -> None:
    send(world, "first")


def _over(world: DedupWorld) -> None:
    send(world, "first")
    world.now_ms += WINDOW_MS


def _pending(world: DedupWorld) -> None:
    send(world, "first", is_delayed=True)


def _pending_after_the_window(world: DedupWorld) -> None:
    send(world, "first", is_delayed=True)
    world.now_ms += WINDOW_MS


def _pending_in_flight(world: DedupWorld) -> None:
    send(world, "first", is_delayed=True, is_ended=False)


def _fired(world: DedupWorld) -> None:
    world.store("first", key="k", due_at_ms=world.now_ms + 1_000)
    world.advance(1_000)


def _cancelled(world: DedupWorld) -> None:
    world.cancel(send(world, "first", is_delayed=True))


def _open(world: DedupWorld) -> None:
    send(world, "first", is_half=True)


def _open_after_the_window(world: DedupWorld) -> None:
    send(world, "first", is_half=True)
    world.now_ms += WINDOW_MS


def _committed(world: DedupWorld) -> None:
    world.commit_half(HalfId(send(world, "first", is_half=True)))


def _rolled_back(world: DedupWorld) -> None:
    world.roll_back(HalfId(send(world, "first", is_half=True)))


def _without_memory(world: DedupWorld) -> None:
    memory = world.engine.deduplication.memory
    memory.memory_bytes = world.engine.key_tables.memory_bytes
    memory.rest_bytes = 0


State = Callable[[DedupWorld], None]
# By state: the result in mode `first`, and in mode `replace` if it is another one. Only a message
# without a transaction replaces a pending one.
RESULTS: Final[dict[State, tuple[str, str]]] = {
    _free: (STORED, STORED),
    _in_flight: (REPEATED, REPEATED),
    _known: (REPEATED, REPEATED),
    _over: (STORED, STORED),
    _pending: (REPEATED, REPLACED),
    _pending_after_the_window: (REPEATED, REPLACED),
    _pending_in_flight: (REPEATED, REPLACED),
    _fired: (REPEATED, STORED),
    _cancelled: (STORED, STORED),
    _open: (REPEATED, REPEATED),
    _open_after_the_window: (REPEATED, REPEATED),
    _committed: (REPEATED, REPEATED),
    _rolled_back: (STORED, STORED),
    _without_memory: (REJECTED, REJECTED),
}


@pytest.mark.parametrize(
    ("state", "kind", "mode"),
    list(product(RESULTS, KINDS, DedupMode)),
    ids=lambda value: getattr(value, "__name__", str(value)).strip("_"),
)
def test_each_state_of_a_key_with_each_type_of_message(
    state: State, kind: str, mode: DedupMode
) -> None:
    world = DedupWorld(dedup=DedupConfig(memory_bytes=64 << 20))
    max_wait_ms = None if mode is DedupMode.FIRST else 10 * LATER_MS
    world.turn_on(mode=mode, max_wait_ms=max_wait_ms)
    state(world)
    expected = RESULTS[state][mode is DedupMode.REPLACE]
    if expected == REPLACED and kind == "half":
        expected = REPEATED
    before = world.engine.log.log_end
    try:
        send(world, "second", **KINDS[kind])
        result = STORED
    except RepeatedSend:
        result = REPEATED
    except Overloaded:
        result = REJECTED
    if sum(world.engine.deduplication.replaced.values()):
        result = REPLACED
    assert result == expected
    assert (world.engine.log.log_end > before) == (expected in {STORED, REPLACED})
    assert len(world.rows()) == (expected != REJECTED)
    world.restart()
    world.note_round()
    assert len(world.rows()) == (expected != REJECTED)
