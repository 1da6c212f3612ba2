"""The parts of the engine that all background jobs read, and the steps of a job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias, final

from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.pop.acks import RoundAcks
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.room import DiskRoom
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.disk import Disk, File
from tidemill.broker.engine.store.mappings import Mappings
from tidemill.broker.engine.tally import Tally

# A job under way: each step is one slice, and yields the files to sync before the next slice.
Steps: TypeAlias = Iterator[list[File]]


@final
class QuietMoment:
    """A moment at which no round is pending: memory is the fold of exactly the durable log."""

    def __init__(self, log: CommitLog, acks: RoundAcks) -> None:
        self._log = log
        self._acks = acks
        self.is_awaited = False  # by the job under way

    @property
    def is_now(self) -> bool:
        """Whether no round is pending."""
        return self._log.folded_offset == self._log.committed_offset and not self._acks

    def __call__(self) -> Steps:
        """Yield until no round is pending."""
        while not self.is_now:
            self.is_awaited = True
            yield []
        self.is_awaited = False


class UpkeepParts(NamedTuple):
    """The parts of the engine that all background jobs read."""

    config: EngineConfig
    disk: Disk
    mappings: Mappings
    store: MessageStore
    catalog: Catalog
    pops: PopState
    quiet: QuietMoment
    room: DiskRoom
    tally: Tally
