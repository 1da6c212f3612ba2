"""Classes of Spark that Java keeps between two starts: class data sharing (ADR 0057).

The file is `spark-VERSION-BYTES.jsa`: a part of one, which would end the JVM that maps it, is seen
by its size, and a bit that has flipped in it by Java's own checksum. Needs neither Spark nor Java.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

# Options that the JVM of a driver is started with, before those of `spark.driver.extraJavaOptions`.
JAVA_OPTIONS: Final = "SPARK_SUBMIT_OPTS"
_MAKE: Final = "-XX:ArchiveClassesAtExit="
_USE: Final = "-XX:SharedArchiveFile="
# Of a file that is another Java's, and of classes that cannot be kept, nobody wants to be told.
_SILENT: Final = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off")


@contextlib.contextmanager
def java_options(ours: Sequence[str]) -> Iterator[None]:
    """Have a JVM that is started in the block take these options, too.

    Of options that are there twice Java takes the last, and those that somebody gives come later.
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
    """Return where the file lies: with the Python environment that has PySpark."""
    return Path(sys.prefix) / "share" / "tidemill"


def options_to_make(draft: Path) -> list[str]:
    """Return what has a JVM write the file at its end; its life is too short to compile much."""
    return [f"{_MAKE}{draft}", "-XX:TieredStopAtLevel=1", *_SILENT]


def keep(draft: Path) -> Path:
    """Let a whole file be the one that is used, and no other; return it. Raises OSError."""
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    path = folder() / f"{_begin()}{draft.stat().st_size}.jsa"
    before = set(folder().glob("spark-*.jsa"))
    draft.replace(path)
    for other in before - {path}:
        other.unlink(missing_ok=True)
    return path


def options_to_use(given: str) -> list[str]:
    """Return what has a JVM use the file; nothing where there is none, or `given` speaks of one."""
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
