"""Replays and discards of dead letters by the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.disk.log_checker import judge
from tests.support.settled_ranges import ranges_of
from tests.support.worlds.engine_world import GROUP, TOPIC, blob
from tests.support.worlds.letter_world import DEAD, LetterWorld
from tests.support.worlds.packed_worlds import floors, forget_derived_files, move_floor, pack_all
from tidemill.broker.engine.dead_letter.letters import LetterOutcome, replaced
from tidemill.broker.engine.events.event import EventKind, EventQuery
from tidemill.broker.engine.layout import message
from tidemill.broker.engine.layout.dead_letter import DeadLetterState, Replay
from tidemill.broker.engine.message_filter import EVERY_MESSAGE
from tidemill.broker.engine.metadata import settled_letters
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.common.errors import Conflict

SECOND_MS = 1_000
REPLAYED, ALREADY, DISCARDED, TOPIC_DELETED, DAMAGED, EXPIRED, NOT_FOUND = LetterOutcome


def letter_world(*, feature_level: int = 5) -> LetterWorld:
    world = LetterWorld(is_followed=True, feature_level=feature_level)
    world.topic(TOPIC)
    return world


@pytest.mark.parametrize("is_ordered", [False, True])
def test_only_the_group_gets_a_replayed_message_as_its_first_attempt(is_ordered: bool) -> None:
    world = letter_world()
    world.group("another")
    world.dead("a", "b", max_attempts=2, is_ordered=is_ordered)
    assert world.bodies(group="another") == ["a", "b"]
    assert world.replay(1, 0) == [REPLAYED, REPLAYED]
    popped = world.pop(4)
    assert [(one.body, one.attempt) for one in popped] == [("b", 1), ("a", 1)]
    assert world.bodies(group="another") == []
    world.ack(*popped)
    world.advance(60 * SECOND_MS)
    assert world.pop(4) == []
    assert world.states() == ["REPLAYED", "REPLAYED"]
    judge(world)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_replayed_message_gets_all_attempts_and_dies_with_the_next_number(
    is_ordered: bool,
) -> None:
    world = letter_world()
    world.dead("a", max_attempts=3, is_ordered=is_ordered)
    for number in (1, 2):
        assert world.replay(number - 1) == [REPLAYED]
        attempts = []
        while popped := world.pop(1, invisible_ms=SECOND_MS):
            attempts += [one.attempt for one in popped]
            world.advance(SECOND_MS)
        assert attempts == [1, 2, 3]
        found = world.letter(number)
        assert found.cause.replays == number
        assert found.record is not None
        assert message.PLACE.unpack_from(found.record.body)[2] == 3
    assert world.letter(0).cause.replays == 0
    assert world.states() == ["REPLAYED", "REPLAYED", "OPEN"]
    judge(world)


def test_a_replay_keeps_the_message_and_its_origin() -> None:
    world = letter_world()
    world.dead("a", max_attempts=2)
    before = world.letter(0)
    world.replay(0)
    retry_id = world.engine.catalog.retry_topic_ids[world.group(), world.topic()]
    retry = world.engine.catalog.queue(retry_id, settled_letters.DEAD_LETTER_QUEUE)
    found = world.engine.store.record(retry.entry(0)[0])
    assert before.record is not None
    assert bytes(found.tail) == bytes(before.record.tail)
    cause = message.decode(found.body, found.header.flags, found.tail, 0).cause
    assert cause == Replay(
        0,
        world.group(),
        before.topic.id,
        0,
        1,
        before.cause.first_popped_at_ms,
        world.topic(),
        before.cause.root_queue_id,
        before.cause.root_offset,
        TOPIC,
    )


def test_each_dead_letter_has_one_outcome_and_the_first_settlement_counts() -> None:
    world = letter_world()
    world.dead("a", "b", "c")
    assert world.replay(0, 0, 3, -1) == [REPLAYED, ALREADY, NOT_FOUND, NOT_FOUND]
    assert world.discard(0, 1, 1, 9) == [ALREADY, DISCARDED, DISCARDED, NOT_FOUND]
    assert world.replay(1) == [DISCARDED]
    assert world.states() == ["REPLAYED", "DISCARDED", "OPEN"]
    assert world.bodies() == ["a"]
    counts = world.engine.dead_letters.replays
    assert counts[world.group(), REPLAYED] == counts[world.group(), ALREADY] == 1


def test_a_group_without_dead_letters_has_none_to_settle() -> None:
    world = letter_world()
    world.group()
    assert world.replay(0) == [NOT_FOUND]
    assert world.discard(0) == [NOT_FOUND]


def test_a_discarded_dead_letter_stays_readable() -> None:
    world = letter_world()
    world.dead("a")
    world.discard(0)
    assert world.bodies(topic=DEAD, group="reader") == ["a"]
    assert world.bodies() == []


def test_the_topic_of_a_replay_must_exist() -> None:
    world = letter_world()
    world.dead("a")
    world.engine.administration.delete_topic(TOPIC, world.now_ms)
    world.commit()
    world.topic(TOPIC)  # another topic
    assert world.replay(0) == [TOPIC_DELETED]
    assert world.discard(0) == [DISCARDED]


def test_a_purge_of_the_dead_letters_forgets_their_states() -> None:
    world = letter_world()
    world.dead("a", "b")
    world.discard(0)
    world.purge(DEAD)
    assert world.replay(0, 1, 2) == [EXPIRED, EXPIRED, NOT_FOUND]
    world.checkpoint()
    assert world.engine.catalog.settled_letters.topic_ids == []


def test_a_deleted_dead_letter_topic_takes_its_states_with_it() -> None:
    world = letter_world()
    world.dead("a")
    world.discard(0)
    world.engine.administration.delete_topic(DEAD, world.now_ms)
    world.commit()
    assert world.engine.catalog.settled_letters.topic_ids == []
    world.dead("b")
    assert world.states() == ["OPEN"]


def test_a_group_that_was_created_again_gets_the_dead_letters_of_the_former_one() -> None:
    world = letter_world()
    world.dead("a", "b")
    world.replay(0)
    world.engine.administration.delete_group(GROUP, world.now_ms)
    world.commit()
    world.group()
    assert world.replay(0, 1) == [ALREADY, REPLAYED]
    # The new group also reads the topic from its begin.
    assert sorted(world.bodies()) == ["a", "b", "b"]


@pytest.mark.parametrize("power_cut", [False, True])
@pytest.mark.parametrize("has_snapshot", [False, True])
def test_states_and_replays_survive_a_restart(power_cut: bool, has_snapshot: bool) -> None:
    world = letter_world()
    world.dead("a", "b", "c", "d", max_attempts=2)
    world.replay(0)
    world.discard(1)
    if has_snapshot:
        world.checkpoint()
    world.replay(2)
    expected = ["REPLAYED", "DISCARDED", "REPLAYED", "OPEN"]
    ranges = ranges_of(world.engine.catalog.settled_letters, world.letter(0).topic.id)
    world.restart(power_cut=power_cut)
    assert bool(world.report.snapshot) == has_snapshot
    assert world.states() == expected
    assert ranges_of(world.engine.catalog.settled_letters, world.letter(0).topic.id) == ranges
    popped = world.pop(8)
    assert [(one.body, one.attempt) for one in popped] == [("a", 1), ("c", 1)]
    world.ack(*popped)
    world.restart(power_cut=power_cut)
    assert world.pop(8) == []
    assert world.replay(0, 1, 2) == [ALREADY, DISCARDED, ALREADY]


def test_a_replica_that_takes_over_has_the_states() -> None:
    world = letter_world()
    world.dead("a", "b", "c")
    world.replay(0)
    world.discard(1)
    world.fail_over()
    assert world.states() == ["REPLAYED", "DISCARDED", "OPEN"]
    assert world.replay(0, 1, 2) == [ALREADY, DISCARDED, REPLAYED]
    assert world.bodies() == ["a", "c"]


def test_an_unwritten_replay_is_lost_as_a_whole() -> None:
    world = letter_world()
    world.dead("a")
    world.engine.dead_letters.replay(world.found_group(), 0, world.now_ms)
    world.restart(power_cut=True)  # before the round is written
    assert world.states() == ["OPEN"]
    assert world.bodies() == []
    assert world.replay(0) == [REPLAYED]
    assert world.bodies() == ["a"]


def test_damaged_dead_letters_are_not_replayed_but_may_be_replaced() -> None:
    world = letter_world()
    world.follower = None  # Its copy of the message is intact.
    world.send("a", "b")
    world.group()
    popped = world.pop(2)
    queue = world.engine.catalog.queue(world.topic(), settled_letters.DEAD_LETTER_QUEUE)
    log_offset, size, _ = queue.entry(0)
    world.disk.damage("log/00000000000000000000.log", log_offset + size - 1)
    world.fail(*popped)
    dead = world.letter(0)
    assert dead.cause.reason == message.Reason.DAMAGED
    assert world.replay(0, 1) == [DAMAGED, REPLAYED]
    outcome = world.engine.dead_letters.replay(
        world.found_group(), 0, world.now_ms, replacement=replaced(blob("new"))
    )
    world.commit()
    assert outcome is REPLAYED
    assert world.bodies() == ["b", "new"]


def test_a_replay_of_a_priority_message_keeps_its_level() -> None:
    world = LetterWorld(is_followed=True)
    world.engine.administration.put_topic(
        TOPIC, type_=TopicType.PRIORITY, queues=3, now_ms=world.now_ms
    )
    world.group()
    world.send("low", queue_id=0)
    world.send("high", queue_id=2)
    while popped := world.pop(8):
        world.fail(*popped)
    assert world.replay(1, 0) == [REPLAYED, REPLAYED]
    assert world.bodies() == ["high", "low"]


def test_an_ordered_group_gets_replays_of_all_levels() -> None:
    world = LetterWorld(is_followed=True)
    world.engine.administration.put_topic(
        TOPIC, type_=TopicType.PRIORITY, queues=3, now_ms=world.now_ms
    )
    world.group(is_ordered=True)
    world.send("low", queue_id=0)
    world.send("high", queue_id=2)
    while popped := world.pop(8):
        world.fail(*popped)
    world.replay(0, 1)
    world.send("new low", queue_id=0)
    found = []
    while popped := world.pop(8):
        found += [one.body for one in popped]
        world.ack(*popped)
    assert sorted(found) == ["high", "low", "new low"]
    assert found[0] == "high"


def test_a_waiting_ordered_group_is_woken() -> None:
    world = letter_world()
    world.dead("a", is_ordered=True)
    assert world.pop(1) == []
    world.engine.take_ready()
    world.replay(0)
    pair = world.group(), world.topic()
    _, pairs = world.engine.take_ready()
    assert pair in pairs
    ready = world.engine.consumption.ready_count(*pair, wanted=EVERY_MESSAGE, now_ms=world.now_ms)
    assert ready.ready_count == 1


def test_a_replay_in_flight_blocks_only_the_replays_of_an_ordered_group() -> None:
    world = letter_world()
    world.dead("a", "b", is_ordered=True)
    world.replay(0, 1)
    (first,) = world.pop(1)
    assert first.body == "a"
    assert world.pop(1) == []
    world.send("c")
    assert world.bodies(1) == ["c"]
    world.ack(first)
    assert world.bodies(1) == ["b"]


def test_a_broker_group_below_the_level_settles_nothing() -> None:
    world = letter_world(feature_level=4)
    world.dead("a")
    with pytest.raises(Conflict, match="needs feature level 5"):
        world.replay(0)
    with pytest.raises(Conflict, match="needs feature level 5"):
        world.discard(0)
    world.config = replace(world.config, feature_level=5)
    world.restart()
    assert world.replay(0) == [REPLAYED]


def test_too_many_ranges_are_rejected_before_anything_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settled_letters, "RANGES_MAX", 2)
    world = letter_world()
    world.dead("a", "b", "c", "d", "e")
    world.discard(0, 2)
    end = world.engine.log.log_end
    with pytest.raises(Conflict, match="ranges of offsets"):
        world.replay(4)
    with pytest.raises(Conflict, match="ranges of offsets"):
        world.discard(4)
    assert world.engine.log.log_end == end
    assert world.states() == ["DISCARDED", "OPEN", "DISCARDED", "OPEN", "OPEN"]


def test_the_state_of_a_dead_letter_has_a_number_in_the_log() -> None:
    assert [(state.name, state.value) for state in DeadLetterState] == [
        ("OPEN", 0),
        ("REPLAYED", 1),
        ("DISCARDED", 2),
    ]


def test_a_replay_from_the_state_floor_has_the_states() -> None:
    """Also if packs have made stubs of the replays and of the dead letters before the floor."""
    world = LetterWorld(segment_bytes=64 << 10, checkpoint_log_bytes=32 << 10)
    world.topic(TOPIC)
    world.dead("a", "b", "c", "d")
    world.replay(0)
    world.discard(1, 2)
    world.ack(*world.pop(1))
    for _ in range(4):
        world.send(*["gone"] * 8, topic="gone", size=8_000)
        world.purge("gone")
        world.checkpoint()
    move_floor(world, floors(world)[-1])
    pack_all(world)
    states = ["REPLAYED", "DISCARDED", "DISCARDED", "OPEN"]
    assert world.states() == states
    forget_derived_files(world)
    world.open()
    assert world.engine.log.state_floor > 0
    assert world.states() == states
    assert world.replay(0, 1, 3) == [ALREADY, DISCARDED, REPLAYED]
    assert world.bodies() == ["d"]


def test_the_events_of_a_message_name_its_replay_and_its_discard() -> None:
    world = letter_world()
    world.dead("a", "b", "c")
    world.replay(0)
    world.fail(*world.pop(1))
    world.discard(1, 2, 3)
    read = world.engine.events.read(
        EventQuery(), from_position=0, log_bytes_max=1 << 20, events_max=1_000
    )
    while read.step():
        pass
    kinds = EventKind.DEAD_LETTERED, EventKind.REPLAYED, EventKind.DISCARDED
    found = [
        (event.kind.name, event.message_id, event.queue_offset)
        for event in read.take()
        if event.kind in kinds and event.consumer_group == GROUP and event.origin_topic == TOPIC
    ]
    assert found == [
        ("DEAD_LETTERED", "id-a", 0),
        ("DEAD_LETTERED", "id-b", 1),
        ("DEAD_LETTERED", "id-c", 2),
        ("REPLAYED", "id-a", 0),
        ("DEAD_LETTERED", "id-a", 3),
        ("DISCARDED", "id-b", 1),
        ("DISCARDED", "id-c", 2),
        ("DISCARDED", "id-a", 3),
    ]


def test_new_dead_letters_give_one_notice_for_each_group() -> None:
    world = letter_world()
    world.dead("a", "b", "c")
    redelivery = world.engine.consumption.redelivery
    (notice,) = redelivery.take_dead_notices()
    assert notice == (GROUP, {"forwarded_by_client": 3})
    assert redelivery.take_dead_notices() == []


def test_a_search_finds_a_replay_with_its_group() -> None:
    world = letter_world()
    world.dead("a")
    world.replay(0)
    topic = world.engine.catalog.find_topic(TOPIC)
    assert topic is not None
    found = world.find(topic, message_id="id-a")
    assert [(one.stored_topic, one.group, one.reason) for one in found] == [
        (f"%RETRY%{GROUP}+{TOPIC}", GROUP, "replayed"),
        (DEAD, GROUP, "forwarded_by_client"),
        (TOPIC, "", ""),
    ]
