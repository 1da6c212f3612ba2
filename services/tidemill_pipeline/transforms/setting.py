"""Columns of archived messages that a replay replaces, each by an expression of SQL.

An expression sees the archived message with its body unpacked. It does not see the results of other
expressions. Errors that need no message are reported before the first send.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import functions as F  # noqa: N812  # The usual name among users of Spark.

from tidemill_pipeline.errors import BadOption, suggestion
from tidemill_pipeline.schema import MESSAGES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

Expressions = Mapping[str, str]  # by column
# Columns that can be set, with the allowed types of the expression. Null and an empty array or map
# are always allowed.
SETTABLE: Final[dict[str, tuple[str, ...]]] = {
    "body": ("binary", "string"),
    "tag": ("string",),
    "keys": ("array<string>",),
    "message_group": ("string",),
    "properties": ("map<string,string>",),
    "due_timestamp": ("timestamp",),
}
_DUE: Final = "due_timestamp"
_BODY: Final = "body"
_NOTHING: Final = "void"  # Spark's type of null
_KNOWN: Final = tuple(column.name for column in MESSAGES)
_SHOWN_CHARACTERS: Final = 60  # of a value
_LOGGERS: Final = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
# Errors of a value, by their SQL state.
_OF_VALUES: Final = re.compile(r".*(\[[A-Z0-9_.]+\] .*) SQLSTATE: 22\w{3}")
_SENTENCE_CHARACTERS: Final = 300  # of a message of Spark, which contains the value


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExpressionEffect:
    """Effect of an expression on messages."""

    column: str
    changed: int  # messages that have another value by it
    missing: int  # that have none
    before: str | None  # of one of those that are changed, shortened; None: none
    after: str | None

    def sentences(self) -> list[str]:
        """Return the effect as sentences."""
        told = f"{self.column} would change in {self.changed:,} of them"
        if self.changed:
            told += f": {self.before or 'nothing'} becomes {self.after or 'nothing'}"
        if not self.missing:
            return [told]
        what = "would have no body and are not sent" if self.column == _BODY else "would have none"
        return [told, f"{self.missing:,} {what}"]


def check_names(expressions: Expressions, *, timing: str) -> None:
    """Raise BadOption for columns that cannot be set. Needs no Spark."""
    for name in expressions:
        if name == _DUE and timing != "asap":
            raise BadOption(f"column {name} cannot be set: --timing {timing} sets the due time")
        if name in SETTABLE:
            continue
        those = f"those that can be are {', '.join(SETTABLE)}"
        if name in _KNOWN:
            raise BadOption(
                f"column {name} cannot be set, because it describes the archive; {those}"
            )
        raise BadOption(
            f"there is no column {name}{suggestion(name, SETTABLE) or '.'} Of messages {those}"
        )


def check_expressions(messages: DataFrame, expressions: Expressions) -> None:
    """Raise BadOption for an invalid expression, or one of a wrong type.

    `messages`: a frame with the columns of messages, with or without rows.
    """
    for name, text in expressions.items():
        with _unsaid():
            try:
                # Only expressions over one row with one value are allowed.
                messages.where(F.expr(text).isNotNull())
                (field,) = messages.select(F.expr(text)).schema
            except AnalysisException as error:
                raise BadOption(
                    f"column {name} cannot be set to {text}: {_sentence(error)}"
                ) from None
        of_type = field.dataType.simpleString()
        if _type(name, of_type) is None:
            allowed = " or ".join(SETTABLE[name])
            raise BadOption(f"column {name} is {allowed}, and {text} is {of_type}")


def read_bodies(messages: DataFrame, expressions: Expressions) -> bool:
    """Return whether an expression uses bodies, which must then be unpacked."""
    without = messages.drop(_BODY)
    for text in expressions.values():
        with _unsaid():
            try:
                without.select(F.expr(text))
            except AnalysisException:
                return True
    return False


def with_columns(messages: DataFrame, expressions: Expressions) -> DataFrame:
    """Return messages with columns set."""
    types = {
        name: _type(name, messages.select(F.expr(text)).schema[0].dataType.simpleString())
        for name, text in expressions.items()
    }
    return messages.withColumns(
        {name: F.expr(text).cast(types[name]) for name, text in expressions.items()}
    )


def effects(messages: DataFrame, expressions: Expressions) -> tuple[ExpressionEffect, ...]:
    """Return the effects of expressions; reads all messages."""
    if not expressions:
        return ()
    was = {name: f"was_{name}" for name in expressions}
    beside = messages.withColumns({old: F.col(name) for name, old in was.items()})
    counted = []
    for name, old in was.items():
        differs = ~_as_text(name, name).eqNullSafe(_as_text(old, name))
        pair = F.struct(_shown(old, name).alias("before"), _shown(name, name).alias("after"))
        counted += [
            F.count_if(differs).alias(f"changed_{name}"),
            F.count_if(F.col(name).isNull()).alias(f"missing_{name}"),
            F.first(F.when(differs, pair), ignorenulls=True).alias(f"example_{name}"),
        ]
    (found,) = with_columns(beside, expressions).agg(*counted).collect()
    return tuple(
        ExpressionEffect(
            column=name,
            changed=found[f"changed_{name}"],
            missing=found[f"missing_{name}"],
            before=None if (pair := found[f"example_{name}"]) is None else pair.before,
            after=None if pair is None else pair.after,
        )
        for name in expressions
    )


@contextlib.contextmanager
def value_errors(expressions: Expressions) -> Iterator[None]:
    """Raise BadOption if an expression fails for a value in this block."""
    with _unsaid():
        try:
            yield
        except PySparkException as error:
            found = _OF_VALUES.search(str(error)) if expressions else None
            if found is None:
                raise
            told = found[1][:_SENTENCE_CHARACTERS]
            raise BadOption(f"an expression failed for a message: {told}") from error


def _type(name: str, of_type: str) -> str | None:
    """Return the allowed type of a column that an expression type matches; None: none."""
    for allowed in SETTABLE[name]:
        if of_type in {allowed, _NOTHING, re.sub(r"\w+(?=[,>])", _NOTHING, allowed)}:
            return allowed
    return None


def _as_text(column: str, name: str) -> Column:
    """Return a value in a comparable form; Spark cannot compare maps."""
    if name == "properties":
        return F.array_sort(F.map_entries(column))
    return F.col(column).cast("binary") if name == _BODY else F.col(column)


def _shown(column: str, name: str) -> Column:
    """Return a value as text for display; bytes that are not text as hexadecimal digits."""
    if name == _BODY:
        body = F.col(column).cast("binary")
        text = F.coalesce(F.try_validate_utf8(body.cast("string")), F.hex(body))
    elif name in {"keys", "properties"}:
        text = F.to_json(column)
    else:
        text = F.col(column).cast("string")
    return F.substring(text, 1, _SHOWN_CHARACTERS)


def _sentence(error: PySparkException) -> str:
    """Return the first line of an error of Spark, without its numbers."""
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return line.partition(" SQLSTATE: ")[0]


@contextlib.contextmanager
def _unsaid() -> Iterator[None]:
    """Suppress the lines of Spark on standard error for errors that it raises."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
