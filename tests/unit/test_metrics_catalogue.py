"""Tidemill exports each metric of the catalogue, or the catalogue gives the reason for its absence.

These tests compare the catalogue with docs/metrics.md. Another test compares that page with real
processes. The tests fail if a metric gets a new name or loses a label that dashboards use.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.processes.exposed import ExposedMetric, parse

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
CATALOGUE = Path(__file__).with_name("metrics_catalogue.tsv")
ABSENT = "absent"


class CatalogueEntry(NamedTuple):
    """One line of the catalogue."""

    name: str
    type: str
    labels: str  # For an absent metric: the reason.
    processes: str = ""


def catalogue() -> list[CatalogueEntry]:
    lines = CATALOGUE.read_text("utf-8").splitlines()
    return [CatalogueEntry(*line.split("\t")) for line in lines if not line.startswith("#")]


@pytest.fixture(scope="module")
def exported() -> dict[str, ExposedMetric]:
    return parse(PAGE.read_text("utf-8"))


@pytest.mark.parametrize("wanted", catalogue(), ids=lambda wanted: wanted.name)
def test_a_metric_of_the_catalogue_is_exported_or_listed_as_absent(
    wanted: CatalogueEntry, exported: dict[str, ExposedMetric]
) -> None:
    found = exported.get(wanted.name)
    if wanted.type == ABSENT:
        assert found is None, "the metric exists now: add its labels to the catalogue"
        assert wanted.labels, "the catalogue gives no reason for the absence"
        return
    assert found is not None
    assert found.type == wanted.type
    assert set(wanted.labels.split()) <= found.labels
    assert set(wanted.processes.split(", ")) == found.processes


def test_the_catalogue_names_a_metric_once() -> None:
    names = [wanted.name for wanted in catalogue()]
    assert names == sorted(set(names))
