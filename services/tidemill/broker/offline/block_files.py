"""Queue files, index files and snapshots, looked at block by block."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple
from zlib import crc32

from tidemill.broker.engine.layout import block_file, queue_entry
from tidemill.broker.engine.layout.block_file import HEADER, HEADER_SIZE, ROW_SIZE, DirectoryRow
from tidemill.broker.engine.store.message_index import PAIR_SIZE
from tidemill.broker.engine.upkeep.checkpoint import INDEX_FOLDER, QUEUES_FOLDER, SNAPSHOTS_FOLDER
from tidemill.broker.offline.findings import Damage
from tidemill.broker.offline.source import Source, SourceFile


class Kind(NamedTuple):
    """One kind of block file."""

    folder: str
    magic: int
    item_size: int  # bytes
    damage: Damage


QUEUES = Kind(QUEUES_FOLDER, block_file.QUEUE_MAGIC, queue_entry.SIZE, Damage.QUEUES)
INDEX = Kind(INDEX_FOLDER, block_file.INDEX_MAGIC, PAIR_SIZE, Damage.INDEX)
SNAPSHOTS = Kind(SNAPSHOTS_FOLDER, block_file.SNAPSHOT_MAGIC, 1, Damage.SNAPSHOT)
KINDS = (QUEUES, INDEX, SNAPSHOTS)
_NO_END = 1 << 62  # a log offset that no record has
_NAME = re.compile(r".*/(\d{20})-(\d{20})")


class Range(NamedTuple):
    """What a file's name says: the stretch of the log that it states."""

    name: str
    from_offset: int
    to_offset: int


class BlockDamage(NamedTuple):
    """A damaged place in a file."""

    position: int
    size: int
    why: str


class Block(NamedTuple):
    """One intact block."""

    row: DirectoryRow
    data: bytes


def list_files(source: Source, kind: Kind) -> list[Range]:
    """List the files of a kind, the oldest first; what is being written or dropped is left out."""
    found = map(_NAME.fullmatch, source.names(kind.folder))
    return [Range(one[0], int(one[1]), int(one[2])) for one in found if one]


def walk(source: Source, kind: Kind, file: Range) -> Iterator[Block | BlockDamage]:
    """Yield the blocks of a file, and what is damaged. Raises FileNotFoundError."""
    opened = source.open(file.name)
    try:
        rows = _rows(opened, kind, file)
        if isinstance(rows, BlockDamage):
            yield rows
            return
        for row in rows:
            size = row.items * kind.item_size
            data = opened.read_at(row.position, size)
            if len(data) != size or crc32(data) != row.crc:
                yield BlockDamage(row.position, size, "checksum mismatch in a block")
            else:
                yield Block(row, data)
    finally:
        opened.close()


def _rows(opened: SourceFile, kind: Kind, file: Range) -> list[DirectoryRow] | BlockDamage:
    head = opened.read_at(0, HEADER_SIZE)
    if len(head) == HEADER_SIZE:
        count = min(HEADER.unpack(head)[2], opened.size() // ROW_SIZE)
        head += opened.read_at(HEADER_SIZE, count * ROW_SIZE)
    try:
        begin, end, directory = block_file.decode_header(memoryview(head), kind.magic)
    except block_file.BlockFileDamaged as error:
        return BlockDamage(0, len(head), str(error))
    if (begin, end) != (file.from_offset, file.to_offset):
        return BlockDamage(0, HEADER_SIZE, f"the file says that it is of {begin} to {end}")
    return list(block_file.rows_of(directory))


def best_chains(
    queues: list[Range], index: list[Range], *, min_offset: int, end: int
) -> tuple[list[Range], list[Range], int]:
    """Return the files of both kinds that join up from the log's beginning to one common offset.

    The third value is that offset, at most `end`; 0 where there is none.
    """
    ways = (
        _ways(queues, min_offset=min_offset, end=end),
        _ways(index, min_offset=min_offset, end=end),
    )
    common = ways[0].keys() & ways[1].keys()
    if not common:
        return [], [], 0
    derived = max(common)
    return ways[0][derived], ways[1][derived], derived


def reach(files: list[Range], *, min_offset: int) -> int:
    """Return the log offset up to which files of one kind join; 0 where none does."""
    ways = _ways(files, min_offset=min_offset, end=_NO_END)
    return max(ways, default=0)


def _ways(files: list[Range], *, min_offset: int, end: int) -> dict[int, list[Range]]:
    """Return, by the offset at which it ends, a row of files that begins at the log's beginning."""
    ways: dict[int, list[Range]] = {}
    for file in sorted(files, key=lambda one: (one.from_offset, -one.to_offset)):
        if not file.from_offset < file.to_offset <= end:
            continue
        if file.from_offset in ways:
            ways.setdefault(file.to_offset, [*ways[file.from_offset], file])
        elif file.from_offset <= min_offset:
            ways.setdefault(file.to_offset, [file])
    return ways
