"""What a check finds: where, what it means, whom it concerns, and what can be done."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Damage(StrEnum):
    """The kinds of damage. A closed set: each has a row in `MEANINGS`."""

    RECORD = "record"
    HOLE = "hole"
    SEGMENT_MISSING = "segment-missing"
    SEGMENT_CUT = "segment-cut"
    STRANGE_FILE = "strange-file"
    HELD = "held"
    HELD_MISSING = "held-missing"
    QUEUES = "queues"
    INDEX = "index"
    SNAPSHOT = "snapshot"
    CHECKPOINT = "checkpoint"
    REPLICA = "replica"
    TIMER_CHECKPOINT = "timer-checkpoint"
    TIMER_TABLE = "timer-table"
    TIMER_WHEEL = "timer-wheel"
    TIMER_LOG = "timer-log"
    UNREADABLE = "unreadable"


# Nothing says it a second time: only a backup has it.
OF_THE_LOG = frozenset(
    {Damage.RECORD, Damage.HOLE, Damage.SEGMENT_MISSING, Damage.SEGMENT_CUT, Damage.STRANGE_FILE}
)
_FROM_BACKUP = "`tidemill store repair DIR --from BACKUP` takes it from a backup that has it."


class Meaning(NamedTuple):
    """What a kind of damage means, and its remedy."""

    means: str
    remedy: str


MEANINGS: dict[Damage, Meaning] = {
    Damage.RECORD: Meaning(
        "one record of the log is damaged, and nothing else says what it said",
        "A message goes to the dead letters of each group that comes to it, with what is left of "
        f"its properties and without its body. {_FROM_BACKUP}",
    ),
    Damage.HOLE: Meaning(
        "no record can be read in this stretch of the log; besides messages there may have been "
        "pops, acks and configuration",
        "Messages go to the dead letters of each group that comes to them. Keep the derived files: "
        f"they know what the log no longer says. {_FROM_BACKUP}",
    ),
    Damage.SEGMENT_MISSING: Meaning(
        "a stretch of the log is not there; the broker does not start without it", _FROM_BACKUP
    ),
    Damage.SEGMENT_CUT: Meaning(
        "a file of the log has been cut; the broker does not start over it", _FROM_BACKUP
    ),
    Damage.STRANGE_FILE: Meaning(
        "a file in the folder of the log is no segment; the broker does not start beside it",
        "If it was a segment, give it its name back (the log offset at which it begins, in 20 "
        "digits); if not, move it away. If its name ends in .copying, a copy did not come to its "
        "end: delete the whole directory, and copy again.",
    ),
    Damage.HELD: Meaning(
        "a segment that was set aside is damaged, as it is where it was kept for a delayed message "
        "that could not be copied; nothing else is read from it",
        "What is left of the message goes to the dead letters of timers when it is due. "
        f"{_FROM_BACKUP} Then it is delivered as it was sent.",
    ),
    Damage.HELD_MISSING: Meaning(
        "the message of a delayed message that could not be copied is in no file: its segment was "
        "set aside, and that file is missing or cut",
        "What is left of the message goes to the dead letters of timers when it is due. "
        f"{_FROM_BACKUP} Then it is delivered as it was sent.",
    ),
    Damage.QUEUES: Meaning(
        "a file that says where messages lie is damaged; the log says it too",
        "None needed: the broker derives it again by itself when it starts or meets the damage.",
    ),
    Damage.INDEX: Meaning(
        "a file by which messages are looked up is damaged; the log says it too",
        "None needed: the broker derives it again by itself when it starts or meets the damage.",
    ),
    Damage.SNAPSHOT: Meaning(
        "a snapshot of deliveries and positions is damaged; the log says it too",
        "None needed: the next start takes the one before, or reads the log for longer.",
    ),
    Damage.CHECKPOINT: Meaning(
        "nothing says how far the derived files reach, nor how far the log was durable",
        "None needed: the next start reads the whole log, and writes it again.",
    ),
    Damage.REPLICA: Meaning(
        "what a replica must not forget of its broker group is damaged",
        "Of a file that is written in turns (`.a` and `.b`) the other one does. Where the broker "
        "does not start over it: empty the folder; the replica is copied again from its group.",
    ),
    Damage.TIMER_CHECKPOINT: Meaning(
        "one of the two files that say from where timers are followed is damaged",
        "None needed: the next start takes the other one, or makes all timer files again.",
    ),
    Damage.TIMER_TABLE: Meaning(
        "what is known of some delayed messages is damaged; the log says it too",
        "None needed: the next start makes all timer files again from the log.",
    ),
    Damage.TIMER_WHEEL: Meaning(
        "the wheel of delayed messages is damaged; the timer table says it too",
        "None needed: the next start, or the running broker, makes it again from the table.",
    ),
    Damage.TIMER_LOG: Meaning(
        "the chains of delayed messages are damaged; the timer table says it too",
        "None needed: the next start, or the running broker, makes them again from the table.",
    ),
    Damage.UNREADABLE: Meaning(
        "the disk does not give out these bytes; what is damaged by that is told beside this",
        "`tidemill store copy` takes all else to a sound disk, and `tidemill store repair COPY "
        "--from BACKUP` mends what is damaged there. Where the broker does not start over them, "
        "nobody can say whether what was answered OK stands there: restore a backup.",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerConcern:
    """A delayed message that damage concerns."""

    timer_id: int
    due_at_ms: int
    topic: str  # where it was to go
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Concern:
    """A message that damage concerns."""

    topic: str
    queue_id: int
    queue_offset: int
    message_id: str = ""  # "": it cannot be read any more
    timer: TimerConcern | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One damaged place."""

    damage: Damage
    file: str
    position: int  # byte in the file
    size: int  # bytes that are damaged, 0: not known
    detail: str
    log_offset: int | None = None
    concerns: tuple[Concern, ...] = ()
    stops_start: bool = False  # the broker does not start before this is mended
    # For a repair: bytes of the log that are missing or wrong.
    log_end: int | None = None


class Progress(NamedTuple):
    """How far long work has come."""

    what: str
    done_bytes: int
    total_bytes: int
