"""The table of transactions: its transitions, its blocks and its memory."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from tests.support.seeds import seeds
from tidemill.broker.engine.layout.message import HalfMessage
from tidemill.broker.engine.layout.numbers import HalfId, LogOffset, QueueId, TopicId
from tidemill.broker.engine.layout.transaction import ROW_SIZE, TransactionState
from tidemill.broker.engine.transaction.config import TransactionConfig
from tidemill.broker.engine.transaction.table import (
    BLOCK_ROWS_MAX,
    TRANSITIONS,
    TransactionEvent,
    TransactionTable,
)

TOPIC = TopicId(3)
STATES: list[TransactionState | None] = [None, *TransactionState]
TO_STATE = {
    TransactionState.COMMITTED: (TransactionEvent.COMMITTED,),
    TransactionState.ROLLED_BACK: (TransactionEvent.ROLLED_BACK,),
    TransactionState.EXPIRED: (TransactionEvent.EXPIRED,),
    TransactionState.RECOVERED: (TransactionEvent.EXPIRED, TransactionEvent.RECOVERED),
}


def half(half_id: int = 0, *, topic_id: TopicId = TOPIC) -> HalfMessage:
    return HalfMessage(HalfId(half_id), topic_id, QueueId(0), 0, 6_000, 30_000, 15, 0, "client")


def apply(table: TransactionTable, event: TransactionEvent, half_id: int, log_offset: int) -> None:
    match event:
        case TransactionEvent.HALF:
            table.apply_half(HalfId(half_id), half(), LogOffset(log_offset))
        case TransactionEvent.CHECKED:
            table.apply_check(HalfId(half_id), 1, 36_000)
        case _:
            table.apply_result(HalfId(half_id), event, TOPIC, LogOffset(log_offset), 1_000)


def state_of(table: TransactionTable, half_id: int) -> TransactionState | None:
    row = table.find(half_id)
    return None if row is None else TransactionState(row.state)


@pytest.mark.parametrize(("state", "event"), list(product(STATES, TransactionEvent)))
def test_each_event_in_each_state_leads_to_the_state_of_the_table(
    state: TransactionState | None, event: TransactionEvent
) -> None:
    table = TransactionTable(TransactionConfig())
    if state is not None:
        apply(table, TransactionEvent.HALF, 100, 100)
        for earlier in TO_STATE.get(state, ()):
            apply(table, earlier, 100, 150)
    assert state_of(table, 100) is state
    apply(table, event, 100, 200)
    assert state_of(table, 100) is TRANSITIONS.get((state, event), state)
    # A record that is applied again changes nothing.
    apply(table, event, 100, 200)
    assert state_of(table, 100) is TRANSITIONS.get((state, event), state)
    assert table.open_count == (state_of(table, 100) is TransactionState.HALF)


def test_a_final_state_never_changes_but_by_a_recovery() -> None:
    leaving = {state for state, _ in TRANSITIONS if state not in {None, TransactionState.HALF}}
    assert leaving == {TransactionState.EXPIRED}


def test_a_copy_changes_only_the_place_of_the_message() -> None:
    table = TransactionTable(TransactionConfig())
    apply(table, TransactionEvent.HALF, 100, 100)
    apply(table, TransactionEvent.CHECKED, 100, 120)
    before = table.find(100)
    apply(table, TransactionEvent.HALF, 100, 900)
    assert before is not None
    assert table.find(100) == before._replace(log_offset=LogOffset(900))
    assert table.open_count == 1


@pytest.mark.parametrize("seed", seeds("transaction table", 6))
def test_the_blocks_agree_with_a_dictionary(seed: int) -> None:
    """Random half messages, also with ids between others, as a replay of copies brings them."""
    random = Random(seed)
    table = TransactionTable(TransactionConfig(outcomes_max=500))
    known: dict[int, TransactionState] = {}
    order: list[int] = []
    frozen: list[tuple[list[bytes], list[bytearray]]] = []
    for step in range(20_000):
        half_id = random.choice((step + 1, random.randrange(1, 40_000)))
        if half_id not in known:
            apply(table, TransactionEvent.HALF, half_id, half_id)
            known[half_id] = TransactionState.HALF
        elif known[half_id] is TransactionState.HALF and random.random() < 0.7:
            apply(table, TransactionEvent.COMMITTED, half_id, 100_000 + step)
            known[half_id] = TransactionState.COMMITTED
            order.append(half_id)
            while len(order) > 500:
                del known[order.pop(0)]
        if step % 5_000 == 4_999:
            blocks = table.freeze()
            frozen.append(([bytes(one) for one in blocks], list(blocks)))
    assert {row[0]: row[-1] for rows in table.walk() for row in rows.tolist()} == known
    assert table.open_count == sum(one is TransactionState.HALF for one in known.values())
    assert len(table) == len(known)
    for then, now in frozen:
        assert then == [bytes(one) for one in now], "a frozen block has changed"
    copy = TransactionTable(TransactionConfig(outcomes_max=500))
    for block in table.freeze():
        assert 0 < len(block) <= BLOCK_ROWS_MAX * ROW_SIZE
        copy.load(bytes(block))
    copy.end_load()
    assert [rows.tolist() for rows in copy.walk()] == [rows.tolist() for rows in table.walk()]
    assert (copy.open_count, copy.open_by_topic) == (table.open_count, table.open_by_topic)
    assert copy.oldest_result(1_000) == table.oldest_result(1_000)


def test_results_are_forgotten_after_their_time_and_the_oldest_first() -> None:
    table = TransactionTable(TransactionConfig(outcomes_max=10, outcome_memory_ms=3_600_000))
    for n in range(1, 21):
        apply(table, TransactionEvent.HALF, n, n)
        table.apply_result(HalfId(n), TransactionEvent.COMMITTED, TOPIC, LogOffset(100 + n), n)
    assert [state_of(table, n) for n in (10, 11)] == [None, TransactionState.COMMITTED]
    assert table.forgotten_count == 10, "only those that were forgotten early count"
    assert table.oldest_result(0) == 111
    assert table.oldest_result(3_600_015) == 116
    assert table.oldest_result(3_600_020) is None
    assert table.forgotten_count == 10


def test_an_expired_transaction_is_remembered_longer_than_a_decision() -> None:
    config = TransactionConfig(outcome_memory_ms=3_600_000, expired_memory_ms=72 * 3_600_000)
    table = TransactionTable(config)
    for half_id, event in ((1, TransactionEvent.EXPIRED), (2, TransactionEvent.COMMITTED)):
        apply(table, TransactionEvent.HALF, half_id, half_id)
        apply(table, event, half_id, 10 + half_id)
    assert table.oldest_result(71 * 3_600_000) == 11
    assert state_of(table, 1) is TransactionState.EXPIRED
    assert state_of(table, 2) is None


def test_the_deletion_of_a_topic_removes_its_open_half_messages() -> None:
    table = TransactionTable(TransactionConfig())
    for n in range(1, 10_001):
        table.apply_half(HalfId(n), half(topic_id=TopicId(n % 3)), LogOffset(n))
    apply(table, TransactionEvent.COMMITTED, 3, 20_000)
    table.forget_topic(TopicId(0))
    assert table.open_by_topic == {TopicId(1): 3_334, TopicId(2): 3_333}
    assert state_of(table, 6) is None
    assert state_of(table, 3) is TransactionState.COMMITTED
    assert state_of(table, 7) is TransactionState.HALF
