"""The frame of a job: a Spark session, a progress line, and a run record.

The record is `_runs/RUN.json` in the folder of the job's tables: the job, the program version, the
input ranges, the rows and the status. "running" means that the run continues or was killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from tidemill.common.clock import SystemClock
from tidemill.common.version import version
from tidemill_pipeline.archive.store import write_errors
from tidemill_pipeline.errors import ArchiveError, BadOption
from tidemill_pipeline.jobs.inputs import InputRanges
from tidemill_pipeline.signals import guarded_start, raise_on_sigterm, silence_threads

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.status import SparkStageInfo

RUNS: Final = "_runs"
# Enough for a laptop, and small enough next to a broker. `spark-submit` can change it.
DRIVER_MEMORY: Final = "1g"
SHUFFLE_PARTITIONS: Final = 8  # for one or two machines; adaptive execution merges small ones
# Joins and aggregates then need little memory before they spill, and cached data yields to them.
LITTLE_MEMORY: Final = {"spark.buffer.pageSize": "2m", "spark.memory.storageFraction": "0.1"}
REPORT_TERMINAL_S: Final = 1.0  # between progress reports on a terminal
REPORT_ELSEWHERE_S: Final = 30.0  # in a log file, where each report is a line
JOIN_S: Final = 10.0  # for the last report, which queries the JVM


Say = Callable[[str], None]

log: Final = logging.getLogger("tidemill_pipeline")


@final
@dataclass(slots=True, kw_only=True)
class RunRecord:
    """Record of one run: the content of `_runs/RUN.json`."""

    job: str
    run: str
    program: str = ""
    started_at_ms: int = 0
    ended_at_ms: int = 0
    status: str = "running"
    rows: int = 0
    detail: dict[str, Any] = field(default_factory=dict)
    inputs: InputRanges = field(default_factory=InputRanges)

    def as_record(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        del values["inputs"]
        return {**values, "input_offsets": self.inputs.as_document()}


@contextlib.contextmanager
def session(
    name: str, master: str | None, settings: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """Provide a Spark session for the block, without output on the terminal."""
    from tidemill_pipeline.session import build_spark

    end_line()  # Java prints a line at its start.
    with guarded_start():
        spark = build_spark(
            f"tidemill {name}",
            master=master,
            has_queries=False,
            is_job=True,
            settings={
                "spark.driver.memory": DRIVER_MEMORY,
                **LITTLE_MEMORY,
                "spark.ui.enabled": "false",
                "spark.ui.showConsoleProgress": "false",
                # Spark's default is 200 tasks per shuffle.
                "spark.sql.shuffle.partitions": str(SHUFFLE_PARTITIONS),
                **(settings or {}),
            },
        )
    may_fail: tuple[type[Exception], ...] = ()
    try:
        yield spark
    except KeyboardInterrupt:
        # The JVM may have ended as well.
        may_fail = (Exception,)
        silence_threads()
        raise
    finally:
        with contextlib.suppress(*may_fail):
            spark.stop()


def check_folder(folder: str) -> None:
    """Raise BadOption if a path is a file."""
    if "://" not in folder and Path(folder).exists() and not Path(folder).is_dir():
        raise BadOption(f"{folder} is not a folder")


@contextlib.contextmanager
def recorded(job: str, folder: str, *, makes_room: bool = False) -> Iterator[RunRecord]:
    """Record the block as a run of a job, also if it fails or SIGTERM ends it.

    SIGTERM raises Termination within the block. Before the block it raises BadOption if the path is
    not a folder, and ArchiveError if the folder is not writable. A job that `makes_room` in a full
    folder runs without a record instead.
    """
    check_folder(folder)
    clock = SystemClock()
    run = RunRecord(
        job=job,
        run=f"{clock.wall_ms():x}-{secrets.token_hex(4)}",
        program=version(),
        started_at_ms=clock.wall_ms(),
    )
    with _log_only() if makes_room else contextlib.nullcontext():
        _write(run, folder)
    try:
        with raise_on_sigterm():
            yield run
    except BaseException as error:
        run.status = f"failed: {error}" if str(error) else f"failed: {type(error).__name__}"
        raise
    else:
        run.status = "done"
    finally:
        run.ended_at_ms = clock.wall_ms()
        with _log_only():  # An error of the run itself must not be replaced.
            _write(run, folder)


@contextlib.contextmanager
def _log_only() -> Iterator[None]:
    try:
        yield
    except ArchiveError as error:
        log.warning("run not recorded: %s", error)


def _write(run: RunRecord, folder: str) -> None:
    # Records are informational: jobs read only the manifest.
    if "://" in folder:
        return
    path = Path(folder) / RUNS / f"{run.run}.json"
    draft = path.with_suffix(".draft")
    with write_errors(str(path)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(run.as_record(), sort_keys=True) + "\n")
            draft.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise


def progress_line() -> Say:
    """Return the function that prints progress; on a terminal it overwrites one line."""
    is_terminal = sys.stderr.isatty()

    def say(text: str) -> None:
        sys.stderr.write(f"\r\033[K{text}" if is_terminal else f"{text}\n")
        sys.stderr.flush()

    return say


@contextlib.contextmanager
def watching(spark: SparkSession, say: Say, what: str) -> Iterator[None]:
    """Report the duration of the block and the progress of its Spark tasks.

    It reports every second on a terminal, and every half minute otherwise.
    """
    say(what)
    every_s = REPORT_TERMINAL_S if sys.stderr.isatty() else REPORT_ELSEWHERE_S
    over, clock = threading.Event(), SystemClock()
    since_ms, tracker = clock.monotonic_ms(), spark.sparkContext.statusTracker()

    def report() -> None:
        # The JVM may have ended meanwhile.
        with contextlib.suppress(Exception):
            while not over.wait(every_s):
                active = map(tracker.getStageInfo, tracker.getActiveStageIds())
                stages = [stage for stage in active if stage is not None]
                took_s = (clock.monotonic_ms() - since_ms) // 1000
                say(task_progress(what, took_s, stages))

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(JOIN_S)


def task_progress(what: str, took_s: int, stages: Sequence[SparkStageInfo]) -> str:
    """Return the progress of a step of a job."""
    done, every = sum(of.numCompletedTasks for of in stages), sum(of.numTasks for of in stages)
    tasks = f", {done:,} of {every:,} tasks" if every else ""
    return f"{what}: {took_s:,} s{tasks}"


def say_batch(say: Say, text: str, /, **fields: object) -> None:
    """Report a batch: as text on a terminal, otherwise as a JSON line with the fields."""
    say(text if sys.stderr.isatty() else json.dumps({"event": "batch", **fields}))


def end_line() -> None:
    """End the line that progress overwrites."""
    if sys.stderr.isatty():
        sys.stderr.write("\n")
