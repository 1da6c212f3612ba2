"""The findings of a check: position, meaning, affected messages, and remedy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Damage(StrEnum):
    """The kinds of damage. A closed set: each has a row in `DAMAGE_DESCRIPTIONS`."""

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


# Only a backup or a replica has the damaged bytes.
OF_THE_LOG = frozenset(
    {Damage.RECORD, Damage.HOLE, Damage.SEGMENT_MISSING, Damage.SEGMENT_CUT, Damage.STRANGE_FILE}
)
_FROM_BACKUP = "Mend it: `tidemill store mend DIR --from BACKUP`."
_SALVAGED = "the dead letters of each consumer group that reads it"
# A start cannot read past such damage, so nothing salvages it.
_BLOCKING = (
    f"{_FROM_BACKUP} A replica mends it at its start if other replicas of its group run. Without "
    "either, read docs/backup-and-restore.md (Damage without a backup)."
)
_MISSING = "None needed if the log is sound: the next start rebuilds it."
# A derived file costs nothing, but its damage is a sign.
_WATCH = "Damage without a power cut points to the disk or memory: see docs/runbooks/Corruption.md."
_REBUILT = f"The broker rebuilds it at its next start, or when it reads the damage. {_WATCH}"
_TIMERS_REBUILT = f"The next start rebuilds all timer files from the log. {_WATCH}"
_WHEEL_REBUILT = f"The broker rebuilds it from the state table, also while it runs. {_WATCH}"


class DamageDescription(NamedTuple):
    """The meaning of a kind of damage, and its remedy."""

    means: str
    remedy: str


DAMAGE_DESCRIPTIONS: dict[Damage, DamageDescription] = {
    Damage.RECORD: DamageDescription(
        "one record of the log is damaged, and no other file has its content",
        f"A damaged message moves to {_SALVAGED}, with its intact properties and without its "
        f"body. {_FROM_BACKUP}",
    ),
    Damage.HOLE: DamageDescription(
        "no record is salvaging in this part of the log; it may have had messages, pops, acks and "
        "configuration",
        f"Its messages move to {_SALVAGED}. Keep the derived files: they have what the log has "
        f"lost. {_FROM_BACKUP}",
    ),
    Damage.SEGMENT_MISSING: DamageDescription(
        "a part of the log is missing; the broker does not start without it", _FROM_BACKUP
    ),
    Damage.SEGMENT_CUT: DamageDescription(
        "a file of the log is cut; the broker does not start over it", _FROM_BACKUP
    ),
    Damage.STRANGE_FILE: DamageDescription(
        "a file in the folder of the log is not a segment; the broker does not start beside it",
        "If it was a segment, give it its name again: the log offset of its begin, in 20 digits. "
        "Otherwise move it away. If its name ends in .copying, a copy was interrupted: delete the "
        "whole directory, and copy again.",
    ),
    Damage.HELD: DamageDescription(
        "a segment that was set aside is damaged; it is kept only for a damaged delayed message",
        "At its due time, the intact properties of the message move to the dead letters of timers. "
        f"{_FROM_BACKUP} The whole message is then delivered.",
    ),
    Damage.HELD_MISSING: DamageDescription(
        "a segment that was set aside for a damaged delayed message is missing or cut",
        "At its due time, the intact properties of the message move to the dead letters of timers. "
        f"{_FROM_BACKUP} The whole message is then delivered.",
    ),
    Damage.QUEUES: DamageDescription("a file with entries of consume queues is damaged", _REBUILT),
    Damage.INDEX: DamageDescription(
        "a file with entries of the message index is damaged", _REBUILT
    ),
    Damage.SNAPSHOT: DamageDescription(
        "a snapshot of deliveries and positions is damaged",
        f"The next start uses the previous snapshot, or replays more of the log. {_WATCH}",
    ),
    Damage.CHECKPOINT: DamageDescription(
        "the ends of the derived files and of the durable log are unknown",
        "The next start reads the whole log, and writes the file again. A check without the file"
        " does not notice that the end of the log is lost.",
    ),
    Damage.REPLICA: DamageDescription(
        "a file with what this replica has acknowledged to its group is damaged",
        "If it is one of two files that are written in turns (`.a` and `.b`), the other one is "
        "used. If the broker does not start, empty the data directory: the replica copies the log "
        "again.",
    ),
    Damage.TIMER_CHECKPOINT: DamageDescription(
        "one of the two checkpoint files of timers is damaged",
        f"The next start uses the other one, or rebuilds all timer files. {_WATCH}",
    ),
    Damage.TIMER_TABLE: DamageDescription(
        "entries of delayed messages in the state table are damaged", _TIMERS_REBUILT
    ),
    Damage.TIMER_WHEEL: DamageDescription("slots of the timer wheel are damaged", _WHEEL_REBUILT),
    Damage.TIMER_LOG: DamageDescription("records of the timer log are damaged", _WHEEL_REBUILT),
    Damage.UNREADABLE: DamageDescription(
        "the disk cannot read these bytes; other findings list the damage that follows",
        "`tidemill store copy` copies all other bytes to a sound disk, and `tidemill store mend "
        "COPY --from BACKUP` mends the copy. If the broker does not start over these bytes, they "
        "may hold acknowledged messages: restore a backup.",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AffectedTimer:
    """A delayed message in a damaged range."""

    timer_id: int
    due_at_ms: int
    topic: str  # to which it will be delivered
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AffectedMessage:
    """A message in a damaged range."""

    topic: str
    queue_id: int
    queue_offset: int
    message_id: str = ""  # "" if it is unreadable
    timer: AffectedTimer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One damaged range of a file."""

    damage: Damage
    file: str
    position: int  # byte in the file
    size: int  # damaged bytes; 0: unknown
    detail: str
    log_offset: int | None = None
    affected: tuple[AffectedMessage, ...] = ()
    stops_start: bool = False  # the broker does not start over this damage
    log_end: int | None = None  # the end of the damaged range of the log
    is_missing: bool = False  # a whole derived file, which a start rebuilds from a sound log

    @property
    def remedy(self) -> str:
        """The remedy, which depends on whether the broker starts."""
        if self.stops_start and self.damage in (Damage.RECORD, Damage.HOLE):
            return _BLOCKING
        if self.is_missing:
            return _MISSING
        return DAMAGE_DESCRIPTIONS[self.damage].remedy


class WorkProgress(NamedTuple):
    """The progress of long work."""

    what: str
    done_bytes: int
    total_bytes: int
