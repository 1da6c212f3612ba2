"""The choice of Java's file of shared classes. Without Java and without Spark."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tidemill_pipeline import shared_classes
from tidemill_pipeline.shared_classes import keep, options_to_make, options_to_use


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python environment that contains only a PySpark."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(shared_classes, "version", lambda _name: "4.3.0")
    shared_classes.folder().mkdir(parents=True)
    return tmp_path


def made(of_bytes: int) -> Path:
    draft = shared_classes.folder() / "draft"
    draft.write_bytes(b"x" * of_bytes)
    return keep(draft)


def test_what_is_made_is_used_from_then_on() -> None:
    assert options_to_use("") == []
    path = made(1000)
    first, *others = options_to_use("-Dx=1")
    assert first == f"-XX:SharedArchiveFile={path}"
    # Java checks the checksums of the file, as it runs the mapped code.
    assert "-XX:+VerifySharedSpaces" in others


def test_what_is_made_again_takes_its_place() -> None:
    old, new = made(1000), made(2000)
    assert [path.name for path in shared_classes.folder().iterdir()] == [new.name]
    assert not old.exists()
    assert options_to_use("")[0].endswith(new.name)


def test_a_part_of_a_file_would_end_the_java_that_maps_it() -> None:
    path = made(1000)
    path.write_bytes(path.read_bytes()[:-1])
    assert options_to_use("") == []


def test_another_pyspark_has_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made(1000)
    monkeypatch.setattr(shared_classes, "version", lambda _name: "4.3.1")
    assert options_to_use("") == []


@pytest.mark.parametrize("given", ["-XX:SharedArchiveFile=theirs.jsa", None])
def test_who_speaks_of_one_is_left_alone(given: str | None) -> None:
    made(1000)
    if given is None:
        given = " ".join(options_to_make(Path("draft")))
    assert options_to_use(given) == []
