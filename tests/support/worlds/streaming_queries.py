"""Streaming queries of Spark, run to their end."""

from __future__ import annotations

from typing import Any, Final

from pyspark.errors import StreamingQueryException

from tidemill_pipeline.errors import error_summary

STARTS_MAX: Final = 5


def run_to_end(writer: Any) -> None:
    """Run a stream's writer until no rows remain.

    Spark gives the Python process of a stream 10 s to start, and no setting changes this. A busy
    machine is sometimes slower. Then the stream has done nothing, and this starts it again.
    """
    for attempt in range(STARTS_MAX):
        try:
            writer.trigger(availableNow=True).start().awaitTermination()
        except StreamingQueryException as error:
            summary = error_summary(error)
            if summary is None or summary[0] != TimeoutError.__name__ or attempt == STARTS_MAX - 1:
                raise
        else:
            return
