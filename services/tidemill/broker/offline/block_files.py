"""Queue files, index files and snapshots, read block by block."""

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


class BlockFileKind(NamedTuple):
    """One kind of block file."""

    folder: str
    magic: int
    item_size: int  # bytes
    damage: Damage


QUEUES = BlockFileKind(QUEUES_FOLDER, block_file.QUEUE_MAGIC, queue_entry.SIZE, Damage.QUEUES)
INDEX = BlockFileKind(INDEX_FOLDER, block_file.INDEX_MAGIC, PAIR_SIZE, Damage.INDEX)
SNAPSHOTS = BlockFileKind(SNAPSHOTS_FOLDER, block_file.SNAPSHOT_MAGIC, 1, Damage.SNAPSHOT)
KINDS = (QUEUES, INDEX, SNAPSHOTS)
_NO_END = 1 << 62  # a log offset that no record reaches
_NAME = re.compile(r".*/(\d{20})-(\d{20})")


class FileRange(NamedTuple):
    """A file, and the range of the log in its name."""

    name: str
    from_offset: int
    to_offset: int


class BlockDamage(NamedTuple):
    """A damaged range of a file."""

    position: int
    size: int
    why: str


class IntactBlock(NamedTuple):
    """One intact block."""

    row: DirectoryRow
    data: bytes


def list_files(source: Source, kind: BlockFileKind) -> list[FileRange]:
    """List the files of a kind, the oldest first, without those being written or deleted."""
    found = map(_NAME.fullmatch, source.names(kind.folder))
    return [FileRange(one[0], int(one[1]), int(one[2])) for one in found if one]


def walk(
    source: Source, kind: BlockFileKind, file: FileRange
) -> Iterator[IntactBlock | BlockDamage]:
    """Yield the intact blocks of a file, and the damage. Raises FileNotFoundError."""
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
                yield IntactBlock(row, data)
    finally:
        opened.close()


def _rows(
    opened: SourceFile, kind: BlockFileKind, file: FileRange
) -> list[DirectoryRow] | BlockDamage:
    head = opened.read_at(0, HEADER_SIZE)
    if len(head) == HEADER_SIZE:
        count = min(HEADER.unpack(head)[2], opened.size() // ROW_SIZE)
        head += opened.read_at(HEADER_SIZE, count * ROW_SIZE)
    try:
        begin, end, directory = block_file.decode_header(memoryview(head), kind.magic)
    except block_file.BlockFileDamaged as error:
        return BlockDamage(0, len(head), str(error))
    if (begin, end) != (file.from_offset, file.to_offset):
        return BlockDamage(0, HEADER_SIZE, f"its header names the range {begin} to {end}")
    return list(block_file.rows_of(directory))


def best_chains(
    queues: list[FileRange], index: list[FileRange], *, min_offset: int, end: int
) -> tuple[list[FileRange], list[FileRange], int]:
    """Return the files of both kinds that join from the begin of the log to one common offset.

    The third value is that offset, at most `end`; 0 if there is none.
    """
    chains = (
        _chains(queues, min_offset=min_offset, end=end),
        _chains(index, min_offset=min_offset, end=end),
    )
    common = chains[0].keys() & chains[1].keys()
    if not common:
        return [], [], 0
    derived = max(common)
    return chains[0][derived], chains[1][derived], derived


def reach(files: list[FileRange], *, min_offset: int) -> int:
    """Return the log offset up to which files of one kind join; 0 if none does."""
    return max(_chains(files, min_offset=min_offset, end=_NO_END), default=0)


def _chains(files: list[FileRange], *, min_offset: int, end: int) -> dict[int, list[FileRange]]:
    """Return, by their end offset, files that join from the begin of the log."""
    chains: dict[int, list[FileRange]] = {}
    for file in sorted(files, key=lambda one: (one.from_offset, -one.to_offset)):
        if not file.from_offset < file.to_offset <= end:
            continue
        if file.from_offset in chains:
            chains.setdefault(file.to_offset, [*chains[file.from_offset], file])
        elif file.from_offset <= min_offset:
            chains.setdefault(file.to_offset, [file])
    return chains
