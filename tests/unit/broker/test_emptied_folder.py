"""A replica's store is taken away, and nothing else of its folder."""

from __future__ import annotations

from pathlib import Path

from tidemill.broker.data_dir import emptied, wants_to_be_emptied


def test_only_the_store_is_taken_away_and_never_another_one_in_its_folder(tmp_path: Path) -> None:
    for kept in ("lock", "replica/state.a", "broker-0-1/log/0", "controller-0/groups.sqlite"):
        (tmp_path / kept).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / kept).touch()
    for taken in ("log/0", "queues/orders/0", "checkpoint", "checkpoint.new", "timer/state/0"):
        (tmp_path / taken).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / taken).touch()
    emptied(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"lock", "replica/state.a", "broker-0-1/log/0", "controller-0/groups.sqlite"}
    assert not wants_to_be_emptied(tmp_path)
