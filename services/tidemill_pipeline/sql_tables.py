"""The options of an SQL table: `CREATE TABLE t USING rocketmq OPTIONS (...)`.

Spark passes the options of a table to a Python data source only when it creates the table. They
arrive with the prefix `option.`, beside properties of the catalog. A later read or write gets the
columns of the table, but not its options. The source therefore stores the options in the metadata
of the columns, from where each read and write takes them.

Spark does not call the source when it creates a table with a list of columns. Such a table has no
options. A temporary view needs nothing of this: Spark passes its options to each read and write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from tidemill_pipeline import schema as columns
from tidemill_pipeline.errors import BadOption
from tidemill_pipeline.option_table import SINK, SOURCE, Option
from tidemill_pipeline.options import parse_sink, parse_source

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

Use = Literal["batch", "stream", "write"]

_METADATA: Final = "rocketmq"  # key of the options in the metadata of a column
_PREFIX: Final = "option."
_PROVIDER: Final = "provider"  # a property that Spark's catalog sets for each table
_ENDPOINTS: Final = "endpoints"
_NEVER_STORED: Final = "auth.accessKey"
_BY_NAME: Final = {
    "read": {each.name.lower(): each for each in SOURCE},
    "write": {each.name.lower(): each for each in SINK},
}


def is_new_table(given: Mapping[str, str]) -> bool:
    """Return whether these are the properties of a table that Spark creates."""
    names = {name.lower() for name in given}
    return _PROVIDER in names or any(name.startswith(_PREFIX) for name in names)


def columns_of_new_table(given: Mapping[str, str]) -> StructType:
    """Return the columns of a table that Spark creates, with its options. Raises BadOption."""
    stored = {
        name.lower().removeprefix(_PREFIX): value
        for name, value in given.items()
        if name.lower().startswith(_PREFIX)
    }
    if _NEVER_STORED.lower() in stored:
        raise BadOption(
            f"option {_NEVER_STORED}: a table does not store it. Add WITH (`{_NEVER_STORED}` ="
            " 'KEY') to each statement, or create a temporary view"
        )
    of_writes = stored.keys() - _BY_NAME["read"].keys()
    of_writes &= _BY_NAME["write"].keys()
    reading = parse_source(
        {name: value for name, value in stored.items() if name not in of_writes}, is_stream=None
    )
    if of_writes:
        parse_sink(_used(stored, "write"))
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.sql.types import StructField, StructType

    omitted = () if reading.includes_body else columns.of_bodies(reading.dataset)
    return StructType(
        [
            StructField(field.name, field.dataType, metadata={_METADATA: stored})
            for field in from_arrow_schema(columns.of_dataset(reading.dataset)).fields
            if field.name not in omitted
        ]
    )


def with_table_options(given: Mapping[str, str], schema: StructType, use: Use) -> dict[str, str]:
    """Return the options of a statement, added to those of the table with these columns.

    Options of the table that this use does not have are ignored. A statement that sets `endpoints`
    uses only its own options: its columns may come from another table. Raises BadOption if there
    are no options at all.
    """
    own = dict(given)
    if _ENDPOINTS in {name.lower() for name in own}:
        return own
    stored = _stored(schema)
    if use == "write" and not set(schema.names) >= {each.name for each in columns.MESSAGES}:
        stored = {}  # A frame that derives from a table. INSERT passes all columns of its table.
    if not stored and not own:
        raise BadOption(
            "no options. Spark does not pass the OPTIONS of a table that has a list of columns or"
            " that a stream writes to: create the table without columns, or set the options in each"
            " statement, as in SELECT * FROM t WITH (endpoints = 'HOST:PORT', topic = 'orders')"
        )
    return {**_used(stored, use), **own}


def _stored(schema: StructType) -> dict[str, str]:
    """Return the options in the metadata of columns; empty if there are none."""
    for field in schema.fields:
        found: Any = field.metadata.get(_METADATA)
        if isinstance(found, dict):
            return {str(name): str(value) for name, value in found.items()}
    return {}


def _used(stored: Mapping[str, str], use: Use) -> dict[str, str]:
    table = _BY_NAME["write" if use == "write" else "read"]

    def is_used(option: Option | None) -> bool:
        return option is not None and (option.stream if use == "stream" else option.batch)

    return {name: value for name, value in stored.items() if is_used(table.get(name))}
