"""J1 as commands: the job of `archive` with a Spark session around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import final

from tidemill.common.clock import SystemClock
from tidemill_pipeline.archive.spark_tasks import SparkRunner
from tidemill_pipeline.errors import NoAnswer, error_summary
from tidemill_pipeline.jobs import archive_upkeep, archive_verify
from tidemill_pipeline.jobs.archive import BATCH_ROWS, ArchiveJob, Done, check_options
from tidemill_pipeline.jobs.archive_verify import Verified
from tidemill_pipeline.jobs.running import (
    Run,
    Say,
    check_folder,
    end_line,
    progress_line,
    recorded,
    say_batch,
    session,
)
from tidemill_pipeline.metrics import PipelineMetrics, serve
from tidemill_pipeline.options import SourceOptions, parse_source
from tidemill_pipeline.source.topics import check_archived

Tell = Callable[[Done], None]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSettings:
    """What all commands of an archive take."""

    given: Mapping[str, str]  # options of the source, `archivePath` among them
    master: str | None = None
    batch_rows: int = BATCH_ROWS
    metrics_port: int = 0
    metrics_file: str = ""
    cluster: str = ""  # label of the metrics
    gate_group: str = ""
    store_is_gone: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """What a run has come to."""

    done: Done
    verified: Verified | None = None  # where that was wanted, and there is an archive
    ended_by: Exception | None = None  # what kept all from being archived, for who goes on

    @property
    def is_well(self) -> bool:
        """Say whether nothing is wrong, and nothing over that nobody has allowed."""
        is_wrong = self.done.wrong or (self.verified is not None and self.verified.wrong)
        return self.done.is_over_allowed and not is_wrong


def append(
    settings: ArchiveSettings, *, every_s: float | None, then_verify: bool = False
) -> Appended:
    """Archive what is there; with `every_s` again and again, so long after each end.

    With `then_verify` it is verified each time, whatever kept a part from being archived: what is
    sealed brokers need not keep.
    """
    say = progress_line()
    metrics = PipelineMetrics("archive", settings.cluster)
    serve(metrics, settings.metrics_port)
    # Who goes on waits for a cluster that is away, as it does later on.
    waits_for = (NoAnswer,) if every_s is not None else ()

    def check(job: ArchiveJob) -> None:
        if then_verify and job.has_entries:
            return  # What is there is sealed, whatever is wrong with what is asked for.
        with suppress(*waits_for):
            job.check_known(job.look())

    with _job("archive", settings, check) as (job, run):
        say("looking for what is new")
        rounds = Rounds(job, run, metrics, say, then_verify=then_verify)
        while True:
            try:
                appended = rounds.one()
            except Exception as error:  # Spark wraps what a task has raised.
                told = error_summary(error)
                if every_s is None or told is None or told[0] != NoAnswer.__name__:
                    raise
                # Who goes on waits for a cluster that is away; nothing of the batch counts.
                say(f"{told[1]}; again in {every_s:g} s")
                end_line()
                time.sleep(every_s)
                continue
            if settings.metrics_file:
                metrics.write(settings.metrics_file)
            if every_s is None:
                if appended.done.rows:
                    say(told_at_end(appended.done))  # On a terminal in the place of the progress.
                end_line()
                return appended
            rounds.tell(appended)
            if appended.ended_by is not None:
                raise appended.ended_by
            time.sleep(every_s)


@final
class Rounds:
    """The rounds of one run of `archive`: what each says, and what its record has of all."""

    def __init__(
        self, job: ArchiveJob, run: Run, metrics: PipelineMetrics, say: Say, *, then_verify: bool
    ) -> None:
        self._job, self._run, self._metrics, self._say = job, run, metrics, say
        self._then_verify = then_verify
        self._rows_before = 0
        self._over: dict[str, None] = {}  # each sentence once: some come again in every round
        self._tell_batch = _telling(say, metrics)

    def one(self) -> Appended:
        """Archive what is there, and verify it where that is wanted."""
        self._rows_before = self._run.rows
        self._tell_batch = _telling(self._say, self._metrics)
        appended = append_once(
            self._job, self._tell, self._tell_over, then_verify=self._then_verify
        )
        done, verified = appended.done, appended.verified
        self._run.rows = self._rows_before + done.rows
        self._note_over(done)
        self._run.detail["wrong"] = done.wrong
        if verified is not None:
            self._run.detail["verified"] = asdict(verified)
        if appended.ended_by is None:  # Else nobody has looked what waits.
            self._metrics.archived_to(done.stored_to_ms, waiting=done.waiting)
        if appended.is_well:
            self._metrics.succeeded_at_ms = SystemClock().wall_ms()
        return appended

    def tell(self, appended: Appended) -> None:
        """Say what is wrong after a round that others follow."""
        done, verified = appended.done, appended.verified
        end_line()
        # With a verification what is over was told before it.
        over = () if self._then_verify else done.over
        for sentence in (*over, *done.wrong, *(verified.wrong if verified else ())):
            self._say(sentence)
            end_line()

    def _tell(self, done: Done) -> None:
        self._run.rows = self._rows_before + done.rows  # For the record of a run that is ended.
        self._tell_batch(done)

    def _tell_over(self, done: Done) -> None:
        self._note_over(done)
        for sentence in done.over:
            self._say(sentence)
            end_line()

    def _note_over(self, done: Done) -> None:
        self._over.update(dict.fromkeys(done.over))
        self._run.detail["over"] = list(self._over)


def told_at_end(done: Done) -> str:
    """Return what is said of a run that has archived something."""
    but = ", but for the queues that are named" if done.wrong else ""
    return (
        f"archived {done.rows:,} messages, {done.bytes / 1e6:,.1f} MB of bodies, and has caught up"
        f"{but}"
    )


def append_once(
    job: ArchiveJob, tell: Tell, tell_over: Tell = lambda _: None, *, then_verify: bool
) -> Appended:
    """Archive what is there once, and verify it where that is wanted.

    `tell_over` is told before that what has been over since: nobody else says it again.
    """
    if not then_verify:
        return Appended(done=job.append(tell))
    ended_by = None
    try:
        done = job.append(tell)
        tell_over(done)
    except Exception as error:  # Spark wraps what a task has raised.
        told = error_summary(error)
        # A verification would have no answer either, and nothing is known of other errors.
        if told is None or told[0] == NoAnswer.__name__ or not job.has_entries:
            raise
        done = Done(rows=0, bytes=0, batches=0, waiting=0, wrong=(told[1],))
        ended_by = error
    try:
        verified = archive_verify.verify(job) if job.has_entries else None
        return Appended(done=done, verified=verified, ended_by=ended_by)
    except Exception as error:
        told = error_summary(error)
        if told is None or not (done.over or done.wrong):
            raise
        # That queues are over is told once, and by nobody else.
        return Appended(done=replace(done, wrong=(*done.wrong, told[1])), ended_by=ended_by)


def verify(settings: ArchiveSettings, *, is_all: bool = False) -> Verified:
    """Compare what is not sealed with the broker, with `is_all` the files of the rest, too."""
    _check_there(settings)
    say = progress_line()
    with _job("archive-verify", settings) as (job, run):
        say("comparing all that is archived" if is_all else "comparing what is not sealed")
        verified = archive_verify.verify(job, is_all=is_all)
        end_line()
        run.detail.update(asdict(verified))
        return verified


def compact(settings: ArchiveSettings) -> tuple[int, int]:
    """Make larger files of small ones; return how many there were and are."""
    _check_there(settings)
    say = progress_line()
    with _job("archive-compact", settings) as (job, run):
        say("writing small files together")
        before, after = archive_upkeep.compact(job)
        end_line()
        run.detail.update(files_before=before, files_after=after)
        return before, after


def look_expiring(settings: ArchiveSettings, *, before_ms: int) -> archive_upkeep.Expiring:
    """Return what an expiry would let go of. Needs no Spark."""
    job = _expiring_job(settings)
    return archive_upkeep.look(job, before_ms=before_ms, topics=job.options.topics.names)


def expire(settings: ArchiveSettings, *, before_ms: int) -> int:
    """Let go of what is older; return how many files that were. Needs no Spark."""
    job = _expiring_job(settings)
    with recorded("archive-expire", job.options.archive_path, makes_room=True) as run:
        count = archive_upkeep.expire(job, before_ms=before_ms, topics=job.options.topics.names)
        run.detail["files_let_go"] = count
        return count


def _expiring_job(settings: ArchiveSettings) -> ArchiveJob:
    """Return the job of an archive that is there, with the topics that are named."""
    options = parse_source(settings.given, is_stream=False)
    check_folder(options.archive_path)
    job = _without_spark(options)
    job.check_there()
    check_archived(job.archive(), options)
    return job


def vacuum(settings: ArchiveSettings) -> tuple[int, archive_upkeep.Waiting]:
    """Delete files that nobody reads any more. Needs no Spark.

    Returns how many those were, and which have to wait.
    """
    options = parse_source(settings.given, is_stream=False)
    check_folder(options.archive_path)
    job = _without_spark(options)
    job.check_there()
    with recorded("archive-vacuum", options.archive_path, makes_room=True) as run:
        count = archive_upkeep.vacuum(job)
        run.detail["files_deleted"] = count
        return count, archive_upkeep.look_waiting(job)


def _check_there(settings: ArchiveSettings) -> None:
    """Raise BadOption where there is no archive, before Spark is started for it."""
    options = parse_source(settings.given, is_stream=False)
    check_folder(options.archive_path)
    _without_spark(options).check_there()


@contextmanager
def _job(
    name: str, settings: ArchiveSettings, check: Callable[[ArchiveJob], None] = lambda _job: None
) -> Iterator[tuple[ArchiveJob, Run]]:
    """Have a job and its record for the block; `check` is called before Spark is started for it."""
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
    """Return a job for what needs no tasks."""
    return ArchiveJob(options, lambda _options, _tasks: [], now_ms=SystemClock().wall_ms)


def _telling(say: Callable[[str], None], metrics: PipelineMetrics) -> Tell:
    clock = SystemClock()
    begin_ms = last_ms = clock.monotonic_ms()

    def tell(done: Done) -> None:
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
            f" {done.rows / took_s:,.0f} a second; {done.waiting:,} wait",
            job=metrics.work,
            batch=done.batches,
            rows=sum(done.by_topic.values()),
            took_ms=batch_ms,
            waiting=done.waiting,
        )

    return tell
