"""Manifests of `deploy/spark`: they start a job with valid options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tidemill.cli.app import app

DEPLOY = Path(__file__).parents[3] / "deploy" / "spark"
MAIN = "local:///opt/tidemill/main.py"


def kubeflow(spec: Mapping[str, Any]) -> tuple[str, list[str], str, list[Mapping[str, Any]]]:
    """Return the job's program, arguments, image and container security settings."""
    of = spec["template"]
    held = [of[name]["securityContext"] for name in ("driver", "executor")]
    return of["mainApplicationFile"], of["arguments"], of["image"], held


def apache(spec: Mapping[str, Any]) -> tuple[str, list[str], str, list[Mapping[str, Any]]]:
    """Return the same facts of a manifest for the other operator."""
    held = []
    for name in ("driverSpec", "executorSpec"):
        (container,) = spec[name]["podTemplateSpec"]["spec"]["containers"]
        held.append(container["securityContext"])
    image = spec["sparkConf"]["spark.kubernetes.container.image"]
    return spec["pyFiles"], spec["driverArgs"], image, held


@pytest.mark.parametrize(
    ("file", "read"), [("application.yaml", kubeflow), ("application-apache.yaml", apache)]
)
def test_an_operator_starts_a_job_with_options_that_it_has(file: str, read: Any) -> None:
    manifest = yaml.safe_load((DEPLOY / file).read_text())
    main, arguments, image, held = read(manifest["spec"])
    assert (main, image) == (MAIN, "tidemill-spark:dev")
    assert all(each["capabilities"] == {"drop": ["ALL"]} for each in held)
    # The job prints its help after it has parsed all options. An unknown option fails.
    asked = CliRunner().invoke(app, ["pipeline", *arguments, "--help"])
    assert asked.exit_code == 0, asked.output
    wrong = CliRunner().invoke(app, ["pipeline", *arguments, "--nonsense", "--help"])
    assert wrong.exit_code != 0
