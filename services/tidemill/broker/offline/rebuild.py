"""Deleting derived files, so that the next start rebuilds them from the log.

Derived files may have content that a damaged log has lost. They are therefore deleted only if the
whole log is sound.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from tidemill.broker.engine.store.disk import Disk
from tidemill.broker.engine.timer.config import TimerConfig
from tidemill.broker.engine.upkeep.checkpoint import CHECKPOINT_FILE
from tidemill.broker.offline import block_files
from tidemill.broker.offline.check import check
from tidemill.broker.offline.findings import OF_THE_LOG, Damage, Finding, WorkProgress
from tidemill.broker.offline.log_scan import list_segments
from tidemill.broker.offline.source import salvaging

T = TypeVar("T")
Steps = Generator[WorkProgress, None, T]
_DERIVED: Final = {
    Damage.QUEUES,
    Damage.INDEX,
    Damage.SNAPSHOT,
    Damage.TIMER_CHECKPOINT,
    Damage.TIMER_TABLE,
    Damage.TIMER_WHEEL,
    Damage.TIMER_LOG,
}
# Not the snapshots: they identify the store, and a start uses none of them without the others.
_FOLDERS: Final = (
    block_files.QUEUES.folder,
    block_files.INDEX.folder,
    "timer",
    "timer/state",
    "timer/timerlog",
)


@dataclass(slots=True, kw_only=True)
class MendReport:
    """Sentences about mended or rebuilt files, and about the damage that is left."""

    mended: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether no damage is left."""
        return not self.left


def rebuild(disk: Disk, timer: TimerConfig | None = None, *, is_dry: bool) -> Steps[MendReport]:
    """Delete damaged derived files if the log is sound. Yields its progress.

    The caller owns the directory. Raises as `check`.
    """
    found = yield from check(salvaging(disk), timer)
    report = MendReport()
    in_log = [one for one in found.findings if one.damage in OF_THE_LOG]
    report.left += [sentence(one, "mend the log first, from a backup") for one in in_log]
    derived = derived_findings(found.findings)
    if in_log:
        report.left += kept(derived)
    else:
        report.mended += drop(disk, {one.file for one in derived}, is_dry=is_dry)
        if any(one.damage is Damage.CHECKPOINT for one in found.findings):
            report.mended.append(f"{CHECKPOINT_FILE}: the next start writes it again")
    return report


def derived_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings in files that a start rebuilds from the log."""
    return [one for one in findings if one.damage in _DERIVED]


def kept(derived: Iterable[Finding]) -> list[str]:
    """Say why damaged derived files stay beside a damaged log."""
    why = "kept: the log is damaged too, and this file may have content that the log has lost"
    return [sentence(one, why) for one in derived]


def list_derived(disk: Disk) -> set[str]:
    """Return the queue and index files; without any segment of the log, every derived file."""
    is_empty = not list_segments(disk).segments
    folders = _FOLDERS if is_empty else (block_files.QUEUES.folder, block_files.INDEX.folder)
    return {name for folder in folders for name in disk.names(folder)}


def drop(disk: Disk, names: Collection[str], *, is_dry: bool) -> list[str]:
    """Delete derived files durably; return a sentence for each."""
    folders, sentences = set(), []
    for name in sorted(names):
        folder = name.rpartition("/")[0]
        is_there = name in disk.names(folder)
        deleted = "deleted; " if is_there else ""
        sentences.append(f"{name}: {deleted}the next start rebuilds it")
        if is_there and not is_dry:
            disk.delete(name)
            folders.add(folder)
    for folder in sorted(folders):
        disk.folder(folder).sync()
    return sentences


def sentence(finding: Finding, what: str) -> str:
    """Say what happened to a finding."""
    where = finding.file
    if finding.log_offset is not None:
        where += f" at log offset {finding.log_offset}"
    return f"{where}, {finding.damage.value}: {what}"
