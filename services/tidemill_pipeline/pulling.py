"""Pulling a range of a queue: what is gone of it is told."""

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

BATCH_ROWS: Final = 2_048  # of an Arrow batch: several pages, since a batch has its own price
BATCH_BYTES: Final = 8 << 20  # and no more than this of bodies, unless one message is larger
# How long a queue may end before an end that was told: a master that was replaced says so until it
# hears of it, which takes some seconds. After that the broker has lost what was there.
SHORT_S: Final = 20.0
# Of a task that is held to a rate, what one call asks for: so little that nobody waits behind it.
PACED_CALL_S: Final = 0.025

log = logging.getLogger("tidemill_pipeline")


# Is told what of a queue is gone, from an offset up to another one, and why. May raise.
OnGap = Callable[[SourceQueue, int, int, str], None]

NOT_ARCHIVED: Final = "they were lost before they were archived, as the manifest says"
TAKEN: Final = "retention took them before they were read"
_DAMAGED: Final = (
    "the broker has what stands around them, and of them nothing that it can read; a replica may"
    " have it, from which it is mended"
)
_ENDS_SOONER: Final = (
    "the queue was told to end behind them, and has ended before them for {:.0f} s: the broker has"
    " lost messages, or its store was restored"
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
    """Yield the messages of a range, in order, gathered from pages.

    What a filter leaves out is passed over. What retention took, what is damaged (with a filter
    nobody can say), what went with the queue, and what is not there for `short_s`, goes to
    `on_gap`; without it that raises DataLoss, or is passed over with a warning, as the options say.
    """
    tell = on_gap or gap_reporter(fails=options.fails_on_data_loss)
    pace, most = Pace(options.rate_max), options.pull_batch
    if options.rate_max is not None:
        most = min(most, max(1, int(options.rate_max * PACED_CALL_S)))
    has_all = options.filter == "*"
    gathered: list[v2.Message] = []
    size, at, stalls, since_s = 0, part.start, 0, 0.0
    while at < part.end:
        begin, until = at, min(part.end, at + most)
        pace.keep(until - part.start)
        try:
            for page in client.messages(
                part.queue,
                start=at,
                end=until,
                tags=options.filter,
                with_bodies=with_bodies,
                timeout_ms=options.pull_timeout_ms,
            ):
                if page.is_gone:
                    tell(part.queue, at, min(page.min_offset, part.end), TAKEN)
                    at = max(at, page.min_offset)
                for first, last in _holes(page, at) if has_all else ():
                    tell(part.queue, first, last, _DAMAGED)
                gathered.extend(page.messages)
                size += sum(len(message.body) for message in page.messages)
                at = max(at, page.next_offset)
                if len(gathered) >= BATCH_ROWS or size >= BATCH_BYTES:
                    yield gathered
                    gathered, size = [], 0
        except QueueLoss as error:
            tell(part.queue, at, part.end, str(error))
            break
        if at > begin:
            stalls = 0
            continue
        stalls += 1
        if stalls == 1:
            since_s = time.monotonic()
            log.warning(
                "%s ends at %d, and was told to end at %d: it is asked again for %.0f s",
                part.queue,
                at,
                part.end,
                short_s,
            )
        if time.monotonic() - since_s >= short_s:
            tell(part.queue, at, part.end, _ENDS_SOONER.format(short_s))
            break
        client.pause(stalls)
    if gathered:
        yield gathered


def _holes(page: pb.ReadMessagesReply, at: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges from an offset to a page's end of which it has no message."""
    for message in page.messages:
        offset = message.system_properties.queue_offset
        if offset > at:
            yield at, offset
        at = offset + 1
    if page.next_offset > at:
        yield at, page.next_offset


def gap_reporter(*, fails: bool) -> OnGap:
    """Return what says that a range is gone: as an error, or as a warning where that is allowed."""

    def tell(queue: SourceQueue, start: int, end: int, why: str) -> None:
        what = f"{queue}: offsets from {start} to {end} are gone: {why}"
        if fails:
            raise DataLoss(f"{what}. With failOnDataLoss=false the read goes on behind them")
        log.warning("%s; they are passed over", what)

    return tell


def report_lost_queue(queue: SourceQueue, at: int, *, fails: bool) -> None:
    """Say that a queue itself is gone, which was read up to an offset."""
    what = (
        f"{queue} is not there any more: its topic was deleted, or the store of the broker group"
        f" made anew, or the broker group removed. It was read up to offset {at}; what stood behind"
        " it is gone"
    )
    if fails:
        raise QueueLoss(f"{what}. With failOnDataLoss=false the read goes on without it")
    log.warning("%s", what)


def report_lost_tail(queue: SourceQueue, at: int, *, fails: bool) -> None:
    """Say that a queue is gone which is archived, and that the archive may lack its end."""
    what = (
        f"{queue} is not there any more, and the archive has no more of it than up to offset {at}:"
        " what stood behind it, if anything did, is gone"
    )
    if fails:
        raise QueueLoss(
            f"{what}. With failOnDataLoss=false the read goes on without it, and so it does when"
            " `tidemill pipeline archive` has written down that the queue is over,"
            " with --store-is-gone where its broker group is gone"
        )
    log.warning("%s", what)


def report_short_queue(
    queue: SourceQueue, end: int, reached: str, *, fails: bool, goes_on: str
) -> None:
    """Say that a queue ends before where somebody had got to, and what a read does that may."""
    what = (
        f"{queue} ends at offset {end}, and {reached}: the broker has lost messages, or its store"
        " was restored, and offsets from there on are of other messages"
    )
    if fails:
        raise DataLoss(f"{what}. With failOnDataLoss=false {goes_on}")
    log.warning("%s; %s", what, goes_on)
