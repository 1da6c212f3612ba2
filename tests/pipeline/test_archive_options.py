"""What an archive cannot do though a read can: it is refused with a sentence."""

from __future__ import annotations

import pytest

from tidemill_pipeline.errors import BadOption
from tidemill_pipeline.jobs.archive import check_options
from tidemill_pipeline.options import parse_source

GIVEN = {"endpoints": "a:1", "topic": "orders", "archivePath": "/a", "readMode": "broker"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("startingOffsets", "latest"),
        ("startingOffsets", "group:copies"),
        ("startingOffsets", '{"orders": {"a": {"0": 25}}}'),
        ("startingTimestamp", "2026-11-22T00:00:00Z"),
        ("endingOffsets", '{"orders": {"a": {"0": 25}}}'),
        ("endingTimestamp", "2026-11-22T00:00:00Z"),
        ("filter", "a || b"),
        ("includeBody", "false"),
    ],
)
def test_archive_options_reject_a_part_of_a_queue(name: str, value: str) -> None:
    options = parse_source({**GIVEN, name: value}, is_stream=False)
    with pytest.raises(BadOption, match=rf"contains whole queues; remove .*{name}"):
        check_options(options)


def test_archive_options_accept_reading_options() -> None:
    more = {
        "startingOffsets": "earliest",
        "endingOffsets": "latest",
        "filter": "a || *",
        "pullBatchSize": "7",
        "failOnDataLoss": "false",
    }
    check_options(parse_source({**GIVEN, **more}, is_stream=False))
