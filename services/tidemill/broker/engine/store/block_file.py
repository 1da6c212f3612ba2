"""Writing and opening of derived files (see `layout.block_file`)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, final
from zlib import crc32

import numpy as np
import numpy.typing as npt

from tidemill.broker.engine.layout import block_file
from tidemill.broker.engine.layout.block_file import BlockFileDamaged, DirectoryRow
from tidemill.broker.engine.store.disk import CachedFolder, Disk, File
from tidemill.broker.engine.store.mappings import Mappings, PageUnreadable
from tidemill.broker.engine.tally import Tally


class EncodedBlock(NamedTuple):
    """A block of a derived file before it is written."""

    key_1: int
    key_2: int
    first: int
    items: int
    data: bytes


class InsufficientSpace(Exception):
    """The disk is too full for a file that can be written later."""


def file_name(folder: str, *, from_offset: int, to_offset: int) -> str:
    """Return the name of the file that covers a range of the log."""
    return f"{folder}/{from_offset:020d}-{to_offset:020d}"


def write_block_file(
    folder: CachedFolder,
    mappings: Mappings,
    magic: int,
    slices: Iterable[Sequence[EncodedBlock]],
    tally: Tally,
    damaged: DamagedFiles,
    *,
    block_count_max: int,
    from_offset: int,
    to_offset: int,
    on_placed: Callable[[BlockFile], None] = lambda _: None,
) -> Generator[list[File], None, BlockFile]:
    """Write a derived file in slices, rename it into place, and return it.

    Each element of `slices` has some blocks or none. Yields the files to sync before the next step.
    The directory comes before the blocks and has room for `block_count_max` rows, so blocks are
    written as they come. If `slices` raises, the file is deleted. If the file replaces another one,
    `on_placed` receives it in the same slice: readers must not use the old directory with the new
    file.
    """
    name = file_name(folder.path, from_offset=from_offset, to_offset=to_offset)
    temporary = f"{folder.path}/unfinished"
    file = folder.create(temporary)
    directory = bytearray()
    position = block_file.HEADER_SIZE + block_count_max * block_file.ROW_SIZE
    try:
        for blocks in slices:
            row_count = len(directory) // block_file.ROW_SIZE + len(blocks)
            assert row_count <= block_count_max, "more blocks than there is room for"
            if blocks:
                file.write_at(position, [block.data for block in blocks])
            for block in blocks:
                directory += block_file.ROW.pack(*block[:4], crc32(block.data), position)
                position += len(block.data)
                tally.add(1, size_bytes=len(block.data))
            yield []
    except (BlockFileDamaged, InsufficientSpace):
        file.close()
        yield from folder.drop(temporary)
        raise
    header = block_file.encode_header(
        magic, directory, from_offset=from_offset, to_offset=to_offset
    )
    file.write_at(0, [header, directory])
    yield [file]
    file.close()
    folder.rename(temporary, name)
    mappings.forget(name)
    new = BlockFile(
        mappings,
        name,
        block_file.BlockFileHeader(from_offset, to_offset, bytes(directory)),
        magic=magic,
        damaged=damaged,
        size_bytes=position,
    )
    on_placed(new)
    yield [folder.disk.folder(folder.path)]
    return new


# The rows of a directory as an array.
ROW_TYPE = np.dtype(
    [
        ("key_1", ">u4"),
        ("key_2", ">u4"),
        ("first", ">i8"),
        ("items", ">u4"),
        ("crc", ">u4"),
        ("position", ">u8"),
    ]
)
assert ROW_TYPE.itemsize == block_file.ROW_SIZE, "the same rows"

# Knowledge about a block: its checksum was right, and then also that its pages were read.
INTACT, PRESENT = 1, 2

# Files with a damaged block, by name. A reader adds a file when it meets the damage.
DamagedFiles: TypeAlias = "dict[str, BlockFile]"


@final
class BlockFile:
    """A derived file, mapped during use. The first use of a block verifies its checksum.

    Memory holds the directory: 32 bytes per block, with the checksums.
    """

    def __init__(
        self,
        mappings: Mappings,
        name: str,
        header: block_file.BlockFileHeader,
        *,
        magic: int,
        damaged: DamagedFiles,
        size_bytes: int,
    ) -> None:
        """Open `name` with its valid header. A damaged block adds the file to `damaged`."""
        self.name = name
        self.magic = magic
        self.size_bytes = size_bytes
        self.from_offset, self.to_offset, self._directory = header
        self.row_count = len(self._directory) // block_file.ROW_SIZE
        self._mappings = mappings
        self._damaged = damaged
        # Per block: INTACT; or PRESENT until a file is mapped or forgotten; or 0.
        self._verified = bytearray(self.row_count)
        self._changes = mappings.changes  # value at which the blocks were PRESENT

    def row(self, number: int) -> DirectoryRow:
        """Return a row of the directory."""
        return DirectoryRow._make(
            block_file.ROW.unpack_from(self._directory, number * block_file.ROW_SIZE)
        )

    @property
    def directory(self) -> npt.NDArray[np.void]:
        """The rows of the directory, as `ROW_TYPE`."""
        return np.frombuffer(self._directory, dtype=ROW_TYPE)

    def rows(self, begin: int = 0, end: int | None = None) -> Iterator[DirectoryRow]:
        """Yield the rows of the directory from `begin` to `end`, or all."""
        size = block_file.ROW_SIZE
        stop = None if end is None else end * size
        return block_file.rows_of(self._directory[begin * size : stop])

    def read_unverified(self, number: int, size: int) -> memoryview:
        """Return up to `size` bytes of block `number` without a checksum.

        Raises BlockFileDamaged if they cannot be read.
        """
        position = block_file.position_of(self._directory, number)
        try:
            view = self._mappings.readable(self.name, position, size)
        except PageUnreadable as error:
            self._verified[number] = 0
            self._damaged[self.name] = self
            raise BlockFileDamaged(str(error)) from error
        return view[position : position + size]

    def check_block(self, number: int, size: int) -> memoryview:
        """Verify a block again. Returns and raises as `block`."""
        self._verified[number] = 0
        return self.block(number, size)

    def block(self, number: int, size: int) -> memoryview:
        """Return the `size` bytes of block `number`. Raises BlockFileDamaged."""
        mappings = self._mappings
        if self._verified[number] == PRESENT and self._changes == mappings.changes:
            # Every message of a backlog passes here.
            position = block_file.position_of(self._directory, number)
            return mappings[self.name][position : position + size]
        data = self.read_unverified(number, size)
        is_right = len(data) == size and (
            self._verified[number] or crc32(data) == self.row(number).crc
        )
        if not is_right:
            self._damaged[self.name] = self
            raise BlockFileDamaged(f"{self.name}: checksum mismatch in block {number}")
        if self._changes != mappings.changes:
            self._verified = self._verified.replace(bytes([PRESENT]), bytes([INTACT]))
            self._changes = mappings.changes
        self._verified[number] = PRESENT
        return data

    def adopt(self, new: BlockFile) -> None:
        """Take over the content of `new`, which has the same name and as many blocks.

        Consume queues hold references to this object.
        """
        assert (new.name, new.row_count) == (self.name, self.row_count), "the same file again"
        self._directory, self._verified = new._directory, new._verified
        self._changes = new._changes

    def advise(self) -> None:
        """Announce that all of the file will be read soon; a hint."""
        self._mappings.advise(self.name)


def open_block_file(mappings: Mappings, name: str, magic: int, damaged: DamagedFiles) -> BlockFile:
    """Open a derived file of an earlier process. Raises BlockFileDamaged."""
    try:
        view = mappings.readable(name, 0, block_file.HEADER_SIZE)
        mappings.readable(name, 0, block_file.directory_end(view, magic))
    except PageUnreadable as error:
        raise BlockFileDamaged(str(error)) from error
    header = block_file.decode_header(view, magic)
    # No checksum covers the range in the header, but the name repeats it. A torn header of an
    # unfinished file may have a right checksum.
    from_offset, to_offset, _ = header
    if name != file_name(name.rpartition("/")[0], from_offset=from_offset, to_offset=to_offset):
        raise BlockFileDamaged(f"{name} has the range {from_offset} to {to_offset} in its header")
    return BlockFile(mappings, name, header, magic=magic, damaged=damaged, size_bytes=len(view))


def open_chain(
    disk: Disk,
    mappings: Mappings,
    folder: str,
    magic: int,
    damaged: DamagedFiles,
    *,
    to_offset: int,
) -> list[BlockFile]:
    """Open the files that join up to `to_offset`, oldest first, and delete all others.

    If several files begin at one offset, the widest one is valid: it replaced the others, and the
    later files that it covers. A damaged file without a replacement ends the chain; it and all
    later files are rebuilt.
    """
    files = []
    names = disk.names(folder)
    for name in names:
        try:
            file = open_block_file(mappings, name, magic, damaged)
        except (BlockFileDamaged, ValueError):
            continue
        if file.to_offset <= to_offset:
            files.append(file)
    chain: list[BlockFile] = []
    for file in sorted(files, key=lambda one: (one.from_offset, -one.to_offset)):
        if not chain or file.from_offset == chain[-1].to_offset:
            chain.append(file)
    for name in set(names).difference(file.name for file in chain):
        mappings.forget(name)
        disk.delete(name)
    return chain
