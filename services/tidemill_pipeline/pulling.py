"""Pulling a range of a queue, and reporting lost offsets."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Final

from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill_pipeline.client import ClusterClient
from tidemill_pipeline.errors import DataLoss, QueueLoss
from tidemill_pipeline.offsets import SourceQueue, SourceRange
from tidemill_pipeline.options import SourceOptions
from tidemill_pipeline.pace import Pace

BATCH_ROWS: Final = 2_048  # of an Arrow batch: several pages, since each batch has a fixed cost
BATCH_BYTES: Final = 8 << 20  # of bodies in a batch, unless one message is larger
# How long a queue may end before its known end. A replaced master reports such an end for some
# seconds. After this time, the broker has lost the messages.
SHORT_S: Final = 20.0
# Time span of one call of a task with a rate limit, so short that other clients do not wait for it.
PACED_CALL_S: Final = 0.025

log = logging.getLogger("tidemill_pipeline")


# Receives a queue, the range of its lost offsets and the reason. May raise.
OnGap = Callable[[SourceQueue, int, int, str], None]

NOT_ARCHIVED: Final = "they were lost before they were archived, according to the manifest"
EXPIRED: Final = "retention deleted them before they were read"
_DAMAGED: Final = (
    "the broker cannot read them, although it has their neighbours; mend the log from a replica or"
    " a backup"
)
_RETRIES: Final = "%s ends at %d but should end at %d: the read retries for %.0f s"
_ENDS_SOONER: Final = (
    "the queue should end after them, but has ended before them for {:.0f} s: the broker has lost"
    " messages, or its store was restored"
)


def pull_range(
    client: ClusterClient,
    options: SourceOptions,
    part: SourceRange,
    *,
    with_bodies: bool = True,
    on_gap: OnGap | None = None,
    short_s: float = SHORT_S,
) -> Iterator[list[v2.Message]]:
    """Yield the messages of a range in order, in batches of several pages.

    Lost offsets go to `on_gap`: deleted by retention, damaged, of a queue that no longer exists, or
    missing for `short_s`. With a filter, damaged messages are not detected. Without `on_gap`, lost
    offsets raise DataLoss or cause a warning, depending on `failOnDataLoss`.
    """
    report_gap = on_gap or gap_reporter(fails=options.fails_on_data_loss)
    pace, rows_per_call = Pace(options.rate_max), options.pull_batch
    if options.rate_max is not None:
        rows_per_call = min(rows_per_call, max(1, int(options.rate_max * PACED_CALL_S)))
    has_all = options.filter == "*"
    batch: list[v2.Message] = []
    size, at, stalls, since_s = 0, part.start, 0, 0.0
    while at < part.end:
        begin, until = at, min(part.end, at + rows_per_call)
        pace.keep(until - part.start)
        try:
            for page in client.messages(
                part.queue,
                start=at,
                end=until,
                tags=options.filter,
                with_bodies=with_bodies,
                quota_group=options.quota_group,
                timeout_ms=options.pull_timeout_ms,
            ):
                if page.is_gone:
                    report_gap(part.queue, at, min(page.min_offset, part.end), EXPIRED)
                    at = max(at, page.min_offset)
                for first, last in _holes(page, at) if has_all else ():
                    report_gap(part.queue, first, last, _DAMAGED)
                batch.extend(page.messages)
                size += sum(len(message.body) for message in page.messages)
                at = max(at, page.next_offset)
                if len(batch) >= BATCH_ROWS or size >= BATCH_BYTES:
                    yield batch
                    batch, size = [], 0
        except QueueLoss as error:
            report_gap(part.queue, at, part.end, str(error))
            break
        if at > begin:
            stalls = 0
            continue
        stalls += 1
        if stalls == 1:
            since_s = time.monotonic()
            log.warning(_RETRIES, part.queue, at, part.end, short_s)
        if time.monotonic() - since_s >= short_s:
            report_gap(part.queue, at, part.end, _ENDS_SOONER.format(short_s))
            break
        client.pause(stalls)
    if batch:
        yield batch


def _holes(page: pb.ReadMessagesReply, at: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges without a message from `at` to the end of a page."""
    for message in page.messages:
        offset = message.system_properties.queue_offset
        if offset > at:
            yield at, offset
        at = offset + 1
    if page.next_offset > at:
        yield at, page.next_offset


def gap_reporter(*, fails: bool) -> OnGap:
    """Return a function that reports lost offsets as an error or as a warning."""

    def report_gap(queue: SourceQueue, start: int, end: int, why: str) -> None:
        what = f"{queue}: offsets from {start} to {end} are lost: {why}"
        if fails:
            raise DataLoss(f"{what}. With failOnDataLoss=false the read continues after them")
        log.warning("%s; the read continues after them", what)

    return report_gap


def report_lost_queue(queue: SourceQueue, at: int, *, fails: bool) -> None:
    """Report a queue that no longer exists and was read up to an offset."""
    what = (
        f"{queue} no longer exists: its topic was deleted, the store of the broker group was"
        f" created again, or the broker group was removed. It was read up to offset {at}; later"
        " messages are lost"
    )
    if fails:
        raise QueueLoss(f"{what}. With failOnDataLoss=false the read continues without the queue")
    log.warning("%s", what)


def report_lost_tail(queue: SourceQueue, at: int, *, fails: bool) -> None:
    """Report an archived queue that no longer exists, whose last messages the archive may lack."""
    what = (
        f"{queue} no longer exists and is archived only up to offset {at}: later messages, if any,"
        " are lost"
    )
    if fails:
        raise QueueLoss(
            f"{what}. Run `tidemill pipeline archive`, which records the end of the queue (with"
            " --store-is-gone if its broker group was removed), or set failOnDataLoss=false"
        )
    log.warning("%s", what)


def report_short_queue(
    queue: SourceQueue, end: int, reached: str, *, fails: bool, goes_on: str
) -> None:
    """Report a queue that ends before a known offset.

    `goes_on`: the effect of failOnDataLoss=false, as a clause.
    """
    what = (
        f"{queue} ends at offset {end} but {reached}: the broker has lost messages, or its store"
        " was restored, and later offsets belong to other messages"
    )
    if fails:
        raise DataLoss(f"{what}. With failOnDataLoss=false {goes_on}")
    log.warning("%s; %s", what, goes_on)
