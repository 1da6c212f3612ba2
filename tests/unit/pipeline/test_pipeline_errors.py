"""Our sentences are found inside the errors of Spark."""

from __future__ import annotations

from tidemill_pipeline.errors import DataLoss, error_summary


def test_a_sentence_is_found_where_spark_has_wrapped_it() -> None:
    assert error_summary(DataLoss("it is gone")) == ("DataLoss", "it is gone")
    wrapped = RuntimeError(
        "Traceback (most recent call last):\n  File x\n"
        "tidemill_pipeline.errors.Unreachable: no answer from a:1\n at org.apache.spark.Task"
    )
    assert error_summary(wrapped) == ("Unreachable", "no answer from a:1")
    assert error_summary(RuntimeError("something else: x")) is None


def test_a_process_that_did_not_start_in_time_is_a_sentence() -> None:
    summary = error_summary(
        RuntimeError(
            "[STREAM_FAILED] Query [id = 4, runId = 6] terminated with exception:"
            " Python worker failed to connect back. SQLSTATE: XXKST\n=== Streaming Query ===\n"
        )
    )
    assert summary is not None
    assert summary[0] == "TimeoutError"
    assert summary[1].endswith("start it again: it continues where it stopped")
