"""A backup of a store, from which a mend takes whole segments."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar, final

from tidemill.broker.engine.layout import message, store_checkpoint
from tidemill.broker.engine.layout.message import FLAG_REMAINS, FLAG_SCHEDULE
from tidemill.broker.engine.layout.record import RecordKind
from tidemill.broker.engine.upkeep.checkpoint import CHECKPOINT_FILE
from tidemill.broker.offline.check import CheckReport, NoStore
from tidemill.broker.offline.findings import AffectedMessage, Finding, WorkProgress
from tidemill.broker.offline.log_scan import (
    IntactRecord,
    LogScan,
    LogSegment,
    list_held,
    list_segments,
    read_one,
)
from tidemill.broker.offline.names import TopicNames
from tidemill.broker.offline.packed_file import open_segment
from tidemill.broker.offline.source import FileWindow, Source, salvaging
from tidemill.message import salvage

T = TypeVar("T")
Steps = Generator[WorkProgress, None, T]


@final
class Backup:
    """A copy of a store. Only bytes with matching checksums are used."""

    def __init__(self, source: Source) -> None:
        """List the segments of the backup. Raises NoStore if there are none."""
        self.source = salvaging(source)
        self.segments = list_segments(source).segments
        self.held = list_held(source)
        self.is_same_life = False  # the same store, in the same epoch
        if not self.segments:
            raise NoStore("the backup is not a store: its folder log holds no segment")

    def identify(self, store: CheckReport) -> Steps[None]:
        """Read the log of the backup. Raises NoStore if it is a backup of another store."""
        checkpoint = store_checkpoint.find(self.source.read(CHECKPOINT_FILE))
        durable_offset = checkpoint.durable_offset if checkpoint else 0
        scan = LogScan(self.source, self.segments, begin=0, durable_offset=durable_offset)
        names, epoch = TopicNames(), 0
        for n, found in enumerate(scan.walk()):
            if n % 4096 == 0:
                yield WorkProgress("backup", found.log_offset - self.segments[0].start, 0)
            if isinstance(found, IntactRecord):
                names.learn_record(found)
                epoch = max(epoch, found.header.epoch)
        ours, theirs = store.names.handle_secret, names.handle_secret
        if ours and theirs and ours != theirs:
            raise NoStore("the backup is of another store; nothing was changed")
        self.is_same_life = bool(ours) and ours == theirs and epoch == store.epoch

    def find_segment(self, start: int) -> LogSegment | None:
        """Return the segment that begins at a log offset, also if it was set aside."""
        return next((one for one in [*self.segments, *self.held] if one.start == start), None)

    def find_message(self, finding: Finding) -> LogSegment | None:
        """Return the segment with the delayed message that a missing held segment affects."""
        (affected,) = finding.affected
        for segment in [*self.segments, *self.held]:
            if finding.log_offset is None or not segment.start <= finding.log_offset < segment.end:
                continue
            file = open_segment(self.source, segment.name)
            found = read_one(FileWindow(file), segment, finding.log_offset - segment.start)
            file.close()
            if isinstance(found, IntactRecord) and _is_message_of(found, affected):
                return segment
        return None


def _is_message_of(found: IntactRecord, affected: AffectedMessage) -> bool:
    """Whether a record is the message of the timer that damage affects."""
    flags = found.header.flags & (FLAG_SCHEDULE | FLAG_REMAINS)
    if found.header.kind != RecordKind.MESSAGE or flags != FLAG_SCHEDULE or affected.timer is None:
        return False
    message_id = salvage.properties_of(bytes(found.tail)).message_id.decode(errors="replace")
    is_its = message.decode_target(found.body).timer_id == affected.timer.timer_id
    return is_its and affected.message_id in ("", message_id)
