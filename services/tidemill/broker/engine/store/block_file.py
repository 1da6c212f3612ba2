"""Writing and opening derived files (see `layout.block_file`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias, final
from zlib import crc32

from tidemill.broker.engine.layout import block_file
from tidemill.broker.engine.layout.block_file import BlockFileDamaged, Row
from tidemill.broker.engine.store.disk import Disk, File


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
    disk: Disk,
    folder: str,
    magic: int,
    blocks: Iterable[Block | None],
    *,
    block_count_max: int,
    from_offset: int,
    to_offset: int,
) -> Iterator[list[File]]:
    """Write a derived file in slices, a block or a None of `blocks` each, and put it in place.

    Yields the files to be synced before the next step. Room for the directory is left in front, so
    that blocks can be written as they come.
    """
    name = file_name(folder, from_offset=from_offset, to_offset=to_offset)
    temporary = f"{folder}/unfinished"
    if temporary in disk.names(folder):
        disk.delete(temporary)
    file = disk.open(temporary, create=True)
    rows: list[Row] = []
    position = block_file.HEADER_SIZE + block_count_max * block_file.ROW_SIZE
    for block in blocks:
        if block is not None:
            assert len(rows) < block_count_max, "more blocks than there is room for"
            file.write_at(position, [block.data])
            rows.append(Row(*block[:4], crc32(block.data), position))
            position += len(block.data)
        yield []
    header = block_file.encode_header(magic, rows, from_offset=from_offset, to_offset=to_offset)
    file.write_at(0, [header])
    yield [file]
    file.close()
    disk.rename(temporary, name)
    yield [disk.folder(folder)]


# Files with a block that was found damaged, by name: noted when one is met, since nobody looks.
DamagedFiles: TypeAlias = "dict[str, BlockFile]"


@final
class BlockFile:
    """An open derived file. A block's checksum is verified when it is first used."""

    def __init__(
        self, disk: Disk, name: str, magic: int, damaged: DamagedFiles | None = None
    ) -> None:
        """Open `name`; it is put among the `damaged` when it turns out to be. Raises as `block`."""
        self.name = name
        self.magic = magic
        self._damaged: DamagedFiles = {} if damaged is None else damaged
        file = disk.open(name)
        self._view = file.view()
        file.close()
        self.from_offset, self.to_offset, self.rows = block_file.decode_header(self._view, magic)
        # No checksum covers the range in the header: the name says it a second time.
        folder = name.rpartition("/")[0]
        if name != file_name(folder, from_offset=self.from_offset, to_offset=self.to_offset):
            raise BlockFileDamaged(f"{name}: the range in its header is another one")
        self._verified = bytearray(len(self.rows))

    def check_block(self, index: int, size: int) -> memoryview:
        """Verify a block again, whoever has done so before. Returns, and raises, as `block`."""
        self._verified[index] = 0
        return self.block(index, size)

    def block(self, index: int, size: int) -> memoryview:
        """Return the `size` bytes of block `index`. Raises BlockFileDamaged."""
        row = self.rows[index]
        data = self._view[row.position : row.position + size]
        if not self._verified[index]:
            if len(data) != size or crc32(data) != row.crc:
                self._damaged[self.name] = self
                raise BlockFileDamaged(f"{self.name}: checksum mismatch in block {index}")
            self._verified[index] = 1
        return data


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
            file = BlockFile(disk, name, magic, damaged)
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
