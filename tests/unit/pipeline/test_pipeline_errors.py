"""Our sentences are found inside the errors of Spark."""

from __future__ import annotations

from tidemill.pipeline.errors import DataLoss, told_by


def test_a_sentence_is_found_where_spark_has_wrapped_it() -> None:
    assert told_by(DataLoss("it is gone")) == ("DataLoss", "it is gone")
    wrapped = RuntimeError(
        "Traceback (most recent call last):\n  File x\n"
        "tidemill.pipeline.errors.Unreachable: no answer from a:1\n at org.apache.spark.Task"
    )
    assert told_by(wrapped) == ("Unreachable", "no answer from a:1")
    assert told_by(RuntimeError("something else: x")) is None
