"""What J1 archives held against its files and the broker, and sealed where all of them agree.

A range is sealed when its row of the manifest, the rows of its files and those of the broker are
the same; what no broker has any more is sealed by its files alone, and the seal says so. Only what
is sealed are brokers told to let go of (ADR 0053).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Final, final

from tidemill_pipeline.archive.manifest import (
    Archive,
    ArchivedQueue,
    ArchivedRange,
    QueueKey,
    sealing,
)
from tidemill_pipeline.archive.tasks import ArchiveTask, check_follows, foreign_queue, shorter
from tidemill_pipeline.client import connect
from tidemill_pipeline.cluster_state import ClusterState
from tidemill_pipeline.errors import ArchiveError, ClusterRejection
from tidemill_pipeline.jobs.archive import ArchiveJob, nobody_has, range_of
from tidemill_pipeline.offsets import QueueEnds, SourceQueue
from tidemill_pipeline.options import TopicSelection

# As an expression of topics, those of the cluster's own among them that begin with %DLQ%.
_EVERY_TOPIC: Final = "%?.*"
FOLLOWED_A_LOG: Final = 16  # queues that are looked at again when all of them is sealed


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What a verification has come to, in sentences."""

    wrong: list[str]
    closed: list[str]  # what was sealed though no broker has it any more
    unread: int = 0  # messages that were sealed before, and were not read again


@final
@dataclass(slots=True)
class _Found:
    """What there is to compare, and what is wrong before anything is."""

    tasks: list[ArchiveTask] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    others: set[SourceQueue] = field(default_factory=set)  # that are called as what is archived
    sealed: list[QueueKey] = field(default_factory=list)  # as a whole
    unasked: set[str] = field(default_factory=set)  # namespaces


def verify(job: ArchiveJob, *, is_all: bool = False) -> Verified:
    """Compare what is not sealed, seal what agrees, and return what does not.

    With `is_all` the files of what is sealed are compared with the manifest and their checksums,
    too: a disk may have changed them since.
    """
    archive = job.archive()
    sealed = list(_sealed(job, archive))
    cluster = _look_at_all(job, archive)
    found = _find(job, archive, cluster)
    for key, why in _not_following(job, archive, found.sealed):
        found.wrong += [why] if why else []
        found.others.add(key.queue)
    if is_all:
        found.wrong += _look_again(job, archive, sealed)
    closed = _compare_and_seal(job, archive, found)
    archive = job.archive()
    cluster = _look_at_all(job, archive)
    found.wrong += job.gate.release(archive, cluster, found.others, may_be_others=job.store_is_gone)
    unasked = found.unasked | job.gate.unreleased(archive, cluster)
    found.wrong += [_of_namespace(each) for each in unasked]
    return Verified(
        wrong=sorted(found.wrong),
        closed=sorted(closed),
        unread=0 if is_all else sum(each.rows for each in sealed),
    )


def _sealed(job: ArchiveJob, archive: Archive) -> Iterator[ArchivedRange]:
    """Yield what is sealed and was not let go of, of the namespace."""
    for key, queue in sorted(archive.queues.items()):
        if key.namespace == job.options.connection.namespace:
            yield from (each for each in queue.ranges if queue.start <= each.start < queue.sealed)


def _look_again(
    job: ArchiveJob, archive: Archive, sealed: Iterable[ArchivedRange]
) -> Iterator[str]:
    """Yield what is wrong with files of what is sealed."""
    tasks = [
        ArchiveTask(
            work="verify",
            run=job.run,
            key=each.key,
            start=each.start,
            end=each.end,
            expected=each,
            nobody="it is sealed",
            files=tuple(archive.holding(each.key, each.start, each.end)),
        )
        for each in sealed
    ]
    for answer in job.run_tasks(job.options, tasks):
        if answer["wrong"]:
            yield f"{_place(range_of(answer['range']))}: {answer['wrong']}"


def _look_at_all(job: ArchiveJob, archive: Archive) -> ClusterState:
    """Ask where all queues end that may be in the archive, whatever this run was asked for.

    Behind a look at the archive: beside an archiver it has more than brokers had before.
    """
    own = {key.topic for key in archive.queues if key.topic.startswith("%")}
    names = sorted(name for name in own if not name.startswith("%DLQ%"))
    topics = TopicSelection(names=tuple(names), pattern=_EVERY_TOPIC)
    return connect(job.options.connection).whole_cluster(topics)


def _find(job: ArchiveJob, archive: Archive, cluster: ClusterState) -> _Found:
    """Say of each queue what is to be compared with whom, or why nothing can be."""
    found = _Found()
    for key, queue in sorted(archive.queues.items()):
        unsealed = queue.unsealed()
        if key.namespace != job.options.connection.namespace:
            found.unasked |= {key.namespace} if unsealed else set()
            continue
        there = cluster.queues.get(key.queue)
        is_short = there is not None and there.max_offset < queue.end
        nobody = _why_nobody(job, key, queue, cluster) if unsealed or is_short else ""
        if there is not None and nobody:
            found.others.add(key.queue)
        if nobody and not job.store_is_gone:
            found.wrong.append(_unless_gone(key, queue, nobody, is_there=there is not None))
        elif there is not None and not nobody and not unsealed:
            found.sealed.append(key)
        else:
            found.tasks += [
                ArchiveTask(
                    work="verify",
                    run=job.run,
                    key=key,
                    start=each.start,
                    end=each.end,
                    expected=each,
                    nobody=nobody,
                    files=tuple(archive.holding(key, each.start, each.end)),
                )
                for each in unsealed
            ]
    return found


