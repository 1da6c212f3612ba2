"""Log options of Spark's JVM at a start by a program and by a job. Starts no JVM."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.status import SparkStageInfo

from tests.support.eventually import eventually
from tidemill_pipeline import session, shared_classes
from tidemill_pipeline.jobs import running

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUIET = "log4j2-quiet.properties"
WARNINGS = "log4j2-program.properties"
THEIRS = "-Dlog4j2.configurationFile=theirs.xml"
CONF = "spark.driver.extraJavaOptions -Dx=1\n"
RUN_S = 600.0
KEPT = bool(shared_classes.options_to_use(""))
# Lets Spark compute the JVM's command line, and writes it to a file instead of starting the JVM.
JAVA = """\
#!/bin/sh
case "$*" in *org.apache.spark.launcher.Main*) exec {java} "$@" ;; esac
printf '%s\\n' "$@" > {written}
exit 1
"""
PROGRAM = """\
import sys
from tidemill_pipeline.errors import PipelineError
from tidemill_pipeline.session import build_spark
options = {"spark.driver.extraJavaOptions": sys.argv[2]} if sys.argv[2] else {}
try:
    build_spark("program", settings=options, has_queries=False, is_job=sys.argv[1] == "job")
except PipelineError:
    pass
"""


def run_program(program: Sequence[str], variables: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", *program],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode()


@pytest.mark.parametrize(
    ("of", "options", "variables", "conf", "logs"),
    [
        ("program", "", {}, None, [WARNINGS]),
        ("job", "", {}, None, [QUIET]),
        # The last option wins.
        ("program", THEIRS, {}, None, [WARNINGS, "theirs.xml"]),
        ("program", "", {"SPARK_SUBMIT_OPTS": THEIRS}, None, [WARNINGS, "theirs.xml"]),
        # An option would hide the file on the class path.
        ("program", "", {}, "log4j2.properties", []),
        ("program", "", {"LOG4J_CONFIGURATION_FILE": "theirs.xml"}, None, []),
        ("program", "", {"JAVA_TOOL_OPTIONS": THEIRS}, None, []),
        # A template is not a configuration. The options of an installation are kept.
        ("program", "", {}, "log4j2.properties.template", [WARNINGS]),
        ("job", "", {}, "spark-defaults.conf", [QUIET]),
    ],
)
def test_the_user_sets_the_log_level_of_spark(
    tmp_path: Path,
    of: str,
    options: str,
    variables: dict[str, str],
    conf: str | None,
    logs: list[str],
) -> None:
    home, folder, written = tmp_path / "java", tmp_path / "conf", tmp_path / "written"
    (home / "bin").mkdir(parents=True)
    java = home / "bin" / "java"
    real = f"{os.environ['JAVA_HOME']}/bin/java" if "JAVA_HOME" in os.environ else "java"
    java.write_text(JAVA.format(java=real, written=written))
    java.chmod(0o755)
    folder.mkdir()
    if conf is not None:
        (folder / conf).write_text(CONF if conf.startswith("spark") else "")
    given = {"JAVA_HOME": str(home), "SPARK_CONF_DIR": str(folder), **variables}
    run_program([PROGRAM, of, options], given)
    words = written.read_text().splitlines()
    found = [word for word in words if word.startswith("-Dlog4j2")]
    assert [word.rpartition("/")[2].rpartition("=")[2] for word in found] == logs
    for word in found:
        path = word.partition("=file://")[2]
        assert not path or Path(path).parent == Path(session.__file__).parent
        assert not path or Path(path).exists()
    assert ("-Dx=1" in words) == (conf == "spark-defaults.conf")


@pytest.mark.skipif(
    not KEPT and "CI" not in os.environ,
    reason="this Java keeps no classes, or nobody has asked it to",
)
def test_spark_starts_with_the_classes_that_java_has_kept(tmp_path: Path) -> None:
    """Otherwise each job finds, checks and loads them in all JARs: most of its start time."""
    loaded = tmp_path / "loaded"
    program = "from tidemill_pipeline.session import build_spark; build_spark('p').stop()"
    given = {"SPARK_SUBMIT_OPTS": f"-Xlog:class+load:file={loaded} -XX:TieredStopAtLevel=1"}
    run_program([program], given)
    lines = loaded.read_text().splitlines()
    # Except the classes that Java creates for lambdas at run time.
    of_spark = [line for line in lines if "] org.apache.spark." in line and "Lambda$" not in line]
    kept = [line for line in of_spark if "shared objects file (top)" in line]
    assert len(of_spark) > 1000
    assert len(kept) > len(of_spark) * 0.9


def test_a_long_step_reports_progress(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "REPORT_ELSEWHERE_S", 0.01)
    said: list[str] = []
    with running.watching(spark, said.append, "reading"):
        eventually(lambda: len(said) > 2, within_ms=60_000)
    assert said[:2] == ["reading", "reading: 0 s"]
    stages = [SparkStageInfo(1, 0, "a stage", 5, 0, done, 0) for done in (5, 1)]
    assert running.task_progress("reading", 1234, stages) == "reading: 1,234 s, 6 of 10 tasks"
