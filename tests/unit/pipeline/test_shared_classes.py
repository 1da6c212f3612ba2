"""The choice of Java's file of shared classes. Without Java and without Spark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tidemill_pipeline import shared_classes
from tidemill_pipeline.errors import PipelineError
from tidemill_pipeline.shared_classes import keep, keep_written, options_to_make, options_to_use


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


def test_a_shared_archive_is_used_after_its_creation() -> None:
    assert options_to_use("") == []
    path = made(1000)
    first, *others = options_to_use("-Dx=1")
    assert first == f"-XX:SharedArchiveFile={path}"
    # Java checks the checksums of the file, as it runs the mapped code.
    assert "-XX:+VerifySharedSpaces" in others


def test_a_new_shared_archive_replaces_the_old_one() -> None:
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
def test_user_options_about_shared_archives_are_unchanged(given: str | None) -> None:
    made(1000)
    if given is None:
        given = " ".join(options_to_make(Path("draft")))
    assert options_to_use(given) == []


def java(script: str) -> subprocess.Popen[bytes]:
    """Start a shell script in place of a Java that writes the draft."""
    return subprocess.Popen(["sh", "-c", script], cwd=shared_classes.folder())


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (
            "echo part > draft; kill -9 $$",
            "Java ended with status -9 while it wrote the class file",
        ),
        ("echo part > draft; exit 1", "Java ended with status 1 while it wrote the class file"),
        ("true", "Java wrote no class file; run java -Xshare:dump first"),
    ],
)
def test_a_file_of_a_failed_java_is_never_published(script: str, sentence: str) -> None:
    old = made(1000)
    draft = shared_classes.folder() / "draft"
    with pytest.raises(PipelineError, match=sentence):
        keep_written(java(script), draft, timeout_s=60)
    assert options_to_use("")[0].endswith(old.name)


def test_a_java_that_does_not_end_is_killed() -> None:
    endless = java("echo part > draft; exec sleep 600")
    with pytest.raises(PipelineError, match="did not write the class file within 0 s"):
        keep_written(endless, shared_classes.folder() / "draft", timeout_s=0)
    assert endless.poll() == -9
    assert options_to_use("") == []


def test_the_file_of_a_java_that_succeeded_is_published() -> None:
    path = keep_written(java("echo whole > draft"), shared_classes.folder() / "draft", timeout_s=60)
    assert options_to_use("")[0].endswith(path.name)
