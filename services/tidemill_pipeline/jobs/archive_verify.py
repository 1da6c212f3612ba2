"""Comparison of an archive with its files and the brokers; matching ranges are sealed.

A range is sealed if manifest, files and broker have the same rows. Messages that no broker has any
more are sealed by their files alone, and the seal records that. Brokers may delete only sealed
messages (ADR 0053).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Final, final

from tidemill.message.resource_names import DEAD_LETTER_TOPIC_PREFIX
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
from tidemill_pipeline.jobs.archive import ArchiveJob, missing_store, range_of
from tidemill_pipeline.offsets import QueueEnds, SourceQueue
from tidemill_pipeline.options import TopicSelection

# All topics, with dead-letter topics (%DLQ%...) but without other internal topics.
_EVERY_TOPIC: Final = "%?.*"
FOLLOWED_A_LOG: Final = 16  # fully sealed queues per log: their last message is compared again


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationResult:
    """Result of a verification, in sentences."""

    wrong: list[str]
    closed: list[str]  # ranges that were sealed by their files alone
    unread: int = 0  # messages that were sealed before and not read again


@final
@dataclass(slots=True)
class _Comparison:
    """Tasks of a verification, and errors that are known before they run."""

    tasks: list[ArchiveTask] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    others: set[SourceQueue] = field(default_factory=set)  # same name, but different messages
    sealed: list[QueueKey] = field(default_factory=list)  # completely sealed queues
    unasked: set[str] = field(default_factory=set)  # namespaces with unsealed messages


def verify(job: ArchiveJob, *, is_all: bool = False) -> VerificationResult:
    """Compare unsealed ranges, seal those that agree, and return the others.

    With `is_all` the files of sealed ranges are compared with the manifest and their checksums as
    well: a disk may have changed them.
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
    return VerificationResult(
        wrong=sorted(found.wrong),
        closed=sorted(closed),
        unread=0 if is_all else sum(each.rows for each in sealed),
    )


def _sealed(job: ArchiveJob, archive: Archive) -> Iterator[ArchivedRange]:
    """Yield the sealed ranges of the namespace that have not expired."""
    for key, queue in sorted(archive.queues.items()):
        if key.namespace == job.options.connection.namespace:
            yield from (each for each in queue.ranges if queue.start <= each.start < queue.sealed)


def _look_again(
    job: ArchiveJob, archive: Archive, sealed: Iterable[ArchivedRange]
) -> Iterator[str]:
    """Yield errors in the files of sealed ranges."""
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
    """Query the bounds of all queues that may be in the archive, regardless of the options.

    Call it after reading the archive: a running archiver adds messages that brokers stored later.
    """
    own = {key.topic for key in archive.queues if key.topic.startswith("%")}
    names = sorted(name for name in own if not name.startswith(DEAD_LETTER_TOPIC_PREFIX))
    topics = TopicSelection(names=tuple(names), pattern=_EVERY_TOPIC)
    return connect(job.options.connection).whole_cluster(topics)


def _find(job: ArchiveJob, archive: Archive, cluster: ClusterState) -> _Comparison:
    """Return the tasks that compare each queue, and why some queues cannot be compared."""
    found = _Comparison()
    for key, queue in sorted(archive.queues.items()):
        unsealed = queue.unsealed()
        if key.namespace != job.options.connection.namespace:
            found.unasked |= {key.namespace} if unsealed else set()
            continue
        there = cluster.queues.get(key.queue)
        is_short = there is not None and there.max_offset < queue.end
        missing = _why_missing(job, key, queue, cluster) if unsealed or is_short else ""
        if there is not None and missing:
            found.others.add(key.queue)
        if missing and not job.store_is_gone:
            found.wrong.append(
                _missing_queue_error(key, queue, missing, is_there=there is not None)
            )
        elif there is not None and not missing and not unsealed:
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
                    nobody=missing,
                    files=tuple(archive.holding(key, each.start, each.end)),
                )
                for each in unsealed
            ]
    return found


