"""The pipeline's jobs on Kubernetes: the command of `submit`, and the start of the image."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest

ENTRYPOINT = Path(__file__).resolve().parents[3] / "deploy" / "spark" / "entrypoint"
SUBMIT = ENTRYPOINT.with_name("submit")
# As Spark sets them in a pod.
OF_DRIVER = {"SPARK_DRIVER_BIND_ADDRESS": "10.1.2.3"}
OF_EXECUTOR = {
    "SPARK_DRIVER_URL": "spark://driver:7078",
    "SPARK_EXECUTOR_ID": "1",
    "SPARK_EXECUTOR_CORES": "2",
    "SPARK_EXECUTOR_MEMORY": "2048m",
    "SPARK_APPLICATION_ID": "spark-1",
    "SPARK_EXECUTOR_POD_IP": "10.1.2.4",
    "SPARK_RESOURCE_PROFILE_ID": "0",
    "SPARK_EXECUTOR_POD_NAME": "archive-exec-1",
    "SPARK_CONF_DIR": "/opt/spark/conf",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Programs that print their arguments, one per line."""
    for name in ("bin/tidemill", "bin/java", "bin/spark-submit"):
        program = tmp_path / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho {program.name}\nprintf "%s\\n" "$@"\n', "utf-8")
        program.chmod(0o755)
    return tmp_path


def started(path: Path, *words: str, **variables: str) -> list[str]:
    done = subprocess.run(
        [ENTRYPOINT, *words],
        env={"PATH": f"{path}/bin:{os.environ['PATH']}", "SPARK_HOME": str(path), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_job_is_one_of_the_pipeline(path: Path) -> None:
    words = ["archive", "--to", "/a folder"]
    assert started(path, *words) == ["tidemill", "pipeline", *words]
    assert started(path, "--help") == ["tidemill", "pipeline", "--help"]


def test_a_driver_is_a_submit_within_its_pod(path: Path) -> None:
    found = started(path, "driver", "--class", "A", "local:///main.py", "archive", **OF_DRIVER)
    assert found == [
        "spark-submit",
        "--deploy-mode",
        "client",
        "--conf",
        "spark.driver.bindAddress=10.1.2.3",
        "--conf",
        "spark.executorEnv.SPARK_DRIVER_POD_IP=10.1.2.3",
        "--class",
        "A",
        "local:///main.py",
        "archive",
    ]


def test_an_executor_has_its_options_of_java_in_their_order(path: Path) -> None:
    options = {f"SPARK_JAVA_OPT_{n}": f"-Dn={n} of 11" for n in range(11)}
    found = started(path, "executor", **OF_EXECUTOR, **options)
    assert found[:12] == ["java", *options.values()]
    assert found[12:16] == ["-Xms2048m", "-Xmx2048m", "-cp", f"/opt/spark/conf:{path}/jars/*"]
    said = dict(zip(found[17::2], found[18::2], strict=True))
    assert said == {
        "--driver-url": "spark://driver:7078",
        "--executor-id": "1",
        "--cores": "2",
        "--app-id": "spark-1",
        "--hostname": "10.1.2.4",
        "--resourceProfileId": "0",
        "--podName": "archive-exec-1",
    }


def submitted(path: Path, *, says: str = "", status: int = 0) -> tuple[int, list[str]]:
    program = path / "bin" / "spark-submit"
    program.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@"\nprintf "{says}" >&2\nexit {status}\n', "utf-8"
    )
    done = subprocess.run(
        ["sh", SUBMIT, "archive", "--to", "/archive"],
        env={
            "PATH": f"{path}/bin:{os.environ['PATH']}",
            "MASTER": "k8s://here",
            "CLAIM": "kept",
            "SPARK_OPTIONS": "--conf spark.executor.memory=4g",
            "TMPDIR": str(path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert [each.name for each in path.iterdir()] == ["bin"], "it leaves nothing behind"
    return done.returncode, done.stdout.splitlines()


def test_a_submit_ends_as_its_driver_did(path: Path) -> None:
    assert submitted(path, says="\\t exit code: 0\\n")[0] == 0
    # Two reports: the last one counts.
    assert submitted(path, says="exit code: 0\\n\\t exit code: 2\\n")[0] == 2
    assert submitted(path, says="no such master\\n", status=3)[0] == 3


def test_a_submit_gives_all_pods_the_volume(path: Path) -> None:
    words = submitted(path)[1]
    assert words[-4:] == ["local:///opt/tidemill/main.py", "archive", "--to", "/archive"]
    confs = {after for word, after in itertools.pairwise(words) if word == "--conf"}
    for process in ("driver", "executor"):
        volume = f"spark.kubernetes.{process}.volumes.persistentVolumeClaim.archive"
        assert {f"{volume}.options.claimName=kept", f"{volume}.mount.path=/archive"} <= confs
    assert "spark.executor.memory=4g" in confs
    assert "spark.kubernetes.container.image=tidemill-spark:dev" in confs


def test_an_executor_without_the_spark_variables_is_an_error(path: Path) -> None:
    done = subprocess.run(
        [ENTRYPOINT, "executor"],
        env={"PATH": f"{path}/bin:{os.environ['PATH']}", "SPARK_HOME": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "SPARK_EXECUTOR_MEMORY" in done.stderr
