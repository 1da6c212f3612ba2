"""Footers of an archive's files, each checked against its checksum in the manifest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.worlds.archiving import ArchiveWorld
from tests.support.worlds.fake_cluster import FakeCluster
from tidemill_pipeline.archive.reading import read_footer
from tidemill_pipeline.archive.store import ArchiveStore
from tidemill_pipeline.errors import ArchiveError


@pytest.fixture
def archive(cluster: FakeCluster, tmp_path: Path) -> ArchiveWorld:
    made = ArchiveWorld(cluster, tmp_path)
    cluster.add("orders", "a", 0, 20)
    made.append()
    return made


def test_no_byte_of_a_footer_changes_without_an_error(archive: ArchiveWorld) -> None:
    assert archive.verify().wrong == []
    (path,) = archive.files()
    whole = path.read_bytes()
    with ArchiveStore(archive.path).open(next(iter(archive.manifest().files))) as opened:
        size = len(read_footer(opened))
    assert archive.bodies()
    places = [*range(len(whole) - size, len(whole), 13), *range(len(whole) - 8, len(whole))]
    for at in places:
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        with pytest.raises(ArchiveError, match=path.name):
            archive.bodies()
    path.write_bytes(whole + b"more")
    with pytest.raises(ArchiveError, match=f"has {len(whole) + 4} bytes"):
        archive.bodies()
    path.write_bytes(b"")
    with pytest.raises(ArchiveError, match="has 0 bytes"):
        archive.bodies()


def test_a_damaged_footer_is_not_sealed_nor_compacted(
    archive: ArchiveWorld, cluster: FakeCluster
) -> None:
    (path,) = archive.files()
    cluster.add("orders", "a", 0, 20)
    archive.append()
    whole = path.read_bytes()
    # A changed byte in the name of the writer, which readers ignore.
    at = whole.rindex(b"parquet-cpp-arrow")
    path.write_bytes(whole[:at] + b"P" + whole[at + 1 :])
    (wrong,) = archive.verify().wrong
    assert f"{path.name} is damaged: its footer" in wrong
    assert archive.sealed() == [("orders", 0, 40)]
    with pytest.raises(ArchiveError, match=path.name):
        archive.compact()