def _why_missing(
    job: ArchiveJob, key: QueueKey, queue: ArchivedQueue, cluster: ClusterState
) -> str:
    """Return why an archived queue cannot be compared with a broker; "" if it can."""
    there = cluster.queues.get(key.queue)
    if there is not None and there.max_offset < queue.end:
        return str(foreign_queue(key.queue, shorter(queue, there)))
    missing = missing_store(key, cluster)
    if not missing and there is not None and job.store_is_gone:
        # A restored queue may be as long as the archived one again.
        missing = _not_archived(job, there, queue)
    return missing


def _missing_queue_error(
    key: QueueKey, queue: ArchivedQueue, missing: str, *, is_there: bool
) -> str:
    """Return the error for an unavailable queue, with the option that confirms the loss."""
    unsealed = queue.unsealed()
    if not is_there:
        return (
            f"{key}, offsets from {unsealed[0].start} to {queue.end}: {missing}. If this is"
            " permanent, --store-is-gone seals them by their files alone"
        )
    remedy = "; --store-is-gone seals the unsealed ranges by their files alone"
    return missing + (remedy if unsealed else "")


def _not_archived(job: ArchiveJob, there: QueueEnds, queue: ArchivedQueue) -> str:
    """Return why a queue is not the archived one; "" if it is."""
    try:
        check_follows(job.options, there.queue, queue.last_before(queue.end))
    except ArchiveError as error:
        return str(error)
    except ClusterRejection:
        return ""  # The comparison reports it.
    return ""


def _not_following(
    job: ArchiveJob, archive: Archive, sealed: Iterable[QueueKey]
) -> Iterator[tuple[QueueKey, str]]:
    """Yield sealed queues with a last message that differs at the broker, and the reason.

    The reason is empty if the operator confirmed the loss. A restored store lacks the messages
    that were archived last, so only the queues with the latest messages of each log are queried.
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


def _compare_and_seal(job: ArchiveJob, archive: Archive, found: _Comparison) -> list[str]:
    """Compare ranges and seal those that agree; return those sealed by their files alone."""
    passed: list[ArchivedRange] = []
    alone: dict[ArchivedRange, str] = {}
    for answer in job.run_tasks(job.options, found.tasks):
        of = range_of(answer["range"])
        job.inputs.note(of.key.queue, of.start, of.end)
        if answer["wrong"]:
            found.wrong.append(f"{_place(of)}: {answer['wrong']}")
            continue
        passed.append(of)
        if answer["closed"]:
            alone[of] = answer["closed"]
    for of, why in _taken_back(job, archive, alone):
        passed.remove(of)
        found.wrong.append(f"{_place(of)}: {why}")
    marks = sealing(archive, passed)
    # The next verification compares ranges after a wrong one again.
    ends = dict(marks)
    closed = {of: why for of, why in alone.items() if of.end <= ends.get(of.key, 0)}
    if marks:
        ranges = tuple((of.key, of.start, of.end) for of in closed)
        job.commit("seal", marks=marks, closed=ranges)
    return [f"{_place(of)}: {why}" for of, why in closed.items()]


def _taken_back(
    job: ArchiveJob, archive: Archive, alone: Iterable[ArchivedRange]
) -> Iterator[tuple[ArchivedRange, str]]:
    """Yield ranges that lost their store while they were compared, with the reason.

    The operator must confirm such a loss before a range is sealed by its files alone.
    """
    if job.store_is_gone or not alone:
        return
    cluster = _look_at_all(job, archive)
    for of in alone:
        there = cluster.queues.get(of.key.queue)
        if there is not None and there.max_offset < of.end:
            yield of, str(foreign_queue(of.key.queue, shorter(archive.queues[of.key], there)))
        elif why := missing_store(of.key, cluster):
            remedy = "--store-is-gone seals them by their files alone"
            yield of, f"{why}. If this is permanent, {remedy}"


def _of_namespace(name: str) -> str:
    """Return the error for a namespace that a verification did not cover."""
    if not name:
        return (
            "messages without a namespace are not verified or released; omit --option namespace"
            " to do so"
        )
    return (
        f"messages of the namespace {name!r} are not verified or released; use --option"
        f" namespace={name} to do so"
    )


def _place(of: ArchivedRange) -> str:
    return f"{of.key}, offsets from {of.start} to {of.end}"
