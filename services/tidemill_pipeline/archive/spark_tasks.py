"""A data source for archive tasks. Spark runs each as one of its own tasks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from tidemill_pipeline.archive.tasks import ANSWER, ArchiveTask, run_task
from tidemill_pipeline.options import SourceOptions, parse_source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

NAME = "tidemill_archive_tasks"
_TASKS = "tasks"  # the option that has them


@final
class SparkRunner:
    """Runner of tasks in the executors of a session."""

    def __init__(self, spark: SparkSession, given: Mapping[str, str]) -> None:
        spark.dataSource.register(ArchiveTaskSource)
        self._spark = spark
        self._given = given

    def __call__(
        self, options: SourceOptions, tasks: Sequence[ArchiveTask]
    ) -> list[dict[str, Any]]:
        """Return the answers, in any order."""
        del options  # The executors parse them again, from text.
        if not tasks:
            return []
        reader = self._spark.read.format(NAME)
        for name, value in self._given.items():
            reader = reader.option(name, value)
        text = json.dumps([task.as_json() for task in tasks])
        return [json.loads(row.answer) for row in reader.option(_TASKS, text).load().collect()]


class TaskPartition(InputPartition):
    """One task, as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class ArchiveTaskSource(DataSource):
    """A data source with one partition per task and one row per answer."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `.format()`."""
        return NAME

    def schema(self) -> str:
        """Return the column of answers."""
        return ANSWER

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002  # Spark's.
        """Return the reader that runs the tasks."""
        given = dict(self.options)
        tasks = json.loads(given.pop(_TASKS))
        return TaskReader(parse_source(given, is_stream=False), tasks)


class TaskReader(DataSourceReader):
    """Reader that runs each task in an executor."""

    def __init__(self, options: SourceOptions, tasks: list[str]) -> None:
        self._options = options
        self._tasks = tasks

    def partitions(self) -> Sequence[InputPartition]:
        """Return the tasks."""
        return [TaskPartition(text) for text in self._tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Run a task and yield its answer."""
        if isinstance(partition, TaskPartition):
            answer = json.dumps(run_task(self._options, ArchiveTask.from_json(partition.text)))
            yield pa.RecordBatch.from_arrays([pa.array([answer])], names=["answer"])
