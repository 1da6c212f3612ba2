"""Examples for the common part of two logs, the epoch journal, and the confirm offset."""

from __future__ import annotations

import pytest

from tidemill.broker.engine.replication.confirm import (
    Commitment,
    confirm_offset,
    with_ack,
    with_silent,
)
from tidemill.broker.engine.replication.epoch_journal import (
    Agreement,
    CommonPrefix,
    Divergence,
    EpochEntry,
    FullCopy,
    Journal,
    LogExtent,
    agree,
    cut_at,
    epoch_at,
    last_epoch,
    with_epoch,
)
from tidemill.broker.engine.replication.truncation import may_truncate
from tidemill.common.replica_group import ReplicaId, ReplicaRun, ReplicationView


def journal(*entries: tuple[int, int]) -> Journal:
    return tuple(EpochEntry(*entry) for entry in entries)


@pytest.mark.parametrize(
    ("master", "replica", "agreement"),
    [
        # The same epoch: the common part is the shorter log.
        (LogExtent(journal((1, 0)), 0, 90), LogExtent(journal((1, 0)), 0, 50), CommonPrefix(50)),
        (LogExtent(journal((1, 0)), 0, 50), LogExtent(journal((1, 0)), 0, 90), CommonPrefix(50)),
        # The master began an epoch at an offset where the replica has more of the previous one.
        (
            LogExtent(journal((1, 0), (3, 60)), 0, 90),
            LogExtent(journal((1, 0)), 0, 80),
            CommonPrefix(60),
        ),
        # Two masters of later epochs, at the same offset and at different ones.
        (
            LogExtent(journal((1, 0), (3, 60)), 0, 90),
            LogExtent(journal((1, 0), (2, 60)), 0, 80),
            CommonPrefix(60),
        ),
        (
            LogExtent(journal((1, 0), (3, 70)), 0, 90),
            LogExtent(journal((1, 0), (2, 60)), 0, 95),
            CommonPrefix(60),
        ),
        # Epochs that only one log has, between two common epochs.
        (
            LogExtent(journal((1, 0), (2, 10), (4, 30), (5, 50)), 0, 90),
            LogExtent(journal((1, 0), (2, 10), (3, 20)), 0, 99),
            CommonPrefix(20),
        ),
        # Empty replicas: of a complete log, and of one whose begin retention has removed.
        (LogExtent(journal((1, 0)), 0, 90), LogExtent((), 0, 0), CommonPrefix(0)),
        (LogExtent(journal((2, 40)), 64, 90), LogExtent((), 0, 0), FullCopy(64)),
        # A replica that was down until retention removed its end.
        (LogExtent(journal((2, 40)), 64, 90), LogExtent(journal((1, 0)), 0, 30), FullCopy(64)),
        # The logs diverge before the begin of the master's log.
        (
            LogExtent(journal((1, 0), (3, 50)), 64, 90),
            LogExtent(journal((1, 0), (2, 40)), 0, 80),
            FullCopy(64),
        ),
        (
            LogExtent(journal((2, 40)), 64, 90),
            LogExtent(journal((1, 0), (2, 40)), 0, 80),
            CommonPrefix(80),
        ),
    ],
)
def test_agree_finds_the_end_of_the_common_part(
    master: LogExtent, replica: LogExtent, agreement: Agreement
) -> None:
    assert agree(master, replica) == agreement


def test_overlapping_logs_without_a_common_epoch_have_diverged() -> None:
    found = agree(LogExtent(journal((2, 0)), 0, 90), LogExtent(journal((1, 0)), 0, 50))
    assert isinstance(found, Divergence)
    assert "1 from 0" in found.why


def test_an_epoch_without_a_record_is_replaced_by_the_next() -> None:
    assert with_epoch(journal((1, 0), (2, 50)), 3, 50, log_min=0) == journal((1, 0), (3, 50))
    with pytest.raises(AssertionError):
        with_epoch(journal((3, 0)), 3, 50, log_min=0)


def test_the_records_of_a_broker_that_was_alone_belong_to_the_first_epoch() -> None:
    assert with_epoch((), 1, 500, log_min=64) == journal((1, 64))
    assert with_epoch(journal((1, 64)), 2, 500, log_min=64) == journal((1, 64), (2, 500))


def test_epoch_at_returns_the_epoch_of_an_offset() -> None:
    entries = journal((1, 0), (4, 50))
    assert [epoch_at(entries, offset) for offset in (0, 49, 50, 99)] == [1, 1, 4, 4]
    assert cut_at(entries, 50) == journal((1, 0))
    assert (last_epoch(entries), last_epoch(())) == (4, 0)


def test_only_a_later_unclean_election_cuts_confirmed_records() -> None:
    entries = journal((1, 0), (4, 50))
    assert may_truncate(entries, cut=60, confirm=60, unclean_since=0)
    assert not may_truncate(entries, cut=59, confirm=60, unclean_since=4)
    assert may_truncate(entries, cut=59, confirm=60, unclean_since=5)


A, B, C = (ReplicaRun(ReplicaId(n), f"{n}.0") for n in range(3))


@pytest.mark.parametrize(
    ("confirmed", "proposed", "acked", "expected"),
    [
        ({A, B, C}, set(), {A: 90, B: 80, C: 70}, 70),
        ({A, B, C}, set(), {A: 90, B: 80}, 10),
        # A learner that is proposed must ack, and counts only after it is recorded.
        ({A, B}, {A, B, C}, {A: 90, B: 80}, 10),
        ({A, B}, {A, B, C}, {A: 90, B: 80, C: 60}, 60),
        ({A}, {A, B}, {A: 90, B: 80}, 10),
        # A member that is proposed away must ack until a view without it.
        ({A, B, C}, {A, B}, {A: 90, B: 80}, 10),
        # Not before the first record of this epoch, and never lower than before.
        ({A, B}, set(), {A: 90, B: 49}, 10),
        ({A, B}, set(), {A: 90, B: 50}, 50),
    ],
)
def test_the_confirm_offset_is_the_lowest_ack_of_the_union(
    confirmed: set[ReplicaRun],
    proposed: set[ReplicaRun],
    acked: dict[ReplicaRun, int],
    expected: int,
) -> None:
    found = confirm_offset(
        confirmed=confirmed,
        proposed=proposed,
        min_in_sync=2,
        acked=acked,
        epoch_start_end=50,
        before=10,
    )
    assert found == expected


def test_an_ack_of_a_replica_that_was_silent_counts_even_if_it_has_nothing_new() -> None:
    view = ReplicationView(
        epoch=1, version=1, master=A, sss=frozenset({A, B}), eligible=frozenset(), min_in_sync=2
    )
    silent = with_silent(with_ack(Commitment(A, view, 50, 10), B, 80), B)
    waiting = with_ack(silent, A, 90)
    assert waiting.confirm == 10
    assert with_ack(waiting, B, 80).confirm == 80
