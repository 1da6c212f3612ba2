"""How a job is run: a session, a line of progress, and a record of the run.

A record is `_runs/RUN.json` in the folder of the job's tables: which job, which program, from where
to where it read, how many rows, and how it ended; "running" of one that goes on, or was killed.
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
from tidemill_pipeline.jobs.inputs import Inputs
from tidemill_pipeline.signals import guarded_start, raise_on_sigterm, silence_threads

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.status import SparkStageInfo

RUNS: Final = "_runs"
# Of a laptop; what reads beside a broker need not have more. `spark-submit` says otherwise.
DRIVER_MEMORY: Final = "1g"
SHUFFLE_PARTITIONS: Final = 8  # of a machine or two; adaptive execution joins those with little
# So that a join or an aggregate needs little before it spills, and what is kept makes room for it.
LITTLE_MEMORY: Final = {"spark.buffer.pageSize": "2m", "spark.memory.storageFraction": "0.1"}
TOLD_TERMINAL_S: Final = 1.0  # between two words on how far a step is
TOLD_ELSEWHERE_S: Final = 30.0  # where each is a line of its own
JOIN_S: Final = 10.0  # for the last word, which asks the JVM


Say = Callable[[str], None]

log: Final = logging.getLogger("tidemill_pipeline")


@final
@dataclass(slots=True, kw_only=True)
class Run:
    """The record of one run, as `_runs/RUN.json` has it."""

    job: str
    run: str
    program: str = ""
    started_at_ms: int = 0
    ended_at_ms: int = 0
    status: str = "running"
    rows: int = 0
    detail: dict[str, Any] = field(default_factory=dict)
    inputs: Inputs = field(default_factory=Inputs)

    def as_record(self) -> dict[str, Any]:
        """Return what is written of it."""
        told = {each.name: getattr(self, each.name) for each in fields(self)}
        del told["inputs"]
        return {**told, "input_offsets": self.inputs.as_document()}


@contextlib.contextmanager
def session(
    name: str, master: str | None, settings: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """Have a session for the block, quiet on the terminal."""
    from tidemill_pipeline.session import build_spark

    end_line()  # Java writes a line of its own, which none of ours is to be glued to.
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
                # Of a terminal; without them Spark makes 200 tasks of every shuffle.
                "spark.sql.shuffle.partitions": str(SHUFFLE_PARTITIONS),
                **(settings or {}),
            },
        )
    may_fail: tuple[type[Exception], ...] = ()
    try:
        yield spark
    except KeyboardInterrupt:
        # A JVM that was ended, too, does not answer any more.
        may_fail = (Exception,)
        silence_threads()
        raise
    finally:
        with contextlib.suppress(*may_fail):
            spark.stop()


def check_folder(folder: str) -> None:
    """Raise BadOption for a file where a folder is to be."""
    if "://" not in folder and Path(folder).exists() and not Path(folder).is_dir():
        raise BadOption(f"{folder} is no folder")


@contextlib.contextmanager
def recorded(job: str, folder: str, *, makes_room: bool = False) -> Iterator[Run]:
    """Keep a record of the block as a run of a job; of a failure, and of its end by SIGTERM, too.

    Raises Termination within the block for SIGTERM; and before it BadOption where the folder is
    none, and ArchiveError where nothing can be written there, which a job would find out at its
    end. What `makes_room` in a full folder goes on all the same.
    """
    check_folder(folder)
    clock = SystemClock()
    run = Run(
        job=job,
        run=f"{clock.wall_ms():x}-{secrets.token_hex(4)}",
        program=version(),
        started_at_ms=clock.wall_ms(),
    )
    with _told_only() if makes_room else contextlib.nullcontext():
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
        with _told_only():  # The error of the run itself, if it had one, is what matters.
            _write(run, folder)


@contextlib.contextmanager
def _told_only() -> Iterator[None]:
    try:
        yield
    except ArchiveError as error:
        log.warning("the run is not recorded: %s", error)


def _write(run: Run, folder: str) -> None:
    # A record is for people; what decides anything is in the manifest.
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
    """Return what shows how far a job is: one line that is written over, on a terminal."""
    is_terminal = sys.stderr.isatty()

    def say(text: str) -> None:
        sys.stderr.write(f"\r\033[K{text}" if is_terminal else f"{text}\n")
        sys.stderr.flush()

    return say


@contextlib.contextmanager
def watching(spark: SparkSession, say: Say, what: str) -> Iterator[None]:
    """Say how long the block has taken, and how far the tasks are that Spark does for it.

    That is each second on a terminal, and elsewhere each half minute.
    """
    say(what)
    every_s = TOLD_TERMINAL_S if sys.stderr.isatty() else TOLD_ELSEWHERE_S
    over, clock = threading.Event(), SystemClock()
    since_ms, tracker = clock.monotonic_ms(), spark.sparkContext.statusTracker()

    def tell() -> None:
        # The JVM may have been ended meanwhile: then nobody wants to know any more.
        with contextlib.suppress(Exception):
            while not over.wait(every_s):
                active = map(tracker.getStageInfo, tracker.getActiveStageIds())
                stages = [stage for stage in active if stage is not None]
                took_s = (clock.monotonic_ms() - since_ms) // 1000
                say(told_of_tasks(what, took_s, stages))

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(JOIN_S)


def told_of_tasks(what: str, took_s: int, stages: Sequence[SparkStageInfo]) -> str:
    """Return how far a step of a job is."""
    done, every = sum(of.numCompletedTasks for of in stages), sum(of.numTasks for of in stages)
    tasks = f", {done:,} of {every:,} tasks" if every else ""
    return f"{what}: {took_s:,} s{tasks}"


def say_batch(say: Say, told: str, **known: object) -> None:
    """Tell of a batch: in words on a terminal, elsewhere as a line of JSON, as queries have it."""
    say(told if sys.stderr.isatty() else json.dumps({"event": "batch", **known}))


def end_line() -> None:
    """End the line that was written over."""
    if sys.stderr.isatty():
        sys.stderr.write("\n")
