"""The Spark session of a job, with the settings that the pipeline needs."""

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

# In earlier versions, a Python source cannot limit a trigger.
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
    # Timeout for a Python worker to connect. On busy cores, its start takes longer than 15 s.
    "spark.python.authenticate.socketTimeout": "120s",
    "spark.sql.sources.partitionOverwriteMode": "dynamic",
}
# Default log4j settings of a program and of a job.
_LOG_OF_PROGRAM: Final = Path(__file__).with_name("log4j2-program.properties")
_LOG_OF_JOB: Final = Path(__file__).with_name("log4j2-quiet.properties")
_OF_ALL_JAVAS: Final = "JAVA_TOOL_OPTIONS"  # options of every JVM, before those of the driver


def build_spark(
    name: str,
    *,
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
    access_key: str = "",
    has_queries: bool = True,
    is_job: bool = False,
) -> SparkSession:
    """Return a session with the settings that the pipeline needs. Spark finds source and sink.

    Raises PipelineError if Spark or Java is missing.

    `master`: default is the one of `spark-submit`, or `local[*]`. `access_key`: for publishing the
    progress of streams (option `reportProgressAs`), if the cluster requires one. `has_queries`: the
    session runs streams. `is_job`: the caller reports errors, so Spark's log is off. Otherwise the
    log has warnings, except Spark's about the machine at its start. Your own log4j settings stay.
    """
    check_spark()
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    # Otherwise Spark may start its workers with another Python without our packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    elif not is_submitted():
        builder = builder.master("local[*]")
    own = dict(_SETTINGS)
    if is_job and is_submitted():
        # A running JVM has already read its log4j settings, so change its level.
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
        raise PipelineError(f"Java does not start ({where}); Spark needs Java 17 or 21") from None
    if has_queries:
        from tidemill_pipeline.listener import publish_progress

        publish_progress(spark, access_key=access_key)
    return spark


def _options_of(log: Path | None) -> list[str]:
    """Return the JVM options for a log4j file and for shared classes."""
    ours = [] if log is None else [f"-Dlog4j2.configurationFile={log.as_uri()}"]
    return ours + options_to_use(os.environ.get(JAVA_OPTIONS, ""))


def _log_of_program() -> Path | None:
    """Return our log4j settings; None if the user has own settings, which ours would hide."""
    if "LOG4J_CONFIGURATION_FILE" in os.environ or "log4j" in os.environ.get(_OF_ALL_JAVAS, ""):
        return None
    folder = os.environ.get("SPARK_CONF_DIR") or f"{_home()}/conf"
    found = [each for each in Path(folder).glob("log4j2*") if each.suffix != ".template"]
    return None if found else _LOG_OF_PROGRAM


def _home() -> str:
    found = find_spec("pyspark")
    assert found is not None, "check_spark has found it"
    assert found.origin is not None, "PySpark is a package of files"
    return os.environ.get("SPARK_HOME") or str(Path(found.origin).parent)


def is_submitted() -> bool:
    """Return whether `spark-submit` started this process after its JVM."""
    return "SPARK_SUBMIT" in os.environ or "PYSPARK_GATEWAY_PORT" in os.environ


def register(spark: SparkSession, *, access_key: str = "") -> None:
    """Register `.format("rocketmq")` and the publisher of progress in an existing session.

    `access_key`: as for `build_spark`.
    """
    check_spark()
    from tidemill_pipeline.data_source import RocketMQDataSource
    from tidemill_pipeline.listener import publish_progress

    spark.dataSource.register(RocketMQDataSource)
    publish_progress(spark, access_key=access_key)


def check_spark() -> None:
    """Raise PipelineError if Spark is missing or has an unsupported version."""
    try:
        found = version("pyspark")
    except ModuleNotFoundError as error:
        raise PipelineError(
            "Spark is not installed: pip install tidemill-pipeline, and install Java 17 or 21"
        ) from error
    parts = tuple(int(part) for part in found.split(".")[:2])
    if not SPARK_LEAST <= parts < SPARK_END:
        raise PipelineError(
            f"PySpark {found} is installed, but the pipeline needs 4.2 or later, before 5: in"
            " earlier versions a Python source cannot limit its batches"
        )
