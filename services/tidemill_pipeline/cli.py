"""`tidemill pipeline ...`: jobs on Spark, installed with `pip install tidemill-pipeline`.

Exit status: 0 done; 1 failed, or an archive is damaged; 2 wrong usage, or an audit or a measurement
found an error; 3 the cluster is unreachable.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill_pipeline.commands import archive, audit, replay
from tidemill_pipeline.commands.shared import run_job
from tidemill_pipeline.priority import Priority, lower_priority

app = typer.Typer(no_args_is_help=True)


@app.callback()
def beside_brokers(
    priority: Annotated[
        Priority,
        typer.Option(
            envvar="TIDEMILL_PIPELINE_PRIORITY",
            help="Share of the processors of this machine: the usual one, a tenth, or idle time.",
        ),
    ] = Priority.LOW,
) -> None:
    """Archive, audit, measure and replay the messages of a cluster with Spark."""
    lower_priority(priority)


app.command()(archive.archive)
app.command("archive-verify")(archive.archive_verify)
app.command("archive-compact")(archive.archive_compact)
app.command("archive-expire")(archive.archive_expire)
app.command("archive-vacuum")(archive.archive_vacuum)
app.command()(audit.audit)
app.command("delay-accuracy")(audit.delay_accuracy)
app.command()(replay.replay)


@app.command()
def prepare() -> None:
    """Let Java keep the classes of Spark, so that Spark starts in less than half of the time.

    Run it once per Python environment: it takes a minute or two, and 194 MB. Run it again after a
    change of Java or PySpark.

    Example: tidemill pipeline prepare
    """
    path = run_job("tidemill_pipeline.jobs.preparing", lambda jobs: jobs.prepare())
    typer.echo(f"wrote {path}, {path.stat().st_size / 1e6:,.0f} MB", err=True)
