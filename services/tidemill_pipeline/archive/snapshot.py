"""Snapshots of a manifest: the fold of its entries in one file, for faster reads.

Pure. `manifest/00000000000000000128.snapshot.json` is the fold of all entries before number 128.
Every process would write the same content. Without the snapshot, a reader folds the entries.
"""

from __future__ import annotations

import json
from dataclasses import astuple
from typing import Any, Final

from tidemill_pipeline.archive.manifest import (
    VERSION,
    Archive,
    ArchivedQueue,
    ArchivedRange,
    DataFile,
    FileSpan,
    QueueKey,
    read_checked,
    with_crc,
)
from tidemill_pipeline.errors import ArchiveError

# Entries whose vacuumed files a snapshot remembers. A process that commits such a file has read
# all entries after its plan. It plans again before the archive has this many more entries.
DELETED_ENTRIES: Final = 1_024


def as_json(archive: Archive) -> str:
    """Return an archive as text. Each queue key is written once."""
    numbers = {key: number for number, key in enumerate(archive.queues)}
    known_from = archive.next_number - DELETED_ENTRIES
    document = {
        "v": VERSION,
        "next": archive.next_number,
        "queues": [
            [
                list(key),
                queue.start,
                queue.end,
                queue.sealed,
                queue.closed,
                [astuple(each)[1:] for each in queue.ranges],
                *([] if queue.last is None else [astuple(queue.last)[1:]]),
            ]
            for key, queue in archive.queues.items()
        ],
        "files": [
            [
                file.path,
                file.bytes,
                file.rows,
                file.max_store_ms,
                [[numbers[span.key], span.start, span.end, span.rows] for span in file.spans],
                file.footer_crc,
            ]
            for file in archive.files.values()
        ],
        "letGo": archive.released_at_ms,
        "deleted": {
            path: number for path, number in archive.deleted_by.items() if number >= known_from
        },
    }
    return with_crc(json.dumps(document, separators=(",", ":")))


def from_json(text: str) -> Archive:
    """Read a text of `as_json`. Raises ArchiveError for any other text."""
    try:
        found = read_checked(text, what="a snapshot")
        archive = Archive(
            next_number=found["next"], released_at_ms=found["letGo"], deleted_by=found["deleted"]
        )
        for own, start, end, sealed, closed, ranges, *last in found["queues"]:
            key = QueueKey(*own)
            archive.queues[key] = ArchivedQueue(
                ranges=[_range(key, *each) for each in ranges],
                start=start,
                end=end,
                sealed=sealed,
                closed=[(a, b) for a, b in closed],
                last=_range(key, *last[0]) if last else None,
            )
        keys = list(archive.queues)
        for path, size, rows, max_store_ms, spans, footer_crc in found["files"]:
            archive.put(
                DataFile(
                    path=path,
                    bytes=size,
                    rows=rows,
                    max_store_ms=max_store_ms,
                    spans=tuple(
                        FileSpan(key=keys[number], start=start, end=end, rows=count)
                        for number, start, end, count in spans
                    ),
                    footer_crc=footer_crc,
                )
            )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ArchiveError(f"cannot read a manifest snapshot: {error}") from error
    return archive


def _range(key: QueueKey, *fields: Any) -> ArchivedRange:
    start, end, rows, size, min_store_ms, max_store_ms, crc_xor, lost, last_offset, last_ms = fields
    return ArchivedRange(
        key=key,
        start=start,
        end=end,
        rows=rows,
        bytes=size,
        min_store_ms=min_store_ms,
        max_store_ms=max_store_ms,
        crc_xor=crc_xor,
        lost=lost,
        last_offset=last_offset,
        last_store_ms=last_ms,
    )
