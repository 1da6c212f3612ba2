"""The example of docs/kubernetes/autoscaling.md is a valid trigger."""

from __future__ import annotations

from pathlib import Path

import yaml

from tidemill.admin.scaling.trigger import OURS, DemandQuery, read_trigger

ROOT = Path(__file__).resolve().parents[4]


def test_the_example_is_a_trigger() -> None:
    text = (ROOT / "examples/kubernetes/scaledobject.yaml").read_text("utf-8")
    [trigger] = yaml.safe_load(text)["spec"]["triggers"]
    assert trigger["type"] == "external-push"
    assert read_trigger(trigger["metadata"]).query == DemandQuery("billing", "orders", 60)


def test_every_key_is_documented() -> None:
    page = (ROOT / "docs/kubernetes/autoscaling.md").read_text("utf-8")
    assert [key for key in OURS if f"| `{key}` |" not in page] == []
