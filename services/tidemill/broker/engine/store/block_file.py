"""Writing and opening derived files (see `layout.block_file`)."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import NamedTuple, TypeAlias, final
from zlib import crc32

from tidemill.broker.engine.layout import block_file
from tidemill.broker.engine.layout.block_file import BlockFileDamaged, Row
from tidemill.broker.engine.store.disk import Disk, File, KnownFolder
from tidemill.broker.engine.tally import Tally


class Block(NamedTuple):
    """One block to be written."""

    key_1: int
    key_2: int
    first: int
    items: int
    data: bytes


def file_name(folder: str, *, from_offset: int, to_offset: int) -> str:
    """Return the name of the file that covers a range of the log."""
    return f"{folder}/{from_offset:020d}-{to_offset:020d}"


def write_block_file(
    folder: KnownFolder,
    magic: int,
    slices: Iterable[Sequence[Block]],
    tally: Tally,
    damaged: DamagedFiles,
    *,
    block_count_max: int,
    from_offset: int,
    to_offset: int,
) -> Generator[list[File], None, BlockFile]:
    """Write a derived file in slices, some blocks or none each, put it in place, and return it.

    Yields the files to be synced before the next step. Room for the directory is left in front, so
    that blocks can be written as they come.
    """
    name = file_name(folder.path, from_offset=from_offset, to_offset=to_offset)
    temporary = f"{folder.path}/unfinished"
    file = folder.create(temporary)
    rows: list[Row] = []
    directory = bytearray()
    position = block_file.HEADER_SIZE + block_count_max * block_file.ROW_SIZE
    for blocks in slices:
        assert len(rows) + len(blocks) <= block_count_max, "more blocks than there is room for"
        if blocks:
            file.write_at(position, [block.data for block in blocks])
        for block in blocks:
            row = Row(*block[:4], crc32(block.data), position)
            rows.append(row)
            directory += block_file.ROW.pack(*row)
            position += len(block.data)
            tally.add(1, size_bytes=len(block.data))
        yield []
    header = block_file.encode_header(
        magic, directory, from_offset=from_offset, to_offset=to_offset
    )
    file.write_at(0, [header, directory])
    yield [file]
    file.close()
    folder.rename(temporary, name)
    yield [folder.disk.folder(folder.path)]
    return BlockFile(
        folder.disk, name, rows,
        magic=magic, damaged=damaged, from_offset=from_offset, to_offset=to_offset,
    )  # fmt: skip


# Files with a block that was found damaged, by name: noted when one is met, since nobody looks.
DamagedFiles: TypeAlias = "dict[str, BlockFile]"


@final
class BlockFile:
    """An open derived file. A block's checksum is verified when it is first used."""

    def __init__(
        self,
        disk: Disk,
        name: str,
        rows: list[Row],
        *,
        magic: int,
        damaged: DamagedFiles,
        from_offset: int,
        to_offset: int,
    ) -> None:
        """Open `name`, whose directory is known; a damaged block puts it among the `damaged`."""
        self.name = name
        self.magic = magic
        self._damaged = damaged
        self._view = _view(disk, name)
        self.from_offset = from_offset
        self.to_offset = to_offset
        self.rows = rows
        self._verified = bytearray(len(rows))

    def unverified(self, index: int, size: int) -> memoryview:
        """Return what there is of the `size` bytes of block `index`, right or wrong."""
        position = self.rows[index].position
        return self._view[position : position + size]

    def check_block(self, index: int, size: int) -> memoryview:
        """Verify a block again, whoever has done so before. Returns, and raises, as `block`."""
        self._verified[index] = 0
        return self.block(index, size)

    def block(self, index: int, size: int) -> memoryview:
        """Return the `size` bytes of block `index`. Raises BlockFileDamaged."""
        data = self.unverified(index, size)
        if not self._verified[index]:
            if len(data) != size or crc32(data) != self.rows[index].crc:
                self._damaged[self.name] = self
                raise BlockFileDamaged(f"{self.name}: checksum mismatch in block {index}")
            self._verified[index] = 1
        return data


def _view(disk: Disk, name: str) -> memoryview:
    file = disk.open(name)
    view = file.view()
    file.close()
    return view


def open_block_file(disk: Disk, name: str, magic: int, damaged: DamagedFiles) -> BlockFile:
    """Open a derived file of an earlier life. Raises BlockFileDamaged."""
    from_offset, to_offset, rows = block_file.decode_header(_view(disk, name), magic)
    # No checksum covers the range in the header: the name says it a second time. And of a torn
    # header of a file that was being written the checksum may be right.
    if name != file_name(name.rpartition("/")[0], from_offset=from_offset, to_offset=to_offset):
        raise BlockFileDamaged(f"{name} says that it is of {from_offset} to {to_offset}")
    return BlockFile(
        disk, name, rows,
        magic=magic, damaged=damaged, from_offset=from_offset, to_offset=to_offset,
    )  # fmt: skip


def open_chain(
    disk: Disk, folder: str, magic: int, damaged: DamagedFiles, *, to_offset: int
) -> list[BlockFile]:
    """Open the files that join up to `to_offset`, oldest first, and delete all others.

    A damaged file ends the chain from below: what it and all later ones state is rebuilt.
    """
    chain: list[BlockFile] = []
    is_broken = False
    for name in disk.names(folder):
        try:
            file = open_block_file(disk, name, magic, damaged)
        except (BlockFileDamaged, ValueError):
            is_broken = True
            disk.delete(name)
            continue
        joins = not chain or chain[-1].to_offset == file.from_offset
        if is_broken or not joins or file.to_offset > to_offset:
            is_broken = True
            disk.delete(name)
            continue
        chain.append(file)
    return chain
