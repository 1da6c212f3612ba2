"""What a disk does to the manifest of an archive. Without a session of Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.archiving import Archived
from tests.support.fake_cluster import FakeCluster
from tidemill.pipeline.archive.store import SNAPSHOT_ENTRIES, ArchiveStore
from tidemill.pipeline.errors import ArchiveError


def check_every_bit(path: Path, store: str) -> None:
    """Change each bit of a file of the manifest, and see that an error names the file."""
    whole = path.read_bytes()
    for at in range(8 * len(whole)):
        data = bytearray(whole)
        data[at // 8] ^= 1 << at % 8
        path.write_bytes(data)
        with pytest.raises(ArchiveError, match=path.name):
            ArchiveStore(store).archive()
    path.write_bytes(whole)


def test_no_bit_of_an_entry_changes_without_an_error(
    cluster: FakeCluster, archive: Archived
) -> None:
    cluster.add("orders", "a", 0, 3)
    archive.append()
    assert archive.verify().wrong == []
    before = archive.manifest()
    entries = sorted(Path(archive.path).glob("manifest/*.json"))
    assert len(entries) == 2, "what was archived, and its seal"
    for path in entries:
        check_every_bit(path, archive.path)
    assert archive.manifest() == before


def test_no_bit_of_a_snapshot_changes_without_an_error(
    cluster: FakeCluster, archive: Archived
) -> None:
    cluster.add("orders", "a", 0, 3)
    archive.append()
    for _ in range(SNAPSHOT_ENTRIES):
        archive.job().commit("append")
    before = archive.manifest()
    (path,) = Path(archive.path).glob("manifest/*.snapshot.json")
    check_every_bit(path, archive.path)
    assert archive.manifest() == before
