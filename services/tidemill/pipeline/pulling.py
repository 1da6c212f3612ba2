"""Pulling a range of a queue: holes are passed over, and what is gone is told."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

from tidemill.pipeline.client import Client
from tidemill.pipeline.errors import DataLoss
from tidemill.pipeline.offsets import QueueName, QueueRange
from tidemill.pipeline.options import SourceOptions
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

BATCH_ROWS: Final = 2_048  # of an Arrow batch: several pages, since a batch has its own price
BATCH_BYTES: Final = 8 << 20  # and no more than this of bodies, unless one message is larger
STALLS_MAX: Final = 20  # answers in a row that go no further, below an end that was told

log = logging.getLogger("tidemill.pipeline")


def pull_range(
    client: Client, options: SourceOptions, part: QueueRange, *, with_bodies: bool = True
) -> Iterator[list[v2.Message]]:
    """Yield the messages of a range, in order, gathered from pages.

    A hole is passed over. What retention took raises DataLoss, or is passed over with a warning.
    """
    gathered: list[v2.Message] = []
    size, at, stalls = 0, part.start, 0
    while at < part.end:
        begin, until = at, min(part.end, at + options.pull_batch)
        for page in client.messages(
            part.name, start=at, end=until, tags=options.filter, with_bodies=with_bodies,
            timeout_ms=options.pull_timeout_ms,
        ):  # fmt: skip
            if page.is_gone:
                gone = min(page.min_offset, part.end)
                tell_gap(part.name, at, gone, fails=options.fails_on_data_loss)
            gathered.extend(page.messages)
            size += sum(len(message.body) for message in page.messages)
            at = max(at, page.next_offset)
            if len(gathered) >= BATCH_ROWS or size >= BATCH_BYTES:
                yield gathered
                gathered, size = [], 0
        stalls = stalls + 1 if at == begin else 0
        if stalls > STALLS_MAX:
            raise DataLoss(
                f"{part.name} ends at {at}, and was told to end at {part.end} or behind it: the"
                " broker has lost messages, or another one took its place"
            )
        if stalls:
            client.pause(stalls)
    if gathered:
        yield gathered


def tell_gap(name: QueueName, start: int, end: int, *, fails: bool) -> None:
    """Say that a range is gone: as an error, or as a warning where losing it is allowed."""
    if fails:
        raise DataLoss(
            f"{name}: offsets from {start} to {end} are gone, by retention or because the topic was"
            " deleted. With failOnDataLoss=false the read goes on behind them"
        )
    log.warning("%s: offsets from %d to %d are gone and are passed over", name, start, end)
