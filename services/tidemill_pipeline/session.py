"""The Spark session of a job, with what the pipeline needs set."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tidemill_pipeline.errors import PipelineError
from tidemill_pipeline.shared_classes import JAVA_OPTIONS, java_options, options_to_use

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Below it a source in Python cannot bound what a trigger reads.
SPARK_LEAST: Final = (4, 2)
SPARK_END: Final = (5, 0)
ARROW_BATCH_ROWS: Final = 10_000
_SETTINGS: Final = {
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW_BATCH_ROWS),
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    # For a Python worker to connect: where all cores are busy its start takes longer than 15 s.
    "spark.python.authenticate.socketTimeout": "120s",
    "spark.sql.sources.partitionOverwriteMode": "dynamic",
}
# What log4j writes of a program, where nobody has said otherwise, and of a job.
_LOG_OF_PROGRAM: Final = Path(__file__).with_name("log4j2-program.properties")
_LOG_OF_JOB: Final = Path(__file__).with_name("log4j2-quiet.properties")
_OF_ALL_JAVAS: Final = "JAVA_TOOL_OPTIONS"  # come before those of the driver


def build_spark(
    name: str,
    *,
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
    access_key: str = "",
    has_queries: bool = True,
    is_job: bool = False,
) -> SparkSession:
    """Return a session with what the pipeline needs set; source and sink Spark finds by itself.

    Raises PipelineError where Spark or Java is not there.

    Without a master it is the one that `spark-submit` says, or `local[*]`. `access_key`: whose
    calls they are that publish the progress of streams (option `reportProgressAs`), where the
    cluster asks for it. `has_queries`: streams are started that may ask for that. `is_job`: what
    fails is told by who asks for it, and not by Spark's log. The log of others has warnings, but
    for what Spark says of the machine when it starts; a log4j of your own is left as it is.
    """
    check_spark()
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    # Planning workers would otherwise be another Python, without what is installed here.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    elif not is_submitted():
        builder = builder.master("local[*]")
    own = dict(_SETTINGS)
    if is_job and is_submitted():
        # A JVM that runs already has read its settings of log4j; it is told the level, and says it.
        own["spark.log.level"] = "ERROR"
    for key, value in {**own, **(settings or {})}.items():
        builder = builder.config(key, value)
    try:
        with java_options(_options_of(_LOG_OF_JOB if is_job else _log_of_program())):
            spark = builder.getOrCreate()
    except PySparkRuntimeError as error:
        if error.getCondition() != "JAVA_GATEWAY_EXITED":
            raise
        where = f"JAVA_HOME is {home}" if (home := os.environ.get("JAVA_HOME")) else "no JAVA_HOME"
        raise PipelineError(f"Java 17 or 21, which Spark needs, does not start ({where})") from None
    if has_queries:
        from tidemill_pipeline.listener import publish_progress

        publish_progress(spark, access_key=access_key)
    return spark


def _options_of(log: Path | None) -> list[str]:
    """Return what has a JVM log as a file says, or by itself, and start sooner."""
    ours = [] if log is None else [f"-Dlog4j2.configurationFile={log.as_uri()}"]
    return ours + options_to_use(os.environ.get(JAVA_OPTIONS, ""))


def _log_of_program() -> Path | None:
    """Return settings of log4j; None where it finds somebody's own, which an option would hide."""
    if "LOG4J_CONFIGURATION_FILE" in os.environ or "log4j" in os.environ.get(_OF_ALL_JAVAS, ""):
        return None
    folder = os.environ.get("SPARK_CONF_DIR") or f"{_home()}/conf"
    found = [each for each in Path(folder).glob("log4j2*") if each.suffix != ".template"]
    return None if found else _LOG_OF_PROGRAM


def _home() -> str:
    found = find_spec("pyspark")
    assert found is not None, "it is checked before"
    assert found.origin is not None, "it is a package of files"
    return os.environ.get("SPARK_HOME") or str(Path(found.origin).parent)


def is_submitted() -> bool:
    """Say whether `spark-submit` has started this process, and its JVM before it."""
    return "SPARK_SUBMIT" in os.environ or "PYSPARK_GATEWAY_PORT" in os.environ


def register(spark: SparkSession, *, access_key: str = "") -> None:
    """Make `.format("rocketmq")` known to a session that was built elsewhere, and its progress.

    `access_key`: as `build_spark` takes it.
    """
    check_spark()
    from tidemill_pipeline.data_source import RocketMQDataSource
    from tidemill_pipeline.listener import publish_progress

    spark.dataSource.register(RocketMQDataSource)
    publish_progress(spark, access_key=access_key)


def check_spark() -> None:
    """Raise PipelineError where Spark is not there, or not one that this works with."""
    try:
        found = version("pyspark")
    except ModuleNotFoundError as error:
        raise PipelineError(
            "Spark is not installed: pip install tidemill-pipeline, and install Java 17 or 21"
        ) from error
    parts = tuple(int(part) for part in found.split(".")[:2])
    if not SPARK_LEAST <= parts < SPARK_END:
        raise PipelineError(
            f"PySpark {found} is installed; the pipeline needs 4.2 or later, before 5: a source in"
            " Python cannot bound its batches in earlier ones"
        )
