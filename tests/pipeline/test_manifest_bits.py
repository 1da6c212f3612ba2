"""What becomes of the manifest of an archive: changed, away, unreadable. Without Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.worlds.archiving import NOW_MS, ArchiveWorld
from tests.support.worlds.fake_cluster import FakeCluster
from tidemill_pipeline.archive.store import SNAPSHOT_ENTRIES, ArchiveStore
from tidemill_pipeline.errors import ArchiveError
from tidemill_pipeline.jobs.archive_upkeep import vacuum


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
    cluster: FakeCluster, archive: ArchiveWorld
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
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 3)
    archive.append()
    for _ in range(SNAPSHOT_ENTRIES):
        archive.job().commit("append")
    before = archive.manifest()
    (path,) = Path(archive.path).glob("manifest/*.snapshot.json")
    check_every_bit(path, archive.path)
    assert archive.manifest() == before


def test_a_reader_finds_a_vacuumed_archive_again_after_it_was_unavailable(
    cluster: FakeCluster, archive: ArchiveWorld, tmp_path: Path
) -> None:
    cluster.add("orders", "a", 0, 3)
    archive.append()
    for _ in range(SNAPSHOT_ENTRIES):
        archive.job().commit("append")
    # The files are of now; to a job of years later they are old.
    assert vacuum(archive.job(now_ms=2 * NOW_MS)) == SNAPSHOT_ENTRIES - 1
    before = archive.manifest()
    to, away = Path(archive.path), tmp_path / "away"
    to.rename(away)
    store = ArchiveStore(archive.path)
    assert not store.has_entries
    away.rename(to)
    assert store.archive() == before


def test_an_unreadable_manifest_is_an_error(
    cluster: FakeCluster, archive: ArchiveWorld, tmp_path: Path
) -> None:
    cluster.add("orders", "a", 0, 3)
    archive.append()
    store = ArchiveStore(archive.path)
    before = store.archive()
    manifest = Path(archive.path) / "manifest"
    manifest.rename(tmp_path / "away")
    manifest.touch()
    for _ in range(2):
        with pytest.raises(ArchiveError, match=f"^{archive.path} cannot be read: "):
            store.archive()
    manifest.unlink()
    (tmp_path / "away").rename(manifest)
    assert store.archive() == before