def _why_nobody(job: ArchiveJob, key: QueueKey, queue: ArchivedQueue, cluster: ClusterState) -> str:
    """Return why what is archived of a queue can be compared with nobody; empty where it can be."""
    there = cluster.queues.get(key.queue)
    if there is not None and there.max_offset < queue.end:
        return str(foreign_queue(key.queue, shorter(queue, there)))
    nobody = nobody_has(key, cluster)
    if not nobody and there is not None and job.store_is_gone:
        # It may be as long again as what was archived, or longer.
        nobody = _not_archived(job, there, queue)
    return nobody


def _unless_gone(key: QueueKey, queue: ArchivedQueue, nobody: str, *, is_there: bool) -> str:
    """Return what an operator may say where it may be the wrong cluster that was asked."""
    unsealed = queue.unsealed()
    if not is_there:
        return (
            f"{key}, offsets from {unsealed[0].start} to {queue.end}: {nobody}. If that is for"
            " good, --store-is-gone seals them by their files alone"
        )
    remedy = "; --store-is-gone seals what is not sealed by its files alone"
    return nobody + (remedy if unsealed else "")


def _not_archived(job: ArchiveJob, there: QueueEnds, queue: ArchivedQueue) -> str:
    """Return why a queue is not the one that was archived; empty where it is."""
    try:
        check_follows(job.options, there.queue, queue.last_before(queue.end))
    except ArchiveError as error:
        return str(error)
    except ClusterRejection:
        return ""  # Whoever compares it says so.
    return ""


def _not_following(
    job: ArchiveJob, archive: Archive, sealed: Iterable[QueueKey]
) -> Iterator[tuple[QueueKey, str]]:
    """Yield queues that are not what is archived of them, though as long or longer, and why.

    An operator may have said that this is right; then there is nothing to say.

    Of queues of which nothing else is compared any more. A store that was restored lacks what was
    archived last, so of each broker group's log those are asked for which that was so.
    """
    latest: dict[tuple[str, str], list[tuple[int, QueueKey]]] = {}
    for key in sealed:
        last = archive.queues[key].last_before(archive.queues[key].end)
        if last is not None:
            log_id = key.queue.incarnation.log_id
            latest.setdefault((key.broker, log_id), []).append((last.max_store_ms, key))
    for found in latest.values():
        for _, key in nlargest(FOLLOWED_A_LOG, found):
            queue = archive.queues[key]
            try:
                check_follows(job.options, key.queue, queue.last_before(queue.end))
            except ArchiveError as error:
                yield key, "" if job.store_is_gone else str(error)
            except ClusterRejection as error:
                yield key, f"{key}: {error}"


def _compare_and_seal(job: ArchiveJob, archive: Archive, found: _Found) -> list[str]:
    """Compare, commit a seal of what agrees, and return what of it no broker has any more."""
    passed: list[ArchivedRange] = []
    nobody: dict[ArchivedRange, str] = {}
    for answer in job.run_tasks(job.options, found.tasks):
        of = range_of(answer["range"])
        job.inputs.note(of.key.queue, of.start, of.end)
        if answer["wrong"]:
            found.wrong.append(f"{_place(of)}: {answer['wrong']}")
            continue
        passed.append(of)
        if answer["closed"]:
            nobody[of] = answer["closed"]
    for of, why in _taken_back(job, archive, nobody):
        passed.remove(of)
        found.wrong.append(f"{_place(of)}: {why}")
    marks = sealing(archive, passed)
    # Those behind what is wrong are looked at again.
    ends = dict(marks)
    closed = {of: why for of, why in nobody.items() if of.end <= ends.get(of.key, 0)}
    if marks:
        ranges = tuple((of.key, of.start, of.end) for of in closed)
        job.commit("seal", marks=marks, closed=ranges)
    return [f"{_place(of)}: {why}" for of, why in closed.items()]


def _taken_back(
    job: ArchiveJob, archive: Archive, nobody: Iterable[ArchivedRange]
) -> Iterator[tuple[ArchivedRange, str]]:
    """Yield what was compared with nobody since its store is another one now, and why.

    It was the one that was archived when it was looked at. That it is not any more takes an
    operator's word, as ever.
    """
    if job.store_is_gone or not nobody:
        return
    cluster = _look_at_all(job, archive)
    for of in nobody:
        there = cluster.queues.get(of.key.queue)
        if there is not None and there.max_offset < of.end:
            yield of, str(foreign_queue(of.key.queue, shorter(archive.queues[of.key], there)))
        elif why := nobody_has(of.key, cluster):
            yield of, f"{why}. If that is for good, --store-is-gone seals them by their files alone"


def _of_namespace(name: str) -> str:
    """Return what to do for a namespace that a verification did not look at."""
    if not name:
        return "what is archived of no namespace is verified and let go of without that option"
    return (
        f"what is archived of the namespace {name!r} is verified and let go of with --option"
        f" namespace={name}"
    )


def _place(of: ArchivedRange) -> str:
    return f"{of.key}, offsets from {of.start} to {of.end}"
