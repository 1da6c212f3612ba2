"""What the tests of the pipeline share: one Spark session a run, and clusters to read."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.worlds.fake_cluster import FakeCluster
from tidemill_pipeline.jobs.running import LITTLE_MEMORY

# `make setup-pipeline` installs Spark; without it there is nothing here to collect.
collect_ignore_glob = [] if importlib.util.find_spec("pyspark") else ["test_*.py"]

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.worlds.archiving import ArchiveWorld

# Two tasks at a time, as CI has cores; small plans.
SETTINGS = {
    "spark.driver.memory": "1g",
    **LITTLE_MEMORY,
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}
# What Spark compiles of a plan over ten rows takes longer than to interpret it. Jobs that tests
# start as processes of their own compile, as they do at users.
INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
# So does what Java compiles a second time: no JVM of a test lives long enough for it.
# The serial collector costs less CPU on two cores.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.spark)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One session for all tests: its start takes as long as many tests."""
    from tidemill_pipeline.session import build_spark

    folder = tmp_path_factory.mktemp("spark")
    session = build_spark(
        "tests",
        master="local[2]",
        settings={
            **SETTINGS,
            **INTERPRETED,
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.local.dir": str(folder),
        },
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session.stop()


@pytest.fixture(autouse=True)
def kept_by_one_test_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let Spark keep no table of a test for the next one: all have one memory."""
    yield
    if "spark" in request.fixturenames:
        request.getfixturevalue("spark").catalog.clearCache()


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """A cluster in memory, without a broker group yet."""
    with FakeCluster().serving() as cluster:
        yield cluster


@pytest.fixture
def archive(cluster: FakeCluster, tmp_path: Path) -> ArchiveWorld:
    """An archive of that cluster, without anything in it yet."""
    from tests.support.worlds.archiving import ArchiveWorld

    return ArchiveWorld(cluster, tmp_path / "archive")


def reading(spark: SparkSession, cluster: FakeCluster, **options: object) -> Any:
    """Return a batch reader with the options every test would give."""
    return _with(spark.read.format("rocketmq"), cluster, options)


def streaming(spark: SparkSession, cluster: FakeCluster, **options: object) -> Any:
    """As `reading`, of a stream."""
    return _with(spark.readStream.format("rocketmq"), cluster, options)


def _with(reader: Any, cluster: FakeCluster, options: dict[str, object]) -> Any:
    given = {"endpoints": cluster.endpoint, "maxRetries": 2, "retryBackoffMs": 5, **options}
    for name, value in given.items():
        reader = reader.option(name, str(value))
    return reader
