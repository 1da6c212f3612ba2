"""The removal of a replica's store from its data directory."""

from __future__ import annotations

from pathlib import Path

from tidemill.broker.data_dir import empty_store, is_half_emptied


def test_only_the_store_is_deleted_and_no_other_store_in_its_folder(tmp_path: Path) -> None:
    for kept in ("lock", "replica/state.a", "broker-0-1/log/0", "controller-0/groups.sqlite"):
        (tmp_path / kept).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / kept).touch()
    for deleted in ("log/0", "queues/orders/0", "checkpoint", "checkpoint.new", "timer/state/0"):
        (tmp_path / deleted).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / deleted).touch()
    empty_store(tmp_path)
    remaining = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert remaining == {
        "lock",
        "replica/state.a",
        "broker-0-1/log/0",
        "controller-0/groups.sqlite",
    }
    assert not is_half_emptied(tmp_path)
