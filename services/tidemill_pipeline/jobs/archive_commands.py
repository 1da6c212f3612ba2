"""The archive commands: the jobs of J1 with Spark, metrics and a run record."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import final

from tidemill.common.clock import SystemClock
from tidemill_pipeline.archive.spark_tasks import SparkRunner
from tidemill_pipeline.client import connect
from tidemill_pipeline.errors import BadOption, NoAnswer, error_summary, listed
from tidemill_pipeline.jobs import archive_upkeep, archive_verify
from tidemill_pipeline.jobs.archive import BATCH_ROWS, ArchiveJob, ArchiveProgress, check_options
from tidemill_pipeline.jobs.archive_verify import VerificationResult
from tidemill_pipeline.jobs.running import (
    RunRecord,
    Say,
    check_folder,
    end_line,
    progress_line,
    recorded,
    say_batch,
    session,
)
from tidemill_pipeline.metrics import PipelineMetrics, serve
from tidemill_pipeline.options import (
    EVERY_DEAD_LETTER,
    EVERY_TOPIC,
    SourceOptions,
    TopicSelection,
    parse_source,
)
from tidemill_pipeline.source.topics import check_archived

Report = Callable[[ArchiveProgress], None]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSettings:
    """Options of the archive commands."""

    given: Mapping[str, str]  # options of the source, with `archivePath`
    master: str | None = None
    batch_rows: int = BATCH_ROWS
    metrics_port: int = 0
    metrics_file: str = ""
    cluster: str = ""  # metrics label
    gate_group: str = ""
    store_is_gone: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveRound:
    """Result of a round of `archive`."""

    done: ArchiveProgress
    verified: VerificationResult | None = None  # None: not requested, or the archive is empty
    ended_by: Exception | None = None  # the error that ended archiving; verification ran anyway

    @property
    def is_well(self) -> bool:
        """Whether the round has no error, and options allow the end of each ended queue."""
        is_wrong = self.done.wrong or (self.verified is not None and self.verified.wrong)
        return self.done.is_over_allowed and not is_wrong


def append(
    settings: ArchiveSettings, *, every_s: float | None, then_verify: bool = False
) -> ArchiveRound:
    """Archive all current messages. With `every_s`, repeat with this pause between rounds.

    With `then_verify` each round ends with a verification, even if a part was not archived:
    brokers may delete sealed messages.
    """
    say = progress_line()
    metrics = PipelineMetrics("archive", settings.cluster)
    serve(metrics, settings.metrics_port)
    # A repeating job waits for an unreachable cluster at its start as well.
    waits_for = (NoAnswer,) if every_s is not None else ()

    def check(job: ArchiveJob) -> None:
        if then_verify and job.has_entries:
            return  # The verification runs even if a topic is unknown.
        with suppress(*waits_for):
            job.check_known(job.look())

    with _job("archive", settings, check) as (job, run):
        say("looking for new messages")
        with suppress(*waits_for):
            if omitted := omitted_text(job.options):
                run.detail["omitted"] = omitted
                say(omitted)
                end_line()
        rounds = ArchiveRounds(job, run, metrics, say, then_verify=then_verify)
        while True:
            try:
                appended = rounds.one()
            except Exception as error:  # Spark wraps the errors of tasks.
                summary = error_summary(error)
                if every_s is None or summary is None or summary[0] != NoAnswer.__name__:
                    raise
                # A repeating job waits for an unreachable cluster. The batch is not committed.
                say(f"{summary[1]}; retrying in {every_s:g} s")
                end_line()
                time.sleep(every_s)
                continue
            if settings.metrics_file:
                metrics.write(settings.metrics_file)
            if every_s is None:
                if appended.done.rows:
                    say(closing_text(appended.done))  # On a terminal it replaces the progress.
                end_line()
                return appended
            rounds.report(appended)
            if appended.ended_by is not None:
                raise appended.ended_by
            time.sleep(every_s)


def omitted_text(options: SourceOptions) -> str:
    """Return a sentence on dead letters that an archive of all topics leaves out; "" if none.

    Raises NoAnswer if no proxy answers.
    """
    topics = options.topics
    if not topics.is_everything:
        return ""
    every = (
        connect(options.connection)
        .cluster(TopicSelection(pattern=EVERY_DEAD_LETTER))
        .queues.values()
    )
    counts: Counter[str] = Counter()
    for ends in every:
        if not topics.have(ends.queue.topic):
            counts[ends.queue.topic] += ends.max_offset - ends.min_offset
    names = [topic for topic, count in counts.items() if count]
    if not names:
        return ""
    return (
        f"left out: {counts.total():,} dead letters of {listed(names)}. Archive them, too, with"
        " --topic '*' --topic '%DLQ%*'"
    )


@final
class ArchiveRounds:
    """The rounds of one run of `archive`, with their reports and the run record."""

    def __init__(
        self,
        job: ArchiveJob,
        run: RunRecord,
        metrics: PipelineMetrics,
        say: Say,
        *,
        then_verify: bool,
    ) -> None:
        self._job, self._run, self._metrics, self._say = job, run, metrics, say
        self._then_verify = then_verify
        self._rows_before = 0
        self._over: dict[str, None] = {}  # unique sentences: some recur in every round
        self._report_batch = _batch_report(say, metrics)

    def one(self) -> ArchiveRound:
        """Run one round."""
        self._rows_before = self._run.rows
        self._report_batch = _batch_report(self._say, self._metrics)
        appended = append_once(
            self._job, self._report_progress, self._report_over, then_verify=self._then_verify
        )
        done, verified = appended.done, appended.verified
        self._run.rows = self._rows_before + done.rows
        self._note_over(done)
        self._run.detail["wrong"] = done.wrong
        if verified is not None:
            self._run.detail["verified"] = asdict(verified)
        if appended.ended_by is None:  # Otherwise the backlog is unknown.
            self._metrics.archived_to(done.stored_to_ms, waiting=done.waiting)
        if appended.is_well:
            self._metrics.succeeded_at_ms = SystemClock().wall_ms()
        return appended

    def report(self, appended: ArchiveRound) -> None:
        """Print the errors of a round that another round follows."""
        done, verified = appended.done, appended.verified
        end_line()
        # Ended queues were reported before the verification, if there was one.
        over = () if self._then_verify else done.over
        for sentence in (*over, *done.wrong, *(verified.wrong if verified else ())):
            self._say(sentence)
            end_line()

    def _report_progress(self, done: ArchiveProgress) -> None:
        self._run.rows = self._rows_before + done.rows  # Recorded even if the run is killed.
        self._report_batch(done)

    def _report_over(self, done: ArchiveProgress) -> None:
        self._note_over(done)
        for sentence in done.over:
            self._say(sentence)
            end_line()

    def _note_over(self, done: ArchiveProgress) -> None:
        self._over.update(dict.fromkeys(done.over))
        self._run.detail["over"] = list(self._over)


def closing_text(done: ArchiveProgress) -> str:
    """Return the last line of a run that archived messages."""
    exceptions = " except for the queues with errors" if done.wrong else ""
    return (
        f"archived {done.rows:,} messages, {done.bytes / 1e6:,.1f} MB of bodies; the archive has"
        f" caught up{exceptions}"
    )


def append_once(
    job: ArchiveJob, report: Report, report_over: Report = lambda _: None, *, then_verify: bool
) -> ArchiveRound:
    """Archive all current messages once, and verify them if requested.

    `report_over` is called before the verification: ended queues are reported only once.
    """
    if not then_verify:
        return ArchiveRound(done=job.append(report))
    ended_by = None
    try:
        done = job.append(report)
        report_over(done)
    except Exception as error:  # Spark wraps the errors of tasks.
        summary = error_summary(error)
        # After NoAnswer a verification would fail as well. Unknown errors are not handled here.
        if summary is None or summary[0] == NoAnswer.__name__ or not job.has_entries:
            raise
        done = ArchiveProgress(rows=0, bytes=0, batches=0, waiting=0, wrong=(summary[1],))
        ended_by = error
    try:
        verified = archive_verify.verify(job) if job.has_entries else None
        return ArchiveRound(done=done, verified=verified, ended_by=ended_by)
    except Exception as error:
        summary = error_summary(error)
        if summary is None or not (done.over or done.wrong):
            raise
        # Ended queues are reported only once, so the result must not get lost.
        return ArchiveRound(done=replace(done, wrong=(*done.wrong, summary[1])), ended_by=ended_by)


def verify(settings: ArchiveSettings, *, is_all: bool = False) -> VerificationResult:
    """Compare unsealed messages with the brokers, with `is_all` also the files of sealed ones."""
    _check_there(settings)
    say = progress_line()
    with _job("archive-verify", settings) as (job, run):
        say("comparing the whole archive" if is_all else "comparing unsealed messages")
        verified = archive_verify.verify(job, is_all=is_all)
        end_line()
        run.detail.update(asdict(verified))
        return verified


def compact(settings: ArchiveSettings) -> tuple[int, int]:
    """Combine small files; return the number of files before and after."""
    _check_there(settings)
    say = progress_line()
    with _job("archive-compact", settings) as (job, run):
        say("combining small files")
        before, after = archive_upkeep.compact(job)
        end_line()
        run.detail.update(files_before=before, files_after=after)
        return before, after


def look_expiring(settings: ArchiveSettings, *, before_ms: int) -> archive_upkeep.ExpiryPlan:
    """Return the files and messages that would expire. Needs no Spark."""
    job = _expiring_job(settings)
    return archive_upkeep.look(job, before_ms=before_ms, topics=_expiring_topics(job))


def expire(settings: ArchiveSettings, *, before_ms: int) -> int:
    """Remove older messages; return the number of their files. Needs no Spark."""
    job = _expiring_job(settings)
    with recorded("archive-expire", job.options.archive_path, makes_room=True) as run:
        count = archive_upkeep.expire(job, before_ms=before_ms, topics=_expiring_topics(job))
        run.detail["files_let_go"] = count
        return count


def _expiring_job(settings: ArchiveSettings) -> ArchiveJob:
    """Return a job for an existing archive; check the named topics."""
    options = parse_source(settings.given, is_stream=False)
    check_folder(options.archive_path)
    job = _without_spark(options)
    job.check_there()
    check_archived(job.archive(), options)
    return job


def _expiring_topics(job: ArchiveJob) -> tuple[str, ...]:
    """Return the selected topics of the archive; empty for everything that it has."""
    selection, namespace = job.options.topics, job.options.connection.namespace
    if selection == TopicSelection(pattern=EVERY_TOPIC):
        return ()
    known = {key.topic for key in job.archive().queues if key.namespace == namespace}
    found = tuple(sorted(filter(selection.have, known)))
    if not found:
        raise BadOption(f"the archive has no topic that matches {selection.pattern}")
    return found


def vacuum(settings: ArchiveSettings) -> tuple[int, archive_upkeep.YoungFiles]:
    """Delete unused files; return their number and the files that are too young. Needs no Spark."""
    options = parse_source(settings.given, is_stream=False)
    check_folder(options.archive_path)
    job = _without_spark(options)
    job.check_there()
    with recorded("archive-vacuum", options.archive_path, makes_room=True) as run:
        count = archive_upkeep.vacuum(job)
        run.detail["files_deleted"] = count
        return count, archive_upkeep.look_waiting(job)


def _check_there(settings: ArchiveSettings) -> None:
    """Raise BadOption if there is no archive, before Spark starts."""
    options = parse_source(settings.given, is_stream=False)
    check_folder(options.archive_path)
    _without_spark(options).check_there()


@contextmanager
def _job(
    name: str, settings: ArchiveSettings, check: Callable[[ArchiveJob], None] = lambda _job: None
) -> Iterator[tuple[ArchiveJob, RunRecord]]:
    """Provide a job and its run record for the block; call `check` before Spark starts."""
    options = parse_source(settings.given, is_stream=False)
    check_options(options)
    with recorded(name, options.archive_path) as run:
        check(_without_spark(options))
        progress_line()("starting Spark")
        with session(name, settings.master) as spark:
            job = ArchiveJob(
                options,
                SparkRunner(spark, settings.given),
                now_ms=SystemClock().wall_ms,
                batch_rows=settings.batch_rows,
                cores=spark.sparkContext.defaultParallelism,
                gate_group=settings.gate_group,
                store_is_gone=settings.store_is_gone,
            )
            run.inputs = job.inputs
            yield job, run


def _without_spark(options: SourceOptions) -> ArchiveJob:
    """Return a job that cannot run tasks."""
    return ArchiveJob(options, lambda _options, _tasks: [], now_ms=SystemClock().wall_ms)


def _batch_report(say: Callable[[str], None], metrics: PipelineMetrics) -> Report:
    clock = SystemClock()
    begin_ms = last_ms = clock.monotonic_ms()

    def report(done: ArchiveProgress) -> None:
        nonlocal last_ms
        now_ms = clock.monotonic_ms()
        took_s = max(0.001, (now_ms - begin_ms) / 1000)
        metrics.rows.update(done.by_topic)
        metrics.archived_to(done.stored_to_ms, waiting=done.waiting)
        batch_ms = now_ms - last_ms
        metrics.batches_ms.observe(metrics.work, batch_ms)
        last_ms = now_ms
        say_batch(
            say,
            f"archived {done.rows:,} messages, {done.bytes / 1e6:,.1f} MB,"
            f" {done.rows / took_s:,.0f} per second; {done.waiting:,} remaining",
            job=metrics.work,
            batch=done.batches,
            rows=sum(done.by_topic.values()),
            took_ms=batch_ms,
            waiting=done.waiting,
        )

    return report
