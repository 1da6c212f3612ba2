"""Class data sharing of Java: a file of Spark's classes for faster starts (ADR 0057).

The file is `spark-VERSION-BYTES.jsa`. A truncated file would crash the JVM; its size reveals it.
Java's own checksum reveals flipped bits. This module needs neither Spark nor Java.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

from tidemill_pipeline.errors import PipelineError

# Java options of a driver's JVM, before those of `spark.driver.extraJavaOptions`.
JAVA_OPTIONS: Final = "SPARK_SUBMIT_OPTS"
_MAKE: Final = "-XX:ArchiveClassesAtExit="
_USE: Final = "-XX:SharedArchiveFile="
# Without warnings about a file of another Java and about classes that cannot be shared.
_SILENT: Final = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off")


@contextlib.contextmanager
def java_options(ours: Sequence[str]) -> Iterator[None]:
    """Add options for a JVM that starts in the block.

    Options of the user follow ours. If an option occurs twice, Java uses the last.
    """
    before = os.environ.get(JAVA_OPTIONS)
    os.environ[JAVA_OPTIONS] = " ".join([*ours, before or ""]).rstrip()
    try:
        yield
    finally:
        if before is None:
            del os.environ[JAVA_OPTIONS]
        else:
            os.environ[JAVA_OPTIONS] = before


def folder() -> Path:
    """Return the folder of the file, in the Python environment that has PySpark."""
    return Path(sys.prefix) / "share" / "tidemill"


def options_to_make(draft: Path) -> list[str]:
    """Return the options for a JVM that writes the file at its end."""
    return [f"{_MAKE}{draft}", "-XX:TieredStopAtLevel=1", *_SILENT]


def keep_written(java: subprocess.Popen[bytes], draft: Path, *, timeout_s: float) -> Path:
    """Wait for the end of a Java that writes the file, and publish the file. Raises PipelineError.

    A Java that was killed may leave a part of the file.
    """
    try:
        status = java.wait(timeout_s)
    except subprocess.TimeoutExpired:
        java.kill()
        java.wait()
        raise PipelineError(
            f"Java did not write the class file within {timeout_s:,.0f} s. Repeat this command when"
            " the machine is less busy"
        ) from None
    if status != 0:
        raise PipelineError(
            f"Java ended with status {status} while it wrote the class file. Check the free memory"
            f" and the space below {folder()}, then repeat this command"
        )
    if not draft.is_file():
        raise PipelineError(
            "Java wrote no class file; run java -Xshare:dump first, then repeat this command"
        )
    return keep(draft)


def keep(draft: Path) -> Path:
    """Publish a complete file, delete others, and return its path. Raises OSError."""
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    path = folder() / f"{_begin()}{draft.stat().st_size}.jsa"
    before = set(folder().glob("spark-*.jsa"))
    draft.replace(path)
    for other in before - {path}:
        other.unlink(missing_ok=True)
    return path


def options_to_use(given: str) -> list[str]:
    """Return the options to use the file; empty if it is missing or `given` names another one."""
    found = _kept()
    if found is None or _MAKE in given or _USE in given:
        return []
    return [f"{_USE}{found}", "-XX:+VerifySharedSpaces", "-Xshare:auto", *_SILENT]


def _kept() -> Path | None:
    for path in folder().glob(f"{_begin()}*.jsa"):
        if path.name == f"{_begin()}{path.stat().st_size}.jsa":
            return path
    return None


def _begin() -> str:
    return f"spark-{version('pyspark')}-"
