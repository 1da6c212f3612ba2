"""Tools that are built once per machine (`tools/cached_build.py`)."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tools import cached_build

SCRIPT = Path(cached_build.__file__)
BUILD = 'echo built >> "$OUT/../../log"; cp input "$OUT/program"'


@pytest.fixture(autouse=True)
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with one input, and an empty cache beside it."""
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / "input").write_text("1")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def build(command: str = BUILD, *more: str) -> int:
    return cached_build.main(["it", "--input", "input", "--link", "bin", *more, "--", command])


def build_count() -> int:
    return len((cached_build.cache_folder() / "log").read_text().splitlines())


def test_a_second_tree_uses_the_first_build(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build() == 0
    other = tree.with_name("other")
    other.mkdir()
    (other / "input").write_text("1")
    monkeypatch.chdir(other)
    assert build() == 0
    assert (other / "bin" / "program").read_text() == "1"
    assert build_count() == 1


def test_a_changed_input_is_built_and_linked(tree: Path) -> None:
    build()
    (tree / "input").write_text("2")
    build()
    assert (tree / "bin" / "program").read_text() == "2"
    (tree / "input").write_text("1")
    build()
    assert (tree / "bin" / "program").read_text() == "1"
    assert build_count() == 2


def test_a_changed_command_and_a_changed_key_are_built() -> None:
    build()
    build(f"{BUILD}; true")
    build(BUILD, "--key", "version 2")
    assert build_count() == 3


def test_a_failed_build_is_shown_and_leaves_nothing(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build('echo half > "$OUT/program"; echo no such module; exit 1') == 1
    assert "no such module" in capsys.readouterr().err
    assert not (tree / "bin").exists()
    assert [path.suffix for path in cached_build.cache_folder().iterdir()] == [".lock"]


def test_a_build_without_a_result_failed(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A later run repeats it."""
    assert build("true") == 1
    assert capsys.readouterr().err.endswith(" s: building it failed\nit built nothing\n")
    assert not (tree / "bin").exists()
    assert build() == 0


def test_a_folder_and_a_dangling_link_are_replaced(tree: Path) -> None:
    (tree / "bin").mkdir()
    (tree / "bin" / "old").touch()
    build()
    assert [path.name for path in (tree / "bin").iterdir()] == ["program"]
    (tree / "bin").unlink()
    (tree / "bin").symlink_to(tree / "nowhere")
    build()
    assert (tree / "bin" / "program").is_file()


def test_a_build_reports_itself_with_the_elapsed_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_build, "_BEGAN_S", time.time() - 100)
    assert build() == 0
    steps = [line.partition(" s: ") for line in capsys.readouterr().err.splitlines()]
    assert [step for _, _, step in steps] == ["building it, once per machine", "built it"]
    assert all(100 <= int(begin.removeprefix("setup: ")) < 200 for begin, _, _ in steps)
    assert build() == 0
    assert capsys.readouterr().err == "", "the tool is built"


def test_a_long_build_reports_that_it_goes_on(tree: Path) -> None:
    """The build ends after its second report."""
    program = "from tools import cached_build as c; c.REPORT_S = 0.01; c.main(['it', '--', 'C'])"
    command = f"until test -e {tree}/go; do sleep 0.01; done; {BUILD}"
    with subprocess.Popen(
        [sys.executable, "-c", program.replace("'C'", repr(command))],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(3)]
        (tree / "go").touch()
        lines += process.stderr.readlines()
    assert process.returncode == 0
    steps = [line.partition(" s: ")[2] for line in lines]
    assert steps[0] == "building it, once per machine\n"
    assert steps[1:3] == ["still building it\n"] * 2
    assert steps[-1] == "built it\n"


def test_a_build_that_waits_for_another_one_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    key = cached_build.cache_key(BUILD, "", [Path("input")])
    cached_build.cache_folder().mkdir(parents=True)
    with (cached_build.cache_folder() / f"it-{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(build)
            eventually(lambda: "waiting for another build of it" in seen(capsys))
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert waiting.result() == 0


def seen(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


def test_a_deleted_cache_is_filled_again(tree: Path) -> None:
    build()
    subprocess.run(["rm", "-r", cached_build.cache_folder()], check=True)
    build()
    assert (tree / "bin" / "program").is_file()


def test_a_build_deletes_results_that_were_not_used_for_a_month(tree: Path) -> None:
    build()
    (old,) = cached_build.cache_folder().glob("it-*[!k]")
    os.utime(old, (0, 0))
    build()
    assert old.stat().st_mtime > 0, "a use is noted"
    os.utime(old, (0, 0))
    build(f"{BUILD}; true")
    assert not old.exists()


def test_a_missing_program_is_reported_without_failure(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(BUILD, "--needs", "no-such-program", "--skipped", "nothing is tested") == 0
    assert capsys.readouterr().err == "no-such-program is missing: nothing is tested\n"
    assert not (tree / "bin").exists()


def test_parallel_builds_run_the_command_once() -> None:
    line = [
        sys.executable,
        str(SCRIPT),
        "it",
        "--input",
        "input",
        "--link",
        "bin",
        f"sleep 0.2; {BUILD}",
    ]
    processes = [subprocess.Popen(line, stderr=subprocess.DEVNULL) for _ in range(3)]
    assert [process.wait(30) for process in processes] == [0, 0, 0]
    assert build_count() == 1
