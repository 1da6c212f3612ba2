"""Writes of the record and their outcomes, as values.

If the answer to a swap was lost, the swap may still arrive while the store has the version on which
it is based. It is PENDING then. Its writer reads again, or prevents it by a swap without a change.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from tidemill.controller.election.record import GroupRecord


class StoredRecord(NamedTuple):
    """A record with the token of the store for its version, which is only compared."""

    record: GroupRecord
    token: str


class WriteAttempt(NamedTuple):
    """A write of a record in place of the one that was read."""

    base: StoredRecord
    record: GroupRecord  # has its own write id


class WriteOutcome(Enum):
    """The outcome of a write."""

    APPLIED = auto()
    OVERTAKEN = auto()  # another write came first, so this one never arrives
    PENDING = auto()  # it may still arrive


def attempt_write(base: StoredRecord, record: GroupRecord, write_id: str) -> WriteAttempt:
    """Return a write of `record`, which was computed from `base`."""
    # The version grows by more than one only if replicas have seen newer versions than the record.
    assert record.version > base.record.version, "each write has a new version"
    history = record.history
    if record.epoch > base.record.epoch:
        history = (*history[:-1], history[-1]._replace(write_id=write_id))
    return WriteAttempt(base, record._replace(write_id=write_id, history=history))


def attempt_no_change(base: StoredRecord, write_id: str) -> WriteAttempt:
    """Return a write without a change, which prevents late writes that are based on `base`.

    The store gives it another token. The version stays: with a higher one, a record that was
    restored from a backup would no longer be older than the one that replicas have seen.
    """
    return WriteAttempt(base, base.record._replace(write_id=write_id))


def outcome_of(attempt: WriteAttempt, stored: StoredRecord) -> WriteOutcome:
    """Return the outcome of an attempt, given the stored record."""
    write_id = attempt.record.write_id
    if stored.record.write_id == write_id or any(
        one.write_id == write_id for one in stored.record.history
    ):
        return WriteOutcome.APPLIED
    if stored.token == attempt.base.token:
        return WriteOutcome.PENDING
    # A change of the sets may have been applied and overwritten, or never have arrived. Both cases
    # look the same, and in both the writer decides again.
    return WriteOutcome.OVERTAKEN
