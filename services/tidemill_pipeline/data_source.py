"""The Spark data source `rocketmq`: the choice of a reader or writer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)

from tidemill_pipeline import schema as columns
from tidemill_pipeline import sql_tables
from tidemill_pipeline.errors import BadOption
from tidemill_pipeline.options import SourceOptions, parse_sink, parse_source
from tidemill_pipeline.pulling import log
from tidemill_pipeline.source.loads import new_load

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

NAME = "rocketmq"
# Spark's own options of a stream, which it also passes to the source.
_OF_STREAMS = frozenset({"checkpointlocation", "path"})


class RocketMQDataSource(DataSource):
    """Data source of a cluster: `spark.read.format("rocketmq").option("endpoints", ...)`."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._load = new_load()

    @classmethod
    def name(cls) -> str:
        """Return the name for `.format()`."""
        return NAME

    def schema(self) -> StructType | str:
        """Return the columns of the chosen dataset, or of a table that Spark creates."""
        if sql_tables.is_new_table(self.options):
            return sql_tables.columns_of_new_table(self.options)
        # Spark requests the columns before it chooses between batch and stream.
        options = parse_source(dict(self.options), is_stream=None)
        return columns.ddl(
            options.dataset,
            without=() if options.includes_body else columns.of_bodies(options.dataset),
        )

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch."""
        given = sql_tables.with_table_options(self.options, schema, "batch")
        options = parse_source(given, is_stream=False)
        _check(options, schema)
        if options.pushes_down:
            log.warning(
                "pushdown=true: use each .load() once and with one predicate; a frame that is used"
                " again, or without the predicate, may lack rows"
            )
        if options.dataset in {"messages", "dlq"}:
            from tidemill_pipeline.source.messages import MessageReader, PushdownMessageReader

            if options.pushes_down:
                return PushdownMessageReader(options, schema, load=self._load)
            return MessageReader(options, schema)
        if options.dataset == "events":
            from tidemill_pipeline.source.events import EventReader

            return EventReader(options, schema)
        if options.dataset == "pending":
            from tidemill_pipeline.source.pending import pending_reader

            return pending_reader(options, schema, load=self._load)
        from tidemill_pipeline.source.listings import ListingReader

        return ListingReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return the reader of a stream."""
        given = sql_tables.with_table_options(self.options, schema, "stream")
        options = parse_source(given, is_stream=True)
        _check(options, schema)
        if options.dataset == "events":
            from tidemill_pipeline.source.events import EventStreamReader

            return EventStreamReader(options, schema)
        from tidemill_pipeline.source.message_stream import MessageStreamReader

        return MessageStreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a batch."""
        from tidemill_pipeline.sink.writer import BatchWriter

        _refuse_overwriting(overwrite=overwrite)
        given = sql_tables.with_table_options(self.options, schema, "write")
        return BatchWriter(parse_sink(given), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """Return the writer of a stream."""
        from tidemill_pipeline.sink.writer import StreamWriter

        _refuse_overwriting(overwrite=overwrite)
        own = {name: value for name, value in self.options.items() if name not in _OF_STREAMS}
        return StreamWriter(parse_sink(sql_tables.with_table_options(own, schema, "write")), schema)


def _check(options: SourceOptions, schema: StructType) -> None:
    """Raise BadOption if a schema has columns that the read cannot return."""
    columns.check(options.dataset, schema)
    if options.includes_body:
        return
    for name in sorted(set(columns.of_bodies(options.dataset)).intersection(schema.names)):
        raise BadOption(f"column {name} needs bodies, but includeBody=false omits them")


def _refuse_overwriting(*, overwrite: bool) -> None:
    if overwrite:
        raise BadOption("stored messages cannot be overwritten; use mode append")
